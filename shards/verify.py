"""Rechecks every byte of a shard folder against its manifest."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from shards import ustar
from shards.errors import counted
from shards.index import index_problem
from shards.manifest import NAME, Manifest, ShardEntry
from shards.reader import MismatchError, SampleMeta, checked_payloads, checked_sample, parse_meta

MAX_SHOWN = 120  # characters of a value
PENDING = "pending.json"  # in .build: names of the shards that an addition is putting in place


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: in which file, with which sample if it can be told, and what was found and expected."""

    path: str
    key: str | None
    problem: str
    stranger: bool = False  # not of this dataset: building again will not remove it
    sample: tuple[str, int] | None = None  # shard and number of the one sample that cannot be read, if it is only that
    checksum: bool = False  # of a whole file, which says no more than that something in it differs

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}" if self.key is None else f"{self.path}: {self.key}: {self.problem}"


def verify(folder: Path) -> list[Finding]:
    """All findings, shard by shard; empty if the folder is what its manifest says.

    Raises:
        ConfigError, FormatError: the manifest itself cannot be read.
    """
    return verify_all(FolderShards(folder))


class Checked(Protocol):
    """A dataset that can be verified part by part."""

    manifest: Manifest

    def verify_manifest(self) -> list[Finding]: ...

    def verify_shard(self, entry: ShardEntry) -> list[Finding]: ...

    def verify_keys(self) -> list[Finding]: ...


class FolderShards:
    """A dataset in a folder.

    Raises:
        ConfigError, FormatError: the manifest itself cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = Manifest.load(folder)

    def verify_manifest(self) -> list[Finding]:
        names = [path.name for path in self.folder.glob("*.tar")]
        return verify_manifest(self.manifest, (self.folder / NAME).read_bytes(), names, self.folder / ".build")

    def verify_shard(self, entry: ShardEntry) -> list[Finding]:
        return verify_shard(self.folder, entry)

    def verify_keys(self) -> list[Finding]:
        return verify_keys(self.folder, self.manifest)


def verify_all(shards: Checked) -> list[Finding]:
    """All findings of a dataset."""
    found = [finding for entry in shards.manifest.shards for finding in shards.verify_shard(entry)]
    return [*shards.verify_manifest(), *found, *shards.verify_keys()]


def verify_manifest(manifest: Manifest, raw: bytes, names: Iterable[str], remembered: Path) -> list[Finding]:
    """Findings in manifest.json itself, whose bytes are ``raw``; ``names`` are those of the tars beside it."""
    return [
        *_check_manifest(manifest, raw, remembered),
        *_check_parents(manifest),
        *_strangers(manifest, names, remembered),
    ]


def verify_shard(folder: Path, entry: ShardEntry) -> list[Finding]:
    """Findings in one shard: its index, its sample list and every byte of its tar."""
    findings: list[Finding] = []
    lines = _meta_lines(folder, entry, findings)
    return [*findings, *_check_index(folder, entry, lines), *_check_tar(folder, entry, lines)]


def verify_keys(folder: Path, manifest: Manifest) -> list[Finding]:
    """Keys that are in the dataset twice; reads the sample lists only."""
    findings: list[Finding] = []
    seen: dict[str, str] = {}
    for entry in manifest.shards:
        for meta in filter(None, _meta_lines(folder, entry, [])):
            if meta.key in seen:
                problem = f"the key is in {seen[meta.key]} too; keys must be unique over the dataset"
                findings.append(Finding(entry.name, meta.key, problem))
            seen.setdefault(meta.key, entry.name)
    return findings


def _check_parents(manifest: Manifest) -> Iterator[Finding]:
    """What was added to keeps its shards, in front: their hashes give the parent's id again."""
    for addition in manifest.additions:
        if manifest.num_shards_of(addition.parent) is None:
            yield Finding(
                NAME, None, f"its parent is {addition.parent}, but no number of its first shards is that dataset"
            )


def _check_manifest(manifest: Manifest, raw: bytes, remembered_in: Path) -> Iterator[Finding]:
    """Every field, also those that repeat what the shards say; the settings against those that the build remembers."""
    found, expected = json.loads(raw), json.loads(manifest.to_json())
    for name in dict.fromkeys((*expected, *found)):
        if found.get(name) != expected.get(name):
            yield Finding(
                NAME, None, f"{name} is {_short(found.get(name))}, its shards give {_short(expected.get(name))}"
            )
    try:
        remembered = json.loads((remembered_in / "settings.json").read_bytes())
    except (OSError, ValueError):  # not copied along, or not the build's any more
        return
    for name, value in manifest.settings.items():
        if isinstance(remembered, dict) and remembered.get(name) != value:
            built = _short(remembered.get(name))
            yield Finding(NAME, None, f"settings: {name} is {_short(value)}, .build/settings.json says {built}")


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _strangers(manifest: Manifest, names: Iterable[str], remembered: Path) -> Iterator[Finding]:
    known = {shard.name for shard in manifest.shards} | _being_added(remembered)
    for name in sorted(set(names) - known):
        problem = "is not in the manifest; remove it, or readers that go by file names will read it"
        yield Finding(name, None, problem, stranger=True)


def _being_added(remembered: Path) -> set[str]:
    """Tars that an addition has put in place and whose manifest it is about to write, or was when it was killed."""
    try:
        names = json.loads((remembered / PENDING).read_bytes())["shards"]
    except (OSError, ValueError, KeyError, TypeError):
        return set()
    return set(names)


