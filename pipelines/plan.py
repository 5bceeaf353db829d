"""Which records go into which shard, and which are rejected before their pictures are decoded."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.captions import clean_captions
from pipelines.config import BuildConfig, FilterConfig
from pipelines.deal import Splits, join_repeated, keep_within_limits
from pipelines.errors import BuildError
from pipelines.filters import Reason, Rejection
from pipelines.fingerprint import seen
from pipelines.hashes import HashFiles, hash_all
from pipelines.images import Images, Stamp, open_images, where
from pipelines.known import NOTHING_KNOWN, Known, of_dataset
from pipelines.near_duplicates import BITS, settle
from pipelines.progress import Progress
from pipelines.records import Record
from pipelines.sources import Origin, Source
from pipelines.sources.paths import leads_out
from pipelines.spool import Numbers, Spool
from shards.errors import ConfigError, counted
from shards.sample import canonical_json

LOOKS_LIKE = "looks like image"  # begins the detail of a near duplicate
VERSION = 1  # raise it when the same records and settings give other bytes; finished shards are then built again


@dataclass(frozen=True)
class Slice:
    """The records of one shard, as numbers of rows; ``digest`` is the hash of all that the shard's bytes depend on."""

    name: str
    split: str
    numbers: Numbers
    digest: str


@dataclass(frozen=True)
class PlannedSplit:
    """A split of the build. ``counts`` says what in its sources was left aside; ``numbers``: its rows, in order."""

    name: str
    sources: tuple[Source, ...]
    source_numbers: tuple[int, ...]  # in the build
    names: tuple[str | None, ...]  # in the config
    counts: Mapping[str, int]
    numbers: Numbers

    @property
    def num_records(self) -> int:
        return len(self.numbers)


class Plan:
    """The splits and slices of a build; their records stay in the spool."""

    def __init__(
        self, config: BuildConfig, splits: Sequence[PlannedSplit], spool: Spool, first: Mapping[str, int]
    ) -> None:
        """``first`` is the number of the first shard of a split, 0 where it says nothing."""
        self.splits = tuple(splits)
        self._spool = spool
        self._limits = config.filters.written
        self._judged_by = asdict(config.filters.limits)
        self.slices = [
            self._slice(f"{split.name}-{first.get(split.name, 0) + i // size:06d}", split, split.numbers[i : i + size])
            for split in splits
            for size in [config.build.records_per_shard]
            for i in range(0, split.num_records, size)
        ]

    @property
    def num_records(self) -> int:
        return sum(split.num_records for split in self.splits)

    def _slice(self, name: str, split: PlannedSplit, numbers: Numbers) -> Slice:
        digest = hashlib.sha256()
        for part in self._content(name, split, self._spool.rows(numbers, split.source_numbers, placed=False)):
            digest.update(part)
        return Slice(name, split.name, numbers, digest.hexdigest())

    def _content(self, name: str, split: PlannedSplit, rows: Iterator[bytes]) -> Iterator[bytes]:
        """Canonical JSON of all that a shard's bytes depend on."""
        yield b'{"limits":%b,"name":%b,"records":[' % (canonical_json(self._limits), canonical_json(name))
        for i, row in enumerate(rows):
            yield b"," + row if i else row
        yield b'],"split":%b,"version":%d}' % (canonical_json(split.name), VERSION)

    def order(self, piece: Slice, about: Mapping[str, Any]) -> bytes:
        """What a build process is told: the slice's content, and what is said ``about`` paths."""
        split = next(s for s in self.splits if s.name == piece.split)
        rows = self._spool.rows(piece.numbers, split.source_numbers, placed=True)
        content = b"".join(self._content(piece.name, split, rows))
        more = {
            "digest": piece.digest,
            "judged_by": self._judged_by,
            "images": [s.images for s in split.sources],
            **about,
        }
        return content[:-1] + b"," + canonical_json(more)[1:]

    @property
    def num_alike(self) -> int:
        """Number of groups of near duplicates."""
        return len(np.unique(self._spool.table["owner"][self._lost]))

    @cached_property
    def _lost(self) -> Numbers:
        """Rows that gave way to another that they look like."""
        numbers = [i for i, r in enumerate(self._spool.rejections) if r and r.detail.startswith(LOOKS_LIKE)]
        return np.flatnonzero(np.isin(self._spool.table["verdict"], numbers))

    def alike(self, most: int) -> list[list[Mapping[str, Any]]]:
        """At most so many groups of near duplicates, the largest first: what stays, then what gave way to it."""
        owner_of = self._spool.table["owner"][self._lost]
        owners, sizes = np.unique(owner_of, return_counts=True)
        chosen = owners[np.lexsort((owners, -sizes))][:most].tolist()
        return [[self._about(int(i)) for i in (owner, *self._lost[owner_of == owner])] for owner in chosen]

    def _about(self, number: int) -> Mapping[str, Any]:
        """What a row of rejects.jsonl says, and where the picture is."""
        row, record = self._spool.table[number], self._spool.record(number)
        split = self.splits[row["split"]]
        rejection = self._spool.rejection(number)
        return {
            "split": split.name,
            "image_id": record["image_id"],
            "file_name": record["file_name"],
            "detail": rejection.detail if rejection else "",
            "place": self._spool.place(number),
            "source": split.source_numbers.index(row["source"]),
        }


