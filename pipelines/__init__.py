"""COCO Captions in, filtered WebDataset shards out."""