def _meta_lines(folder: Path, entry: ShardEntry, findings: list[Finding]) -> list[SampleMeta | None]:
    """The parsed meta.jsonl, None for a line that cannot be; what is wrong goes to ``findings``.

    A list that is not the one that was written is no witness against index and tar: then there are no lines.
    """
    before = len(findings)
    raw = _read(folder, entry.meta_name, entry.meta_sha256, findings)
    if raw is None:
        return []
    lines: list[SampleMeta | None] = []
    for number, line in enumerate(raw.splitlines(), 1):
        try:
            lines.append(parse_meta(line))
        except (ValueError, KeyError, TypeError) as error:
            problem = f"line {number} is damaged: {error}"
            findings.append(Finding(entry.meta_name, None, problem, sample=(entry.name, number - 1)))
            lines.append(None)
    if len(lines) != entry.num_samples:
        findings.append(
            Finding(entry.meta_name, None, f"has {counted(len(lines), 'line')}, the manifest says {entry.num_samples}")
        )
    return lines if len(findings) == before else []


def _check_index(folder: Path, entry: ShardEntry, lines: list[SampleMeta | None]) -> Iterator[Finding]:
    findings: list[Finding] = []
    raw = _read(folder, entry.idx_name, entry.idx_sha256, findings)
    yield from findings
    if raw is None:
        return
    if len(raw) != 8 * (entry.num_samples + 1):
        expected = f"expected {8 * (entry.num_samples + 1)} for {counted(entry.num_samples, 'sample')}"
        yield Finding(entry.idx_name, None, f"has {len(raw)} bytes, {expected}")
        return
    offsets = np.frombuffer(raw, "<u8").astype(np.int64)
    if problem := index_problem(offsets, entry.num_bytes, entry.foreign):
        yield Finding(entry.idx_name, None, problem)
    for meta, found, end in zip(lines, offsets.tolist(), offsets[1:].tolist(), strict=False):
        if meta and entry.foreign:
            if not found < meta.span[0] <= meta.span[1] <= end:
                where = f"{entry.meta_name} says bytes {meta.span[0]} to {meta.span[1]}"
                yield Finding(entry.idx_name, meta.key, f"spans bytes {found} to {end}, {where}")
                return
        elif meta and found != _start(meta):
            yield Finding(entry.idx_name, meta.key, f"begins at {found}, {entry.meta_name} says {_start(meta)}")
            return


def _check_tar(folder: Path, entry: ShardEntry, lines: list[SampleMeta | None]) -> Iterator[Finding]:
    path = folder / entry.name
    if not path.is_file():
        what = "is missing" if not path.exists() else "is no file"
        samples = counted(entry.num_samples, "sample")
        yield Finding(entry.name, None, f"{what}, the manifest lists it with {samples}")
        return
    try:
        yield from _check_members(path, entry, lines)
    except OSError as error:
        yield Finding(entry.name, None, f"cannot be read: {error.strerror or error}")


def _check_members(path: Path, entry: ShardEntry, lines: list[SampleMeta | None]) -> Iterator[Finding]:
    num_bytes = path.stat().st_size
    if num_bytes != entry.num_bytes:
        yield Finding(entry.name, None, f"has {num_bytes} bytes, the manifest says {entry.num_bytes}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != entry.sha256:
            yield Finding(entry.name, None, f"sha256 is {found}, the manifest says {entry.sha256}", checksum=True)
        if entry.foreign:
            yield from _check_foreign(file, entry, lines)
            return
        at: int | None = 0
        for number, meta in enumerate(lines):
            if meta is None:
                at = None  # the next sample's place is only known from its own line
                continue
            start, stop = _start(meta), meta.parts[-1].offset + ustar.padded(meta.parts[-1].num_bytes)
            if at is not None and start != at:
                yield Finding(entry.name, meta.key, f"begins at byte {start}, but the sample before it ends at {at}")
            file.seek(start)
            try:
                checked_payloads(meta, file.read(stop - start), start)
            except MismatchError as error:
                yield Finding(entry.name, meta.key, str(error), sample=(entry.name, number))
            at = stop
        last = lines[-1] if lines else None
        if at is not None and (last or not entry.num_samples):
            file.seek(at)
            if (end := file.read()) != ustar.END:
                key = last.key if last else None
                expected = f"expected the {len(ustar.END)} zero bytes that end a tar"
                yield Finding(entry.name, key, f"{len(end)} bytes follow the last sample, {expected}")


def _check_foreign(file: BinaryIO, entry: ShardEntry, lines: list[SampleMeta | None]) -> Iterator[Finding]:
    for number, meta in enumerate(lines):
        if meta is None:
            continue
        start, stop = meta.span
        file.seek(start)
        try:
            checked_sample(meta, file.read(stop - start), start, is_foreign=True)
        except MismatchError as error:
            yield Finding(entry.name, meta.key, str(error), sample=(entry.name, number))


def _start(meta: SampleMeta) -> int:
    return meta.parts[0].offset - ustar.BLOCK


def _read(folder: Path, name: str, sha256: str, findings: list[Finding]) -> bytes | None:
    try:
        raw = (folder / name).read_bytes()
    except FileNotFoundError:
        findings.append(Finding(name, None, "is missing, the manifest lists its shard"))
        return None
    except OSError as error:
        findings.append(Finding(name, None, f"cannot be read: {error.strerror or error}"))
        return None
    found = hashlib.sha256(raw).hexdigest()
    if found != sha256:
        findings.append(Finding(name, None, f"sha256 is {found}, the manifest says {sha256}", checksum=True))
    return raw
