"""Finds a sample by its key, its id in the source, or the name of its file."""

import difflib
import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

from shards.errors import FormatError, UnknownKeyError, counted, describe
from shards.foreign import key_of
from shards.index import REBUILD
from shards.manifest import Manifest, ShardEntry
from shards.reader import SplitReader
from shards.sample import key_of_id

COCO_DIGITS = 12  # keys of COCO pictures; 1007 is asked for more often than 000000001007
_COMPARED = 2000  # keys around the wanted one that difflib looks at; all of a million would take a minute


def find_key(folder: Path, manifest: Manifest, key: str) -> tuple[SplitReader, int]:
    """The reader of the split that holds ``key``, and the sample's index in it.

    ``key`` may also be what KEY.json says: the image id, the file name, or the end of it behind a slash. Where no key can be
    made of it, every KEY.json is read.

    Raises:
        UnknownKeyError: there is no such sample, and the nearest keys are named; or there are several.
        FormatError: the index or the sample list that would tell is damaged.
    """
    damaged: list[FormatError] = []
    for name in possible_keys(key):
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
    if (found := _by_name(folder, manifest, key)) is not None:
        return found
    keys = sorted(m.key for split in manifest.splits for m in SplitReader(folder, split, manifest).metas())
    near = ", ".join(nearest(key, keys)) or "none, the dataset is empty"
    raise UnknownKeyError(
        f"{folder}: {key} is neither key, image id nor file name of its {counted(len(keys), 'sample')}; nearest keys: {near}",
        key=key,
    )


def possible_keys(text: str) -> list[str]:
    """The keys that a sample may have whose key, image id or name in a tar is ``text``."""
    padded = text.zfill(COCO_DIGITS) if text.isdigit() else text
    return list(dict.fromkeys((text, padded, key_of_id(text), key_of(text))))


def _by_name(folder: Path, manifest: Manifest, text: str) -> tuple[SplitReader, int] | None:
    found = []
    for split in manifest.splits:
        reader = SplitReader(folder, split, manifest)
        for index in range(len(reader)):
            meta = reader.read_json(index)
            name = str(meta.get("file_name", ""))
            if text in (name, str(meta.get("image_id"))) or name.endswith(f"/{text}"):
                found.append((reader, index, name))
    if len(found) > 1:
        names = ", ".join(f"{name} ({reader.key(index)})" for reader, index, name in found[:3])
        raise UnknownKeyError(
            f"{folder}: {text} names {len(found)} samples, such as {names}; give the key of one", key=text
        )
    return found[0][:2] if found else None


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
