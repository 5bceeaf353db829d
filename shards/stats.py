"""What is in a shard folder, in numbers."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shards.manifest import Manifest
from shards.reader import SplitReader


def folder_stats(folder: Path) -> dict[str, Any]:
    """Statistics per split: samples, bytes, sizes of pictures, captions, flags, balance of the shards."""
    manifest = Manifest.load(folder)
    return {
        "manifest_id": manifest.manifest_id,
        **({"parent": manifest.parent} if manifest.parent else {}),
        "splits": {split: split_stats(SplitReader(folder, split, manifest)) for split in manifest.splits},
    }


def split_stats(reader: SplitReader) -> dict[str, Any]:
    """Statistics of one split; lengths of captions are in words between spaces, sides in pixels."""
    widths, heights, image_bytes = [], [], []
    flags: Counter[str] = Counter()
    extensions: Counter[str] = Counter()
    captions_per_image: list[int] = []
    caption_words: list[int] = []
    for index, meta in enumerate(reader.metas()):
        widths.append(meta.width)
        heights.append(meta.height)
        image_bytes.append(meta.parts[0].num_bytes)
        flags.update(meta.flags)
        extensions[meta.parts[0].name] += 1
        captions = reader.read_json(index).get("captions", [])
        captions_per_image.append(len(captions))
        caption_words += [len(caption.split()) for caption in captions]
    return {
        "samples": len(reader),
        "bytes": sum(s.num_bytes for s in reader.shards),
        "captions": len(caption_words),
        "extensions": dict(sorted(extensions.items())),
        "flags": dict(sorted(flags.items())),
        "distributions": {
            "image bytes": distribution(image_bytes),
            "width in px": distribution(widths),
            "height in px": distribution(heights),
            "width / height": distribution(np.divide(widths, np.maximum(1, heights))),
            "captions per image": distribution(captions_per_image),
            "words per caption": distribution(caption_words),
            "samples per shard": distribution(reader.shard_sizes),
            "bytes per shard": distribution([s.num_bytes for s in reader.shards]),
        },
    }


def distribution(values: Sequence[float] | np.ndarray[Any, Any]) -> dict[str, float]:
    """Smallest, 5 %, median, mean, 95 % and largest value; empty if there are none."""
    if len(values) == 0:
        return {}
    low, p5, median, p95, high = np.percentile(values, [0, 5, 50, 95, 100]).tolist()
    return {"min": low, "p5": p5, "median": median, "mean": float(np.mean(values)), "p95": p95, "max": high}
