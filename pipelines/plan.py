"""Which records go into which shard, and which are rejected before their pictures are decoded."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipelines.captions import clean_captions
from pipelines.coco import Record, Split
from pipelines.config import BuildConfig
from pipelines.filters import Reason, Rejection
from pipelines.images import Images, Stamp, open_images
from shards.errors import ConfigError
from shards.sample import canonical_json

VERSION = 1  # raise it when the same records and settings give other bytes; finished shards are then built again

HashFiles = Callable[[Split, Sequence[str]], list[str | Rejection]]  # sha256 of each file


@dataclass(frozen=True)
class Slice:
    """The records of one shard. ``records`` is all that its bytes depend on, ``digest`` the hash of that."""

    name: str
    split: str
    records: tuple[Mapping[str, Any], ...]
    digest: str


@dataclass(frozen=True)
class Listing:
    """A split with the stamp of each file, or the reason why it cannot be used; found without reading any file."""

    split: Split
    stamps: tuple[Stamp | Rejection, ...]


def list_files(split: Split) -> Listing:
    """Stamps of all files of a split.

    Raises:
        ConfigError: not one of them is there, so the folder is the wrong one.
    """
    images = open_images(split.images)
    stamps = tuple(_stamp(images, record) for record in split.records)
    if all(isinstance(s, Rejection) and s.reason is Reason.UNREADABLE_FILE for s in stamps):
        raise ConfigError(
            f"{split.images}: not one image of {split.annotations} ({len(stamps)}) can be read, for example "
            f"{split.records[0].file_name!a}; give this user the right to read them",
            path=split.images,
        )
    if all(isinstance(s, Rejection) and s.reason is Reason.MISSING_FILE for s in stamps):
        first = split.records[0].file_name
        raise ConfigError(
            f"{split.images}: not one image of {split.annotations} ({len(stamps)}) is in it, for example "
            f"{first!a}; give the folder or zip that holds them",
            path=split.images,
        )
    return Listing(split, stamps)


def _stamp(images: Images, record: Record) -> Stamp | Rejection:
    stamp = images.stamp(record.file_name)
    if not isinstance(stamp, Rejection) and stamp[0] == 0:
        return Rejection(Reason.EMPTY_FILE, "0 bytes")
    return stamp


class FileHashes:
    """sha256 of every file, remembered by its stamp: a second build hashes only what has changed."""

    def __init__(self, remembered: Mapping[str, Any]) -> None:
        self._known: dict[str, Any] = dict(remembered)

    def of(self, listing: Listing, hash_files: HashFiles) -> list[str | Rejection]:
        """One hash a record, or why there is none."""
        keys = [f"{listing.split.name}/{r.file_name}" for r in listing.split.records]
        wanted = {
            keys[i]: i
            for i, stamp in enumerate(listing.stamps)
            if not isinstance(stamp, Rejection) and self._known.get(keys[i], [])[1:] != list(stamp)
        }
        names = [listing.split.records[i].file_name for i in wanted.values()]
        found = dict(zip(wanted, hash_files(listing.split, names) if names else [], strict=True))
        for key, digest in found.items():
            if isinstance(digest, str):
                self._known[key] = [digest, *listing.stamps[wanted[key]]]  # type: ignore[misc]
        return [
            stamp if isinstance(stamp, Rejection) else found[key] if key in found else self._known[key][0]
            for key, stamp in zip(keys, listing.stamps, strict=True)
        ]

    def remembered(self, listings: Sequence[Listing]) -> dict[str, Any]:
        """What to remember: only files that are still listed."""
        keys = {f"{listing.split.name}/{r.file_name}" for listing in listings for r in listing.split.records}
        return {k: v for k, v in self._known.items() if k in keys}


@dataclass(frozen=True)
class _Judged:
    record: Record
    sha256: str | None
    captions: tuple[str, ...]
    caption_counts: Mapping[str, int]
    verdict: Rejection | None


def cut(config: BuildConfig, splits: Sequence[Split], hashes: Sequence[Sequence[str | Rejection]]) -> list[Slice]:
    """The slices of all splits in order. ``splits[1:]`` are held out: what training shares with them, training loses."""
    judged = [[_judge(r, h) for r, h in zip(s.records, hs, strict=True)] for s, hs in zip(splits, hashes, strict=True)]
    for held_out, split in zip(judged[1:], splits[1:], strict=True):
        judged[0] = _without_leaks(judged[0], held_out, split.name)
    if config.filters.duplicates:
        judged = [_without_duplicates(records) for records in judged]
    limits = config.filters.model_dump(mode="json")
    return [
        _slice(f"{split.name}-{i // size:06d}", split.name, ordered[i : i + size], limits)
        for split, records in zip(splits, judged, strict=True)
        for ordered, size in [(_hash_ordered(records, config.build.seed), config.build.records_per_shard)]
        for i in range(0, len(ordered), size)
    ]


def _judge(record: Record, sha256: str | Rejection) -> _Judged:
    cleaned = clean_captions(record.captions)
    verdict = sha256 if isinstance(sha256, Rejection) else None
    if verdict is None and not cleaned.captions:
        why = ", ".join(f"{count} {name}" for name, count in sorted(cleaned.counts.items())) or "there are none"
        verdict = Rejection(Reason.NO_CAPTION, f"no caption is left of {len(record.captions)}: {why}")
    return _Judged(record, None if isinstance(sha256, Rejection) else sha256, cleaned.captions, cleaned.counts, verdict)


def _without_leaks(records: Iterable[_Judged], held_out: Iterable[_Judged], split: str) -> list[_Judged]:
    ids = {j.record.image_id for j in held_out}
    owners = {j.sha256: j.record.image_id for j in held_out if j.sha256}

    def judge(judged: _Judged) -> _Judged:
        if judged.verdict:
            return judged
        if judged.record.image_id in ids:
            return _rejected(judged, Reason.SPLIT_LEAK, f"its image id is in split {split} too")
        if judged.sha256 in owners:
            return _rejected(judged, Reason.SPLIT_LEAK, f"same bytes as image {owners[judged.sha256]} of split {split}")
        return judged

    return [judge(j) for j in records]


def _without_duplicates(records: Sequence[_Judged]) -> list[_Judged]:
    owners: dict[str, int] = {}
    for judged in sorted(records, key=lambda j: j.record.image_id):
        if judged.verdict is None and judged.sha256:
            owners.setdefault(judged.sha256, judged.record.image_id)

    def judge(judged: _Judged) -> _Judged:
        owner = owners.get(judged.sha256 or "", judged.record.image_id)
        if judged.verdict or owner == judged.record.image_id:
            return judged
        return _rejected(judged, Reason.DUPLICATE_IMAGE, f"same bytes as image {owner}")

    return [judge(j) for j in records]


def _rejected(judged: _Judged, reason: Reason, detail: str) -> _Judged:
    return _Judged(judged.record, judged.sha256, judged.captions, judged.caption_counts, Rejection(reason, detail))


def _hash_ordered(records: Iterable[_Judged], seed: int) -> list[_Judged]:
    """Records in an order without meaning, so that neighbours in a shard are unrelated."""
    return sorted(records, key=lambda j: hashlib.sha256(f"{seed}:{j.record.image_id}".encode()).digest())


def _slice(name: str, split: str, records: Iterable[_Judged], limits: Mapping[str, Any]) -> Slice:
    rows = tuple(_row(j) for j in records)
    content = {"version": VERSION, "name": name, "split": split, "limits": limits, "records": rows}
    return Slice(name, split, rows, hashlib.sha256(canonical_json(content)).hexdigest())


def _row(judged: _Judged) -> dict[str, Any]:
    raw = [str(c) if isinstance(c, str) else None for c in judged.record.captions]
    return {
        "image_id": judged.record.image_id,
        "file_name": _plain(judged.record.file_name),
        "captions": list(judged.captions),
        "captions_raw": None if raw == list(judged.captions) else raw,
        "caption_counts": dict(Counter(judged.caption_counts)),
        "about": dict(judged.record.about),
        "sha256": judged.sha256,
        "verdict": asdict(judged.verdict) if judged.verdict else None,
    }


def _plain(file_name: Any) -> str:
    return file_name if isinstance(file_name, str) else ascii(file_name)