def require_images(source: Source) -> None:
    """Look for images until one is found.

    Raises:
        ConfigError: not one of them is there, so the folder is the wrong one.
    """
    images, count, first = open_images(source.images), 0, None
    reasons = set()
    outside: list[str] = []
    for record in source.records():
        found = stamp(images, record)
        first, count = first or record, count + 1
        if not isinstance(found, Rejection) or found.reason not in (Reason.MISSING_FILE, Reason.UNREADABLE_FILE):
            return
        reasons.add(found.reason)
        if len(reasons) > 1:
            return
        if isinstance(record.file_name, str) and leads_out(record.file_name):
            folder = record.file_name.rpartition("/")[0] or "/"
            outside = [os.path.commonpath([*outside, folder])] if folder.startswith("/") else outside or [""]
    assert first is not None
    if outside:
        raise ConfigError(
            f"{where(source.images)}: not one image of {source.location} ({count}) is in it; for example "
            f"{first.file_name!a} leads out of it, and is not followed; set source.images to a folder above all of them"
            + (f", such as {outside[0]}" if outside[0] else ""),
            path=source.location,
        )
    if reasons == {Reason.UNREADABLE_FILE}:
        raise ConfigError(
            f"{where(source.images)}: not one image of {source.location} ({count}) can be read, for example "
            f"{first.file_name!a}; give this user the right to read them",
            path=source.location,
        )
    raise ConfigError(
        f"{where(source.images)}: not one image of {source.location} ({count}) is in it, for example "
        f"{first.file_name!a}; give the folder or zip that holds them",
        path=source.location,
    )


def stamp(images: Images, record: Record) -> Stamp | Rejection:
    """The stamp of a record's file, or why it cannot be used; found without reading it."""
    found = images.stamp(record.file_name if record.place is None else record.place)
    if not isinstance(found, Rejection) and found[0] == 0:
        return Rejection(Reason.EMPTY_FILE, "0 bytes")
    return found


def make_plan(
    config: BuildConfig,
    origins: Sequence[Origin],
    spool: Spool,
    folder: Path,
    hash_files: HashFiles,
    progress: Progress = lambda count: None,
    known: Known = NOTHING_KNOWN,
) -> Plan:
    """Read all records, hash their files, reject what is known to be bad by that, and cut the rest.

    What is found out about the files is remembered in ``folder``; ``known`` is what the dataset holds that is added to.
    """
    splits = Splits(config, origins)
    for number, origin in enumerate(origins):
        _read(spool, origin, number, splits, config.filters, progress)
    spool.flush()
    join_repeated(spool, origins, config.filters)
    keep_within_limits(spool, origins)
    hash_all(spool, folder / "files.bin", hash_files, seen(config.filters.limits))
    names = splits.deal(spool)
    _reject_leaks(spool, names)
    if config.filters.duplicates:
        _reject_duplicates(spool)
    if config.filters.near_duplicate_bits is not None:
        known.reject(spool, names, config.filters.duplicates)
        known.reject_alike(spool, names, config.filters.near_duplicate_bits)
        _reject_near_duplicates(spool, names, config.filters.near_duplicate_bits)
    if config.filters.leaks == "fail":
        _require_no_leaks(spool, names)
    known.reject(spool, names, config.filters.duplicates)
    planned = [_planned(spool, name, i, origins) for i, name in enumerate(names)]
    return Plan(config, planned, spool, known.next_numbers)


def _read(spool: Spool, origin: Origin, source: int, splits: Splits, limits: FilterConfig, progress: Progress) -> None:
    images, name = open_images(origin.source.images), origin.config.name
    for record in origin.source.records():
        split = splits.of(origin, record)
        if split is None:
            origin.source.counts["records_without_split"] += 1
            continue
        if name:
            about = {**record.about, "name": name}
            record = replace(record, image_id=f"{name}-{record.image_id}", about=about)
        spool.add(record, clean_captions(record.captions, limits), stamp(images, record), source=source, split=split)
        progress(1)


