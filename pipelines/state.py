"""What a build knows about its folder: OUT/.build. It makes reruns cheap and safe; no reader of the dataset needs it.

.build/settings.json       settings and sources of what is published, or of the build that will be the first to be
.build/files.bin           sha256 of every source file, by size and times
.build/slices/NAME.json    a shard that is being built: its records
.build/results/NAME.json   a finished shard: digest of its records, manifest entry, rejections, statistics
.build/next/               finished shards and results that replace published ones, until all of them are finished
.build/attempts/           shards that other machines are writing

"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.folder_lock import FolderLock, lock_folder
from shards.atomic import write_file
from shards.errors import ConfigError, UserError
from shards.manifest import NAME as MANIFEST
from shards.manifest import Manifest, ShardEntry
from shards.places import require_folder
from shards.sample import canonical_json
from shards.verify import PENDING

if TYPE_CHECKING:
    from pipelines.plan import Slice

SETTINGS = "settings.json"
REPLACING = "replacing.json"
_OF_ADDITIONS = re.compile(r"(rejects|report)-\d+\.(jsonl|json|html)")


class State:
    """One shard folder, seen by the build that writes it."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out / ".build"
        self.slices = self.folder / "slices"
        self.next = self.folder / "next"
        self.attempts = self.folder / "attempts"

    @property
    def memory(self) -> Path:
        """Folder of what is remembered of the source's files."""
        return self.folder

    def check(self, settings: Mapping[str, Any], overwrite: bool) -> None:
        """Refuse a folder that is not this build's. Changes nothing.

        Raises:
            ConfigError: it holds something else, or a build with other settings and ``overwrite`` is off.
        """
        if not self.out.is_dir() or not (strangers := [p.name for p in self.out.iterdir() if p.name != ".build"]):
            return
        if not overwrite and (parent := self._parent()):
            raise ConfigError(
                f"{self.out}: holds a dataset that was added to ({parent[:16]} is its parent), which a build would not keep; "
                "add more with `python -m pipelines add`, choose another out, or replace all of it with "
                "build.overwrite=true",
                path=self.out,
            )
        if self._holds_foreign():
            raise ConfigError(
                f"{self.out}: holds tars that another tool wrote and `python -m shards index` indexed, which a build would "
                "take away; choose another out",
                path=self.out,
            )
        before = read_json(self.folder / SETTINGS)
        if not self.published:
            before = self._replacing().get("settings", before)
        if not isinstance(before, dict) and (manifest_id := self._published_id()):
            if overwrite:
                return
            raise ConfigError(
                f"{self.out}: holds the dataset {manifest_id[:16]} without its .build, so nothing tells from which source "
                "it was made; replace it with build.overwrite=true, or choose another out",
                path=self.out,
            )
        if not isinstance(before, dict):
            raise ConfigError(
                f"{self.out}: is not empty and was not written by this build (it holds {sorted(strangers)[0]}); "
                "choose another out, or empty it",
                path=self.out,
            )
        if not overwrite and (changes := _changes(before, settings)):
            raise ConfigError(
                f"{self.out}: holds a build with other settings: {'; '.join(changes)}; set them back, choose another "
                "out, or replace that build with build.overwrite=true",
                path=self.out,
            )

    def require_writable(self, setting: str) -> None:
        """Check that the folder can be made or written in; ``setting`` is the one that names it. Changes nothing.

        Raises:
            ConfigError: it cannot.
        """
        require_folder(self.out, setting)
        for path in filter(os.path.lexists, (self.folder, self.slices, self.folder / "results", self.next)):
            require_folder(path, f"{setting}/{path.relative_to(self.out)}")

    @contextmanager
    def locked(self) -> Iterator[FolderLock]:
        """Hold the folder, swept, until the block ends.

        Raises:
            BuildError: another build holds it.
        """
        with lock_folder(self.out) as lock:
            self.sweep()
            yield lock

    def sweep(self) -> None:
        """Remove what a kill left half-written."""
        for folder in (self.out, self.folder, self.slices, self.next, self.folder / "results"):
            for path in folder.glob(".*.tmp"):
                path.unlink(missing_ok=True)
        shutil.rmtree(self.attempts, ignore_errors=True)

    @property
    def published(self) -> bool:
        return (self.out / MANIFEST).exists()

    @property
    def target(self) -> Path:
        """Where a shard is written: beside the published ones it will replace, or in place when nothing is published."""
        return self.next if self.published else self.out

    def results(self, target: Path) -> Path:
        return self.next if target == self.next else self.folder / "results"

    def finished(self, piece: "Slice") -> tuple[Path, dict[str, Any]] | None:
        """Folder and result of a shard that needs no work: built from these records, and unchanged since."""
        for target in (self.next, self.out):
            result = finished_in(target, self.results(target) / f"{piece.name}.json", piece)
            if result is not None:
                return target, result
        return None

    def adopt(self, name: str, result: dict[str, Any]) -> None:
        """Move a shard from ``next`` to its final name, its result last."""
        for file_name in shard_files(result["entry"]):
            (self.next / file_name).replace(self.out / file_name)
        if result["entry"] is None:
            self.remove_shard(name)
        write_result(self.folder / "results" / f"{name}.json", self.out, result)
        (self.next / f"{name}.json").unlink()

    def remove_shard(self, name: str) -> None:
        """Remove a shard of ours; its result goes first, so that it never speaks of files that are gone."""
        (self.folder / "results" / f"{name}.json").unlink(missing_ok=True)
        for suffix in (".tar", ".tar.idx", ".meta.jsonl"):
            (self.out / f"{name}{suffix}").unlink(missing_ok=True)

    def begin(self, settings: Mapping[str, Any], overwrite: bool) -> None:
        """Remember what is built, and whether it may take the place of all else; a later run without it goes on so."""
        if self.published:  # then the folder is still what other settings may have made of it
            (self.folder / REPLACING).unlink(missing_ok=True)
            return
        self.write_json(SETTINGS, settings)
        if overwrite:
            self.write_json(REPLACING, {**self._replacing(), "settings": settings, "left": []})

    def stale(self, names: set[str], overwrite: bool) -> tuple[list[str], list[str]]:
        """Older shards that this build has no use for: what to remove, and what is left until it is overwritten.

        Where nothing is published they are of a build that did not end, or of a dataset whose replacing did not.
        """
        older = {p.stem for p in (self.folder / "results").glob("*.json")} | set(self._replacing().get("older", ()))
        with suppress(UserError):
            older |= {shard.name.removesuffix(".tar") for shard in Manifest.load(self.out).shards}
        with suppress(OSError, ValueError, KeyError):
            pending = json.loads((self.folder / PENDING).read_bytes())["shards"]  # of an addition that was killed
            older |= {name.removesuffix(".tar") for name in pending}
        stale = older - names
        left = stale if self.published else stale & set(self._replacing().get("left", ()))
        return sorted(stale if overwrite else stale - left), [] if overwrite else sorted(left)

    def give_up_manifest(self, settings: Mapping[str, Any], remove: Sequence[str], left: Sequence[str]) -> None:
        """From here on the folder is no dataset but a build with ``settings``, until its manifest is in place."""
        self.write_json(REPLACING, {"settings": settings, "older": [*remove, *left], "left": list(left)})
        (self.out / MANIFEST).unlink(missing_ok=True)
        self.write_json(SETTINGS, settings)

    def remove_older(self, names: Sequence[str]) -> None:
        """Remove shards, and what additions to an older dataset have left here."""
        for name in names:
            self.remove_shard(name)
        for path in self.out.iterdir():
            if _OF_ADDITIONS.fullmatch(path.name):
                path.unlink()
        (self.folder / PENDING).unlink(missing_ok=True)

    def _replacing(self) -> dict[str, Any]:
        found = read_json(self.folder / REPLACING)
        return found if isinstance(found, dict) else {}

    def _holds_foreign(self) -> bool:
        with suppress(UserError):
            return any(shard.foreign for shard in Manifest.load(self.out).shards)
        return False

    def _published_id(self) -> str | None:
        with suppress(UserError):
            return Manifest.load(self.out).manifest_id
        return None

    def _parent(self) -> str | None:
        with suppress(UserError):
            return Manifest.load(self.out).parent
        return None

    def write(self, name: str, data: bytes) -> Path:
        """Write a file below .build, unless it says so already."""
        path = self.folder / name
        if not path.exists() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, data)
        return path

    def write_json(self, name: str, value: Any) -> Path:
        """The same for a value."""
        return self.write(name, canonical_json(value) + b"\n")


