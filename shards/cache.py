"""A dataset at an address, as one node of a run has it: lists here for good, fragments while they are needed.

    CACHE/.lock                        held by the run that fetches, let go by the kernel when its processes are gone
    CACHE/MANIFEST_ID/*.idx, *.meta.jsonl    the lists, compared with the manifest's hashes
    CACHE/fragments/ID.SHARD.FIRST+COUNT.EPOCH   whole fragments; EPOCH is ``all`` where everything fits the budget
    CACHE/progress                     little-endian int64: fragments fetched, then each rank's position
    CACHE/failed                       why the fetching ended

One process a node fetches and drops fragments (``shards.fetch``); all others only read them.
"""

import fcntl
import hashlib
import os
import re
import struct
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from shards.atomic import ASIDE, aside
from shards.errors import ConfigError, FormatError
from shards.index import REBUILD
from shards.manifest import NAME, Manifest, ShardEntry
from shards.places import require_folder
from shards.remote import Remote, RemoteError, shown

REQUESTS = 16  # lists fetched at once
BLOCK = 32  # samples read at once where no plan tells what comes next, but neighbours were asked for
LEFT = ".left."  # begins the names of fragments that an earlier run left, until they are known to be whole
_LOCK_S = 10.0  # a run that was just killed may still be going away
_POLL_S = (0.002, 0.05)  # first and longest pause of a reader that waits
_FRAGMENT = re.compile(r"[0-9a-f]{8}\.[0-9A-Za-z_.-]+\.[0-9]+\+[0-9]+\.(?:[0-9]+|all)")


@dataclass(frozen=True)
class Planned:
    """A run that fetches along its plan.

    fragment   samples in a whole one, from the shard's first sample on
    whole      all of it fits the budget, so nothing is ever dropped
    timeout_s  seconds without any new fragment after which a reader gives up
    """

    fragment: int
    whole: bool
    timeout_s: float


class CacheFolder:
    """What the processes of a node share, whatever the datasets."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser()
        self.fragments = self.root / "fragments"

    def make(self) -> None:
        """Make the folder where it is not there.

        Raises:
            ConfigError: nothing can be written there.
        """
        require_folder(self.root, "data.cache_dir")
        self.root.mkdir(parents=True, exist_ok=True)

    def failure(self) -> str | None:
        """Why the fetching ended, None if it has not."""
        try:
            return (self.root / "failed").read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def progress(self) -> list[int]:
        """Fragments fetched by this run, and for each rank on the node the position below which it has every sample."""
        raw = (self.root / "progress").read_bytes()
        return list(struct.unpack(f"<{len(raw) // 8}q", raw))

    def report(self, slot: int, value: int) -> None:
        """Set the number ``slot`` of ``progress``; each has one writer."""
        descriptor = os.open(self.root / "progress", os.O_WRONLY)
        try:
            os.pwrite(descriptor, struct.pack("<q", value), 8 * slot)
        finally:
            os.close(descriptor)

    def take(self) -> BinaryIO:
        """Hold the folder for this run, and set aside what an earlier one left.

        Raises:
            ConfigError: another run fetches into it, or nothing can be written there.
        """
        self.make()
        self.fragments.mkdir(exist_ok=True)
        file = (self.root / ".lock").open("a+b")
        until = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    file.seek(0)
                    raise ConfigError(
                        f"{self.root}: process {file.read().decode() or 'unknown'} fetches shards into it; wait for it, end "
                        "it, or choose another data.cache_dir",
                        path=self.root,
                    ) from None
                time.sleep(0.05)
        file.truncate(0)
        file.write(str(os.getpid()).encode())
        file.flush()
        (self.root / "failed").unlink(missing_ok=True)
        for path in list(self.fragments.iterdir()):
            name = path.name.removeprefix(LEFT)
            if name.endswith(ASIDE) or not _FRAGMENT.fullmatch(name):
                path.unlink()
            elif name == path.name:  # out of the readers' sight until its checksums were compared
                path.replace(path.with_name(LEFT + name))
        return file

    def begin(self, positions: list[int]) -> None:
        """Set every rank's position before any of them reads."""
        path = self.root / "progress"
        aside(path).write_bytes(struct.pack(f"<{1 + len(positions)}q", 0, *positions))
        aside(path).replace(path)


