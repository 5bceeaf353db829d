"""A finished shard folder to an object store: one whole PUT an object, the manifest last, only what differs.

A store has no rename, so the build is made in a local folder, which stays: a rerun goes on there, and compares.
OUT/.build/uploaded.json   sha256 of what was sent, and what the store then said of it; what is still to be removed there
"""

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipelines.progress import Progress
from shards.atomic import aside, publish, write_file
from shards.errors import ConfigError, FormatError
from shards.manifest import NAME as MANIFEST
from shards.manifest import Manifest
from shards.remote import Found, Remote, RemoteError

ADDED_FILES = (("rejects", "jsonl"), ("report", "json"), ("report", "html"))  # of each addition, with its number
AT_ONCE = 4  # objects sent side by side
REMEMBERED = "uploaded.json"


class Upload:
    """What is at an address, and what has to become of it."""

    def __init__(self, folder: Path, address: str, overwrite: bool) -> None:
        """Asks the store what is there.

        Raises:
            ConfigError: it is something else, and ``overwrite`` is off. RemoteError: the store does not answer.
        """
        self._folder, self._overwrite = folder, overwrite
        self._remote = Remote(address)
        self._remote.require_bucket()
        self._there = self._remote.list()
        self._sent = self._remembered(address)
        self._before = self._published()
        self._require_ours()

    def _remembered(self, address: str) -> dict[str, Any]:
        try:
            found = json.loads((self._folder / ".build" / REMEMBERED).read_bytes())
            return found if found["address"] == address else {"address": address, "files": {}}
        except (OSError, ValueError, KeyError, TypeError):
            return {"address": address, "files": {}}

    def _published(self) -> Manifest | None:
        self._raw = b""
        if MANIFEST not in self._there:
            return None
        self._raw = self._remote.read(MANIFEST)
        with suppress(FormatError):
            return Manifest.parse(self._raw, f"{self._remote}/{MANIFEST}")
        return None

    def _require_ours(self) -> None:
        if self._overwrite or not self._there or self._sent["files"] or self._sent.get("stale"):
            return
        if self._before is None:
            names = [name for name in self._there if "/" in name or not name.endswith((".tar", ".idx", ".jsonl"))]
            if not names:
                return  # a first upload that was killed, and whose local folder is gone
            raise ConfigError(
                f"{self._remote}: is not empty and was not written by this build (it holds {sorted(names)[0]}); choose "
                "another out, or replace what is there with build.overwrite=true"
            )
        if (here := self._here()) and here.num_shards_of(self._before.manifest_id) is not None:
            return
        if here or (self._folder / ".build" / "results").exists():
            self._refuse(self._before)

    def _here(self) -> Manifest | None:
        try:
            return Manifest.load(self._folder)
        except (ConfigError, FormatError):
            return None

    def _refuse(self, before: Manifest) -> None:
        raise ConfigError(
            f"{self._remote}: holds the dataset {before.manifest_id[:16]}, which this build did not put there; choose another "
            "out, or replace it with build.overwrite=true"
        )

    def fetch(self, progress: Progress = lambda count: None) -> None:
        """Copy the dataset that is there into the local folder, but for what that has already. Counts bytes as progress.

        Raises:
            ConfigError: there is none.
        """
        if self._before is None:
            raise ConfigError(f"{self._remote}: holds no dataset to add to; check the address, or build there first")
        here = self._here()
        if here and here.num_shards_of(self._before.manifest_id) is not None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        others = (name for name in self._there if name.startswith(("rejects", "report")) and "/" not in name)
        digests: dict[str, str | None] = {**_shard_digests(self._before), **dict.fromkeys(others)}
        for name, digest in digests.items():
            path = self._folder / name
            if digest is None or not path.exists() or _sha256(path) != digest:
                self._remote.fetch(name, aside(path))
                if digest is not None and (found := _sha256(aside(path))) != digest:
                    raise RemoteError(
                        f"{self._remote}/{name}: sha256 is {found}, the manifest says {digest}; build it there again"
                    )
                publish(aside(path), path)
            progress(path.stat().st_size)
        write_file(self._folder / MANIFEST, self._raw)

    def send(self, progress: Progress = lambda count: None) -> int:
        """Make the address hold what the folder holds; number of objects sent. Counts bytes as progress.

        Raises:
            RemoteError: the store refused or went away; the old manifest is still there, or none is.
        """
        manifest = Manifest.load(self._folder)
        before = self._before
        known_here = self._overwrite or self._sent["files"]
        if before and not known_here and manifest.num_shards_of(before.manifest_id) is None:
            self._refuse(before)
        digests = self._digests(manifest)
        known = _shard_digests(before) if before else {}
        todo = [name for name, digest in digests.items() if not self._holds(name, digest, known)]
        older = known.keys() | _additions_files(before) if self._overwrite else set()
        stale = sorted((older | set(self._sent.get("stale", ()))) & self._there.keys() - digests.keys() - {MANIFEST})
        raw = (self._folder / MANIFEST).read_bytes()
        if not todo and not stale and raw == self._raw:
            return 0
        self._sent["stale"] = stale
        self._remember()  # a rerun after a kill removes them too, whoever's they are by then
        if known.keys() & (set(todo) | set(stale)):  # without a manifest it is no dataset, rather than a wrong one
            self._remote.remove(MANIFEST)
        self._put_all(todo, digests, progress)
        self._put(MANIFEST, hashlib.sha256(raw).hexdigest())
        for name in stale:
            self._remote.remove(name)
            self._sent["files"].pop(name, None)
        del self._sent["stale"]
        self._remember()
        return len(todo) + 1

    def _digests(self, manifest: Manifest) -> dict[str, str]:
        """sha256 of every file but the manifest: shards, then reports and lists."""
        others = sorted(p for p in self._folder.iterdir() if p.is_file() and not p.name.startswith("."))
        digests = _shard_digests(manifest)
        for path in others:
            if path.name != MANIFEST and not path.name.endswith((".tar", ".idx", ".meta.jsonl")):
                digests[path.name] = _sha256(path)
        return digests

    def _holds(self, name: str, digest: str, known: Mapping[str, str]) -> bool:
        """Whether the store has the file already: it says of it what it said when it was sent, or its manifest does."""
        found = self._there.get(name)
        if found is None or found.num_bytes != (self._folder / name).stat().st_size:
            return False
        if sent := self._sent["files"].get(name):
            return bool(sent == [digest, *_as_list(found)])
        return known.get(name) == digest

    def _put_all(self, names: Sequence[str], digests: Mapping[str, str], progress: Progress) -> None:
        stop = threading.Event()

        def put(name: str) -> None:
            if not stop.is_set():
                self._put(name, digests[name])
                progress((self._folder / name).stat().st_size)

        try:
            with ThreadPoolExecutor(AT_ONCE) as threads:
                try:
                    for _ in threads.map(put, names):
                        self._remember()
                except BaseException:
                    stop.set()
                    raise
        finally:
            self._remember()  # those too that were under way when another one failed

    def _put(self, name: str, digest: str) -> None:
        self._remote.put(name, self._folder / name)
        found = self._remote.find(name)
        assert found is not None
        self._sent["files"][name] = [digest, *_as_list(found)]

    def _remember(self) -> None:
        data = json.dumps({**self._sent, "files": dict(self._sent["files"])}, sort_keys=True).encode()
        write_file(self._folder / ".build" / REMEMBERED, data)


def _as_list(found: Found) -> list[Any]:
    return list(asdict(found).values())


def _shard_digests(manifest: Manifest) -> dict[str, str]:
    return {
        name: digest
        for shard in manifest.shards
        for name, digest in (
            (shard.idx_name, shard.idx_sha256),
            (shard.meta_name, shard.meta_sha256),
            (shard.name, shard.sha256),
        )
    }


def _additions_files(manifest: Manifest | None) -> set[str]:
    numbers = range(1, 1 + len(manifest.additions)) if manifest else ()
    return {f"{name}-{n}.{kind}" for n in numbers for name, kind in ADDED_FILES}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