def finished_in(target: Path, path: Path, piece: "Slice") -> dict[str, Any] | None:
    """The result in ``path`` of a shard in ``target``, if it was built from these records and is unchanged since."""
    result = read_checked(path)
    if isinstance(result, dict) and result.get("digest") == piece.digest and _intact(target, path, result):
        return result
    return None


def read_json(path: Path) -> Any:
    """The file's value, or None where it is absent or damaged."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def write_checked(path: Path, value: Any) -> None:
    """Write JSON with its own sha256, so that a change by anything else is noticed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, canonical_json({"sha256": hashlib.sha256(canonical_json(value)).hexdigest(), "value": value}))


def read_checked(path: Path) -> Any:
    """What ``write_checked`` wrote, or None where that is absent or damaged."""
    content = read_json(path)
    if not isinstance(content, dict) or content.keys() != {"sha256", "value"}:
        return None
    intact = content["sha256"] == hashlib.sha256(canonical_json(content["value"])).hexdigest()
    return content["value"] if intact else None


def shard_files(entry: Mapping[str, Any] | None) -> dict[str, str]:
    """File names of a shard with their sha256; none for a shard all of whose records were rejected."""
    if entry is None:
        return {}
    shard = ShardEntry(**entry)
    return {shard.name: shard.sha256, shard.idx_name: shard.idx_sha256, shard.meta_name: shard.meta_sha256}


def write_result(path: Path, folder: Path, result: Mapping[str, Any]) -> None:
    """Record a shard as finished, with the stamps by which a change of its files is noticed."""
    stamps = {name: file_stamp(folder / name) for name in shard_files(result["entry"])}
    write_checked(path, {**result, "stamps": stamps})


def file_stamp(path: Path) -> list[int]:
    """Size and times; the change time cannot be set by hand, so a file that was touched is always noticed."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _intact(folder: Path, path: Path, result: Mapping[str, Any]) -> bool:
    files = shard_files(result["entry"])
    try:
        if all(result["stamps"].get(name) == file_stamp(folder / name) for name in files):
            return True
        if not all(_sha256(folder / name) == digest for name, digest in files.items()):
            return False
    except OSError:  # gone or unreadable: it is built again
        return False
    write_result(path, folder, result)  # copied or touched, and still the same
    return True


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    changes = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            changes += _changes(old, new, f"{prefix}{name}.")
        elif old != new:
            changes.append(f"{prefix}{name} was {json.dumps(old)}, now {json.dumps(new)}")
    return changes
