"""Shards in, a fine-tuned captioner out: the loop, its checkpoints, its scores."""
