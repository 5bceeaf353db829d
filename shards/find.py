"""Finds a sample by its key."""

import difflib
import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

from shards.errors import FormatError, ShardsError, counted, describe
from shards.foreign import key_of
from shards.index import REBUILD
from shards.manifest import Manifest, ShardEntry
from shards.reader import SplitReader

COCO_DIGITS = 12  # keys of COCO pictures; 1007 is asked for more often than 000000001007
_COMPARED = 2000  # keys around the wanted one that difflib looks at; all of a million would take a minute


def find_key(folder: Path, manifest: Manifest, key: str) -> tuple[SplitReader, int]:
    """The reader of the split that holds ``key``, and the sample's index in it.

    Raises:
        ShardsError: there is no such key; the nearest ones are named.
        FormatError: the index or the sample list that would tell is damaged.
    """
    damaged: list[FormatError] = []
    for name in dict.fromkeys((key, key.zfill(COCO_DIGITS) if key.isdigit() else key, key_of(key))):
        wanted = b'{"key":"%s",' % name.encode("utf-8", "replace")
        for split in manifest.splits:
            first = 0
            for shard in manifest.of_split(split):
                raw = read_checked(folder / shard.meta_name, shard.meta_sha256, damaged)
                at = raw.find(wanted)
                if at >= 0:  # lines have one width, so the place tells the number
                    return SplitReader(folder, split, manifest), first + at * shard.num_samples // len(raw)
                first += shard.num_samples
    if damaged:
        raise damaged[0]
    keys = sorted(m.key for split in manifest.splits for m in SplitReader(folder, split, manifest).metas())
    near = ", ".join(nearest(key, keys)) or "none, the dataset is empty"
    raise ShardsError(
        f"{folder}: key {key} is not among its {counted(len(keys), 'sample')}; nearest keys: {near}", key=key
    )


def require_index(folder: Path, shard: ShardEntry) -> None:
    """Check that a shard's index is the one that was written, so that no intact tar is blamed for it."""
    damaged: list[FormatError] = []
    read_checked(folder / shard.idx_name, shard.idx_sha256, damaged)
    if damaged:
        raise damaged[0]


def nearest(key: str, keys: Sequence[str]) -> list[str]:
    """Up to three of the sorted ``keys`` that look most like ``key``; those that end with it come first."""
    at = bisect_left(keys, key)
    around = keys[max(0, at - _COMPARED // 2) : at + _COMPARED // 2]
    ending = [k for k in keys if k.endswith(key)] if key else []
    return list(dict.fromkeys([*ending, *difflib.get_close_matches(key, around, n=3, cutoff=0)]))[:3]


def read_checked(path: Path, sha256: str, damaged: list[FormatError]) -> bytes:
    """The bytes of a file, none if it is absent or not what the manifest says, which is added to ``damaged``."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        damaged.append(FormatError(f"{describe(error)}; or {REBUILD}", path=path))
        return b""
    found = hashlib.sha256(raw).hexdigest()
    if found != sha256:
        damaged.append(FormatError(f"{path}: sha256 is {found}, the manifest says {sha256}; {REBUILD}", path=path))
        return b""
    return raw
