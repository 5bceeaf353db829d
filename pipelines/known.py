"""What a published dataset holds already: an addition brings nothing of it again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.filters import Reason
from pipelines.near_duplicates import BITS, near_pairs
from pipelines.records import id_bytes
from pipelines.spool import Numbers, Spool
from shards.manifest import Manifest
from shards.reader import SplitReader


@dataclass(frozen=True)
class Likeness:
    """Perceptual hashes of the pictures that can be compared, with key and split of each."""

    hashes: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    keys: Sequence[str] = ()
    splits: Sequence[str] = ()


@dataclass(frozen=True)
class Known:
    """Ids and hashes of source files by split, as sorted arrays, and the number of the next shard of each split."""

    ids: Mapping[str, Any] = field(default_factory=dict)  # of dtype S16, see records.id_bytes
    hashes: Mapping[str, Any] = field(default_factory=dict)  # of dtype S32, sha256
    next_numbers: Mapping[str, int] = field(default_factory=dict)
    likeness: Likeness = field(default_factory=Likeness)  # empty where it is not asked for

    def reject(self, spool: Spool, names: Sequence[str], duplicates: bool) -> None:
        """Reject the rows that the dataset has, by id or as a file in the same split, as leaks in another one.

        Without ``duplicates`` the same bytes may come again under another id.
        """
        table = spool.table
        for split, name in enumerate(names):
            for other in self.ids:
                rows = np.flatnonzero((table["split"] == split) & (table["verdict"] == 0))
                known = np.isin(table["id"][rows], self.ids[other])
                hashed = table["hashed"][rows]
                same = hashed & np.isin(table["facts"]["sha256"][rows], self.hashes[other])
                told = len(self.hashes[other]) == len(self.ids[other])  # tars of other tools do not say of which file
                changed = known & hashed & ~same if told else np.zeros_like(known)
                self._reject(spool, rows[known & ~changed], name, other, Reason.KNOWN_ID, "its image id")
                self._reject(spool, rows[changed], name, other, Reason.KNOWN_ID, "its image id, with another file,")
                if name != other or duplicates:
                    self._reject(spool, rows[same & ~known], name, other, Reason.DUPLICATE_IMAGE, "its file")

    def reject_alike(self, spool: Spool, names: Sequence[str], most_bits: int) -> None:
        """Reject rows whose picture is within so many bits of one of the dataset's; the first such is named."""
        table, known = spool.table, len(self.likeness.hashes)
        rows = np.flatnonzero((table["verdict"] == 0) & table["facts"]["comparable"])
        hashes = np.concatenate([self.likeness.hashes, table["facts"]["likeness"][rows]])
        pairs = near_pairs(hashes, most_bits)  # by the later one, then the earlier one
        pairs = pairs[(pairs[:, 0] < known) & (pairs[:, 1] >= known)]
        for earlier, later in pairs[np.unique(pairs[:, 1], return_index=True)[1]].tolist():
            row, key, other = int(rows[later - known]), self.likeness.keys[earlier], self.likeness.splits[earlier]
            bits = f"{int(hashes[earlier] ^ hashes[later]).bit_count()} of {BITS} bits differ"
            if names[table["split"][row]] == other:
                spool.reject(row, Reason.NEAR_DUPLICATE, f"is like {key} of the dataset: {bits}")
            else:
                spool.reject(row, Reason.SPLIT_LEAK, f"is like {key} in split {other} of the dataset: {bits}")

    def _reject(self, spool: Spool, rows: Numbers, split: str, other: str, reason: Reason, what: str) -> None:
        if split == other:
            spool.reject(rows, reason, f"{what} is in the dataset already")
        else:
            spool.reject(rows, Reason.SPLIT_LEAK, f"{what} is in split {other} of the dataset")


NOTHING_KNOWN = Known()


def of_dataset(detail: str) -> bool:
    """Whether a rejection's detail says that the dataset has the picture already."""
    return "the dataset" in detail


def read_known(folder: Path, manifest: Manifest) -> Known:
    """What the shards say of their samples; reads every KEY.json and no picture.

    Raises:
        FormatError: a shard is damaged.
    """
    ids, hashes, numbers = {}, {}, {}
    for split in manifest.splits:
        reader = SplitReader(folder, split, manifest)
        found = [reader.read_json(i) for i in range(len(reader))]
        ids[split] = np.array([id_bytes(meta["image_id"]) for meta in found], "S16")
        known = (meta.get("source", {}).get("sha256") for meta in found)
        hashes[split] = np.array([bytes.fromhex(digest) for digest in known if digest], "S32")
        numbers[split] = 1 + max(_number(shard.name) for shard in manifest.of_split(split))
    return Known(ids, hashes, numbers)


def _number(name: str) -> int:
    digits = name.removesuffix(".tar").rpartition("-")[2]
    return int(digits) if digits.isdigit() else -1
