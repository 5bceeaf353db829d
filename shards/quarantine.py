"""A list of samples that are left out of the order, each with why. Part of what a run's data are."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shards.atomic import write_file
from shards.errors import ConfigError, DamagedSampleError
from shards.reader import SplitReader
from shards.sample import canonical_json
from shards.verify import Finding

FORMAT, VERSION = "xctrain-quarantine", 1


@dataclass(frozen=True)
class LeftOut:
    """One sample: its key, None where the sample list itself is damaged there; its shard and its number in it."""

    key: str | None
    shard: str
    sample: int
    reason: str


@dataclass(frozen=True)
class Quarantine:
    """The samples of one dataset that are left out."""

    samples: tuple[LeftOut, ...]

    def save(self, path: Path) -> None:
        """Write the list as JSON, sorted by shard and sample."""
        samples = [asdict(s) for s in sorted(self.samples, key=lambda s: (s.shard, s.sample))]
        content = {"format": FORMAT, "format_version": VERSION, "samples": samples}
        write_file(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())

    @staticmethod
    def load(path: Path) -> "Quarantine":
        """The list in ``path``.

        Raises:
            ConfigError: there is no such file, or it is not such a list.
        """
        try:
            content = json.loads(path.read_bytes())
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be read: {error.strerror}; `python -m shards verify DIR --quarantine {path}` writes it",
                path=path,
            ) from None
        except ValueError as error:
            raise ConfigError(f"{path}: is not JSON: {error}; write it again", path=path) from None
        if (
            not isinstance(content, dict)
            or (content.get("format"), content.get("format_version")) != (FORMAT, VERSION)
            or not isinstance(content.get("samples"), list)
        ):
            raise ConfigError(
                f"{path}: is not a list of samples to leave out, expected format {FORMAT}, version {VERSION}; "
                f"`python -m shards verify DIR --quarantine {path}` writes one",
                path=path,
            )
        return Quarantine(tuple(_left_out(path, number, values) for number, values in enumerate(content["samples"], 1)))

    @staticmethod
    def of(findings: Iterable[Finding]) -> "Quarantine":
        """The samples that cannot be read by what was found, each with its first reason."""
        found: dict[tuple[str, int], LeftOut] = {}
        for finding in findings:
            if finding.sample:
                found.setdefault(finding.sample, LeftOut(finding.key, *finding.sample, finding.problem))
        return Quarantine(tuple(found.values()))

    def unexpected(self, findings: Iterable[Finding]) -> list[Finding]:
        """Findings that leaving these samples out does not cure."""
        findings = list(findings)
        places = {(s.shard, s.sample) for s in self.samples}
        listed = {f.path for f in findings if f.sample in places}
        return [f for f in findings if f.sample not in places and not (f.checksum and f.path in listed)]

    def indices(self, reader: SplitReader, path: Path) -> tuple[int, ...]:
        """Numbers of its samples among those of the reader's split, rising; samples of other splits have none.

        Raises:
            ConfigError: a sample that is not in the dataset, or has another key there.
        """
        firsts, splits, first = {}, {s.name: s for s in reader.manifest.shards}, 0
        for shard in reader.shards:
            firsts[shard.name] = first
            first += shard.num_samples
        found = set()
        for entry in self.samples:
            place = splits.get(entry.shard)
            if place is None or entry.sample >= place.num_samples:
                raise ConfigError(
                    f"{path}: sample {entry.sample} of {entry.shard} ({entry.key}) is not in {reader.folder}; the list is of "
                    "another dataset, write it again with `python -m shards verify`",
                    path=path,
                )
            if entry.shard in firsts:
                index = firsts[entry.shard] + entry.sample
                _require_key(path, entry, reader, index)
                found.add(index)
        return tuple(sorted(found))


def quarantine_id(reader: SplitReader, indices: Iterable[int]) -> str | None:
    """Names what is left out of a split: a hash of shards and samples, not of reasons; None for nothing."""
    places = [[shard.name, inside] for shard, inside in map(reader.locate, indices)]
    return hashlib.sha256(canonical_json(places)).hexdigest() if places else None


def _left_out(path: Path, number: int, values: Any) -> LeftOut:
    kinds = {"key": str | None, "shard": str, "sample": int, "reason": str}
    if not isinstance(values, dict) or {*values} != {*kinds}:
        raise ConfigError(f"{path}: entry {number} is not {{{', '.join(kinds)}}}; write the list again", path=path)
    for name, kind in kinds.items():
        if not isinstance(values[name], kind) or (name == "sample" and values[name] < 0):
            raise ConfigError(f"{path}: {name} of entry {number} is {values[name]!r}; write the list again", path=path)
    return LeftOut(**values)


def _require_key(path: Path, entry: LeftOut, reader: SplitReader, index: int) -> None:
    try:
        key = reader.key(index)
    except DamagedSampleError:  # its line of the sample list is what is damaged
        return
    if entry.key is not None and key != entry.key:
        raise ConfigError(
            f"{path}: sample {entry.sample} of {entry.shard} is {key}, the list says {entry.key}; the list is of another "
            "dataset, write it again with `python -m shards verify`",
            path=path,
        )