class NodeCache:
    """The lists and fragments of one dataset in a node's cache folder."""

    def __init__(
        self, location: str, root: Path, manifest: Manifest | None = None, timeout_s: float | None = None
    ) -> None:
        """Reads the manifest unless it is given. ``timeout_s``: for a read beside the plan, tries included.

        Raises:
            ConfigError: there is none. FormatError: it is damaged. RemoteError: the store does not answer.
        """
        self._forget()
        self.location = location
        self.node = CacheFolder(root)
        self.timeout_s = timeout_s
        self.manifest = self._read_manifest() if manifest is None else manifest
        self.folder = self.node.root / self.manifest.manifest_id[:16]
        self.planned: Planned | None = None

    def _forget(self) -> None:
        """What belongs to one process."""
        self._remote: Remote | None = None
        self._block = ("", 0, b"")  # shard, first byte, bytes
        self._last = ("", 0)  # shard and sample that were read last

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_remote", "_block", "_last")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __str__(self) -> str:
        return shown(self.location)

    @property
    def remote(self) -> Remote:
        """The folder at the address; not to be used in a process that was forked after its first use."""
        if self._remote is None:
            self._remote = Remote(self.location, patience_s=self.timeout_s)
        return self._remote

    def _read_manifest(self) -> Manifest:
        try:
            raw = self.remote.read(NAME)
        except FileNotFoundError:
            raise ConfigError(
                f"{self}: has no {NAME}, so it is no shard folder, or its build has not ended; check the address"
            ) from None
        return Manifest.parse(raw, f"{self}/{NAME}")

    def fetch_lists(self, split: str) -> int:
        """Have the index and the sample list of every shard of a split here, and say how many bytes they take.

        Raises:
            ConfigError: nothing can be written in the cache folder.
            FormatError: one is not what the manifest says. RemoteError: one cannot be had.
        """
        wanted = [
            pair
            for entry in self.manifest.of_split(split)
            for pair in ((entry.idx_name, entry.idx_sha256), (entry.meta_name, entry.meta_sha256))
        ]
        self.node.make()
        self.folder.mkdir(exist_ok=True)
        with locked(self.folder / ".lock"), ThreadPoolExecutor(REQUESTS) as pool:
            try:
                return sum(pool.map(lambda pair: self._fetch_list(*pair), wanted))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _fetch_list(self, name: str, sha256: str) -> int:
        path = self.folder / name
        if path.exists() and _sha256(raw := path.read_bytes()) == sha256:
            return len(raw)
        try:
            raw = self.remote.read(name)
        except FileNotFoundError:
            raise FormatError(f"{self}/{name}: is missing, the manifest lists its shard; {REBUILD}") from None
        if (found := _sha256(raw)) != sha256:
            raise FormatError(f"{self}/{name}: sha256 is {found}, the manifest says {sha256}; {REBUILD}")
        aside(path).write_bytes(raw)  # not fsynced: every start compares the hash
        aside(path).replace(path)
        return len(raw)

    def read(
        self,
        entry: ShardEntry,
        offsets: NDArray[np.int64],
        inside: int,
        span: tuple[int, int],
        key: str,
        epoch: int | None,
    ) -> bytes:
        """The bytes at the places ``span`` of a shard, which are those of its sample ``inside``.

        ``epoch``: of the slot that is read; None for what is not in the plan, which is fetched at once and not kept.

        Raises:
            RemoteError: it cannot be had; shard and ``key`` are named.
        """
        if self.planned is None or epoch is None:
            return self._read_now(entry, offsets, inside, span, key)
        size = self.planned.fragment
        begin = inside // size * size
        path = self.path(entry, begin, min(size, entry.num_samples - begin), epoch)
        descriptor = self._wait(path, f"{entry.name}: sample {inside} ({key})")
        try:
            return os.pread(descriptor, span[1] - span[0], span[0] - int(offsets[begin]))
        finally:
            os.close(descriptor)  # an open one would hold its bytes on the disk beyond the budget

    def _read_now(
        self, entry: ShardEntry, offsets: NDArray[np.int64], inside: int, span: tuple[int, int], key: str
    ) -> bytes:
        """Only the bytes asked for; but from the second of two neighbours on, those that follow come along."""
        name, start, data = self._block
        if not (name == entry.name and start <= span[0] and span[1] <= start + len(data)):
            follows = self._last == (entry.name, inside - 1)
            start, stop = span if not follows else (span[0], int(offsets[min(inside + BLOCK, entry.num_samples)]))
            try:
                data = self.remote.read_range(entry.name, start, stop, entry.num_bytes)
            except FileNotFoundError:
                raise RemoteError(missing(self, entry)) from None
            except RemoteError as error:
                raise RemoteError(f"{entry.name}: sample {inside} ({key}): {error}") from None
            if follows:
                self._block = (entry.name, start, data)
        self._last = (entry.name, inside)
        return data[span[0] - start : span[1] - start]

    def path(self, entry: ShardEntry, first: int, count: int, epoch: int) -> Path:
        """Where ``count`` samples of a shard from sample ``first`` on lie for an epoch."""
        assert self.planned is not None
        of = f"{self.manifest.manifest_id[:8]}.{entry.name.removesuffix('.tar')}.{first}+{count}"
        return self.node.fragments / f"{of}.{'all' if self.planned.whole else epoch}"

    def try_range(self, shards: Sequence[ShardEntry]) -> None:
        """Ask for a range behind the first bytes of a shard, so that a store that refuses does so at the start."""
        for entry in shards:
            if entry.num_samples:
                try:
                    self.remote.read_range(entry.name, BLOCK, 2 * BLOCK, entry.num_bytes)
                except FileNotFoundError:
                    raise RemoteError(missing(self, entry)) from None
                return

    def _wait(self, path: Path, what: str) -> int:
        assert self.planned is not None
        pause, seen, since = _POLL_S[0], -1, time.monotonic()
        while True:
            try:
                return os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                pass
            if why := self.node.failure():
                raise RemoteError(f"{what}: the fetching has ended: {why}", path=path)
            if (fetched := self.node.progress()[0]) != seen:
                seen, since = fetched, time.monotonic()
            elif time.monotonic() - since > self.planned.timeout_s:
                raise RemoteError(
                    f"{what}: no fragment came from {self} in {self.planned.timeout_s:g} s, and the process that fetches them "
                    "says nothing; see that it was not killed for memory, then start again to go on",
                    path=path,
                )
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S[1])


def missing(cache: NodeCache, entry: ShardEntry) -> str:
    """The sentence for a shard that is not at the address."""
    return f"{cache}/{entry.name}: is missing, the manifest lists it; {REBUILD}"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Alone among processes that lock the same file; the kernel lets go of it with the process."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