def _planned(spool: Spool, name: str, split: int, origins: Sequence[Origin]) -> PlannedSplit:
    numbers = np.flatnonzero(spool.table["split"] == split)
    numbers = numbers[np.argsort(spool.table["order"][numbers], kind="stable")]
    mine = [(i, origin) for i, origin in enumerate(origins) if origin.split in (name, None)]
    # sources that all splits share are counted with the first
    counted_here = [o.source for o in origins if o.split == name or (o.split is None and split == 0)]
    counts = sum((source.counts for source in counted_here), Counter[str]())
    sources, names = tuple(o.source for _, o in mine), tuple(o.config.name for _, o in mine)
    return PlannedSplit(name, sources, tuple(i for i, _ in mine), names, counts, numbers)


def _reject_leaks(spool: Spool, names: Sequence[str]) -> None:
    """What a split shares with a later one, it loses: training, which comes first, with every held-out one."""
    for split in range(len(names)):
        for other in range(split + 1, len(names)):
            _reject_shared(spool, split, other, names[other])


def _require_no_leaks(spool: Spool, names: Sequence[str]) -> None:
    numbers = [
        i for i, r in enumerate(spool.rejections) if r and r.reason == Reason.SPLIT_LEAK and not of_dataset(r.detail)
    ]
    leaks = np.flatnonzero(np.isin(spool.table["verdict"], numbers))
    if len(leaks):
        first = int(leaks[0])
        rejection = spool.rejection(first)
        assert rejection is not None
        raise BuildError(
            f"{counted(len(leaks), 'record')} of one split stand in another too, for example {spool.image_id(first)} of "
            f"split {names[spool.table['split'][first]]}: {rejection.detail}; nothing was published; correct the source, "
            "or let the earlier split lose them with filters.leaks=reject"
        )


def _reject_shared(spool: Spool, split: int, other: int, name: str) -> None:
    table = spool.table
    mine = np.flatnonzero((table["split"] == split) & (table["verdict"] == 0))
    theirs = np.flatnonzero(table["split"] == other)
    same_id = np.isin(table["id"][mine], table["id"][theirs])
    spool.reject(mine[same_id], Reason.SPLIT_LEAK, f"its image id is in split {name} too")
    mine, theirs = mine[~same_id], theirs[table["hashed"][theirs]][::-1]  # the last one of equal ones is named
    owners = first_equal(table["facts"]["sha256"][theirs], table["facts"]["sha256"][mine])
    shared = owners >= 0
    detail = f"same bytes as image {{owner}} of split {name}"
    spool.reject(mine[shared], Reason.SPLIT_LEAK, detail, theirs[owners[shared]])


def _reject_duplicates(spool: Spool) -> None:
    """Of files with the same bytes in one split, the one with the lowest id stays."""
    table = spool.table
    for split in np.unique(table["split"]):
        numbers = np.flatnonzero((table["split"] == split) & (table["verdict"] == 0))
        numbers = numbers[np.argsort(table["id"][numbers], kind="stable")]
        hashes = table["facts"]["sha256"][numbers]
        owners = numbers[first_equal(hashes, hashes)]
        copies = owners != numbers
        spool.reject(numbers[copies], Reason.DUPLICATE_IMAGE, "same bytes as image {owner}", owners[copies])


def _reject_near_duplicates(spool: Spool, names: Sequence[str], most_bits: int) -> None:
    """By ``settle``, with held-out splits before training, and within a split the lowest id first."""
    table = spool.table
    rows = np.flatnonzero((table["verdict"] == 0) & table["facts"]["comparable"])
    rows = rows[np.lexsort((table["id"][rows], -table["split"][rows].astype(np.int64)))]
    likeness = table["facts"]["likeness"][rows]
    for later, earlier in settle(likeness, most_bits).items():
        row, owner = int(rows[later]), int(rows[earlier])
        bits = f"{int(likeness[later] ^ likeness[earlier]).bit_count()} of {BITS} bits differ"
        if table["split"][row] == table["split"][owner]:
            spool.reject(row, Reason.NEAR_DUPLICATE, f"{LOOKS_LIKE} {{owner}}: {bits}", owner)
        else:
            name = names[table["split"][owner]]
            spool.reject(row, Reason.SPLIT_LEAK, f"{LOOKS_LIKE} {{owner}} of split {name}: {bits}", owner)


def first_equal(values: Any, wanted: Any) -> Numbers:
    """For each wanted value, where it stands first among the values, or -1."""
    if not len(values):
        return np.full(len(wanted), -1, np.int64)
    order = np.argsort(values, kind="stable")
    at = np.minimum(np.searchsorted(values, wanted, sorter=order), len(values) - 1)
    found = order[at]
    return np.where(values[found] == wanted, found, -1)
