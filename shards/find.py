"""Finds a sample by its key."""

import difflib
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

from shards.errors import ShardsError
from shards.manifest import Manifest
from shards.reader import SplitReader

_COMPARED = 2000  # keys around the wanted one that difflib looks at; all of a million would take a minute


def find_key(folder: Path, manifest: Manifest, key: str) -> tuple[SplitReader, int]:
    """The reader of the split that holds ``key``, and the sample's index in it.

    Raises:
        ShardsError: there is no such key; the nearest ones are named.
    """
    wanted = b'{"key":"%s",' % key.encode("utf-8")
    for split in manifest.splits:
        first = 0
        for shard in manifest.of_split(split):
            raw = (folder / shard.meta_name).read_bytes()
            at = raw.find(wanted)
            if at >= 0:  # lines have one width, so the place tells the number
                return SplitReader(folder, split, manifest), first + at * shard.num_samples // len(raw)
            first += shard.num_samples
    keys = sorted(m.key for split in manifest.splits for m in SplitReader(folder, split, manifest).metas())
    near = ", ".join(nearest(key, keys)) or "none, the dataset is empty"
    raise ShardsError(f"{folder}: key {key} is not among its {len(keys)} samples; nearest keys: {near}", key=key)


def nearest(key: str, keys: Sequence[str]) -> list[str]:
    """Up to three of the sorted ``keys`` that look most like ``key``; those that end with it come first."""
    at = bisect_left(keys, key)
    around = keys[max(0, at - _COMPARED // 2) : at + _COMPARED // 2]
    ending = [k for k in keys if k.endswith(key)] if key else []
    return list(dict.fromkeys([*ending, *difflib.get_close_matches(key, around, n=3, cutoff=0)]))[:3]
