"""The process on a node that fetches fragments along the plan, and drops each after its last slot; one a run."""

import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np

from shards.atomic import aside
from shards.cache import LEFT, CacheFolder, NodeCache, Planned, missing
from shards.errors import ConfigError, FormatError, UserError, counted, describe
from shards.index import read_index
from shards.reader import MismatchError, OpenShard, SplitReader, checked_sample
from shards.remote import Remote, RemoteError
from shards.schedule import Fragments, Node, Schedule, least_cache_bytes, mixes_of
from shards.stream import Stream

POLL_S = 0.02
SCAN_STEPS = 64  # steps of the plan that are worked out at once
_DAMAGED_TRIES = 2  # fetches of a fragment whose checksums differ; then it is taken for what lies at the address


@dataclass(frozen=True)
class Job:
    """What the process is told.

    readers    of all datasets, those in a folder here too, in the order of the stream's numbering
    fragment   samples in a whole fragment
    max_bytes  of fragments
    requests   at once
    timeout_s  for one fragment, tries included
    """

    readers: tuple[SplitReader, ...]
    stream: Stream
    node: Node
    folder: CacheFolder
    fragment: int
    start: int
    max_bytes: int
    requests: int
    timeout_s: float


class Fetcher:
    """The process, and the hold on the cache folder; both go with the process that has this object."""

    def __init__(self, job: Job, lock: BinaryIO) -> None:
        self._lock = lock
        path = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shards.fetch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            pass_fds=[lock.fileno()],
            start_new_session=True,  # Ctrl-C is for the run, which reads on until it has saved
        )
        assert self._process.stdin is not None
        pickle.dump(job, self._process.stdin)  # from this process to its child, so no stranger's pickle
        self._process.stdin.flush()

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._lock.close()


def plan_fetching(
    readers: Sequence[SplitReader], stream: Stream, fragment: int, nodes: int, max_bytes: int, timeout_s: float
) -> Planned:
    """How a node will keep fragments within ``max_bytes``, the lists included; the same on all nodes.

    Raises:
        ConfigError: the budget is too small; what would do is named.
    """
    fragments = fragments_of(readers, fragment)
    lists = list_bytes(readers)
    least = lists + least_cache_bytes(stream, nodes, fragments)
    if max_bytes < least:
        raise ConfigError(
            f"data.cache_gb is {max_bytes / 1e9:g}, this order needs {_gb_up(least)} on a node, {counted(nodes, 'node')} in all, "
            "as the slots of a window come in any order; set "
            f"data.cache_gb={_gb_up(least)} or more (twice that fetches a whole window ahead), or a smaller order.window"
        )
    return Planned(fragment, bool(fragments.num_bytes.sum() + lists <= max_bytes), 2 * timeout_s)


def _gb_up(num_bytes: int) -> str:
    """Rounded up, so that the number does."""
    return f"{-(-num_bytes // 10**6) / 1000:g}"


def list_bytes(readers: Sequence[SplitReader]) -> int:
    """Bytes of the indexes and sample lists that lie in the cache folder."""
    return sum(
        (reader.folder / name).stat().st_size
        for reader in readers
        if reader.cache
        for entry in reader.shards
        for name in (entry.idx_name, entry.meta_name)
    )


def fragments_of(readers: Sequence[SplitReader], size: int) -> Fragments:
    """The fragments of datasets, from their indexes; those of a folder here have no bytes to fetch."""
    offsets = [
        read_index(r.folder / e.idx_name, e.num_samples, e.num_bytes, e.foreign)
        if r.cache
        else np.zeros(e.num_samples + 1, np.int64)
        for r in readers
        for e in r.shards
    ]
    return Fragments.cut(offsets, size)


class _Fragments:
    """Fetches, checks and keeps single fragments."""

    def __init__(self, job: Job) -> None:
        self.table = fragments_of(job.readers, job.fragment)
        self._readers = job.readers
        self._firsts = list(accumulate((len(r) for r in job.readers), initial=0))
        self.datasets = np.searchsorted(self._firsts, self.table.starts, side="right") - 1
        self._remotes = [Remote(r.cache.location, patience_s=job.timeout_s) if r.cache else None for r in job.readers]

    def place(self, use: int) -> tuple[int, OpenShard, int, int]:
        """Dataset, shard, first sample in it, and number of samples."""
        fragment = use % len(self.table.starts)
        index = int(self.table.starts[fragment])
        number = bisect_right(self._firsts, index) - 1
        reader = self._readers[number]
        _, first = reader.locate(index - self._firsts[number])
        return number, reader.shard_of(index - self._firsts[number]), first, int(self.table.sizes[fragment])

    def cache(self, use: int) -> NodeCache:
        """The cache of the dataset."""
        cache = self._readers[self.place(use)[0]].cache
        assert cache is not None
        return cache

    def num_bytes(self, use: int) -> int:
        """Of a use."""
        return int(self.table.num_bytes[use % len(self.table.starts)])

    def path(self, use: int) -> Path:
        """Where a use lies."""
        _, shard, first, count = self.place(use)
        return self.cache(use).path(shard.entry, first, count, use // len(self.table.starts))

    def about(self, use: int) -> str:
        """Shard and samples, for a message."""
        _, shard, first, count = self.place(use)
        keys = " to ".join(dict.fromkeys(shard.meta(i).key for i in (first, first + count - 1)))
        return f"{shard.entry.name}: samples {first} to {first + count - 1} ({keys})"

    def take(self, use: int, left: Path | None) -> None:
        """Put a use in its place: ``left``, which an earlier run left of it, if that is whole, else fetched."""
        path = self.path(use)
        if left is not None:
            if self._whole(use, left.read_bytes()):
                left.replace(path)
                return
            left.unlink()
        for _ in range(_DAMAGED_TRIES):
            data = self._fetch(use)
            if self._whole(use, data):
                break
        aside(path).write_bytes(data)  # not fsynced: what a crash leaves is compared with its checksums
        aside(path).replace(path)

    def _fetch(self, use: int) -> bytes:
        number, shard, first, count = self.place(use)
        start, stop = int(shard.offsets[first]), int(shard.offsets[first + count])
        remote = self._remotes[number]
        assert remote is not None
        try:
            return remote.read_range(shard.entry.name, start, stop, shard.entry.num_bytes)
        except FileNotFoundError:
            raise RemoteError(missing(self.cache(use), shard.entry)) from None

    def _whole(self, use: int, data: bytes) -> bool:
        _, shard, first, count = self.place(use)
        begin = int(shard.offsets[first])
        if len(data) != int(shard.offsets[first + count]) - begin:
            return False
        try:
            for inside in range(first, first + count):
                meta = shard.meta(inside)
                start, stop = shard.span(inside, meta)
                checked_sample(meta, data[start - begin : stop - begin], start, shard.entry.foreign)
        except (MismatchError, FormatError, ValueError):
            return False
        return True


class _Run:
    """Takes uses in the order of their first slots, as the budget has room, and drops them after their last."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.fragments = _Fragments(job)
        self.folder = job.folder
        self.whole = any(r.cache.planned.whole for r in job.readers if r.cache and r.cache.planned)
        self.schedule = Schedule(job.stream, job.node, self.fragments.table)
        self.fetched = int((self.fragments.table.num_bytes > 0).sum())
        # An epoch holds all that a node ever needs, but for other nodes' lanes.
        self.epoch = max(mix.num_positions for mix in mixes_of(job.stream))
        self.datasets = self.fragments.datasets
        self.epochs = np.zeros(len(job.readers), np.int64)  # of each dataset, the newest that is worked out
        self.scanned = job.start  # positions below this one are worked out
        self.last: dict[int, int] = {}  # use: position at which the last step known to need it begins
        self.queue: deque[int] = deque()  # uses not taken yet
        self.held: dict[int, int] = {}  # use: bytes, from the moment it is asked for
        self.left = self._left()
        self.used = sum(path.stat().st_size for path in self.left.values())
        self.running: dict[Future[None], tuple[int, float]] = {}
        self.taken = 0

    def _left(self) -> dict[str, Path]:
        """What an earlier run left, by what it holds; one of each."""
        left: dict[str, Path] = {}
        for path in sorted(self.folder.fragments.glob(f"{LEFT}*")):
            of = _of(path.name.removeprefix(LEFT))
            if of in left:
                path.unlink()
            left.setdefault(of, path)
        return left

    def run(self) -> None:
        """Until the parent ends, or something fails."""
        pool = ThreadPoolExecutor(self.job.requests)
        known = -1
        while True:
            delivered = min(self.folder.progress()[1:])
            scanned_more = self._scan(delivered)
            if delivered != known or scanned_more:
                known = delivered
                self._drop(delivered)
            while self.queue and len(self.running) < self.job.requests and self._room(self.queue[0]):
                use = self.queue.popleft()
                left = self.left.pop(_of(self.fragments.path(use).name), None)
                self.running[pool.submit(self.fragments.take, use, left)] = (use, time.monotonic())
            self._collect(0.0 if scanned_more else POLL_S)

    def _scan(self, delivered: int) -> bool:
        """Work out a little more of the plan, if there is any use in it."""
        stream, batch = self.job.stream, self.job.stream.global_batch
        if stream.end is not None and self.scanned >= stream.end:
            return False
        if self.whole:
            # The node's lanes have other fragments each epoch, so it goes on until it has all, never far ahead.
            if len(self.last) == self.fetched or self.scanned >= delivered + 2 * self.epoch:
                return False
        # Far enough to know of whatever may be dropped that no later slot needs it, and to keep the requests busy.
        elif self.scanned >= delivered + batch + self.schedule.gap and self.queue:
            return False
        found = self.schedule.uses(self.scanned, SCAN_STEPS)
        epochs, fragments = np.divmod(found[found >= 0], self.schedule.num_fragments)
        np.maximum.at(self.epochs, self.datasets[fragments], epochs)
        for step, uses in enumerate(found.tolist()):
            for use in dict.fromkeys(uses):
                if use < 0:
                    continue
                if self.whole:
                    use %= self.schedule.num_fragments
                if use not in self.last:
                    self.queue.append(use)
                self.last[use] = self.scanned + step * batch
        self.scanned += SCAN_STEPS * batch
        return True

    def _drop(self, delivered: int) -> None:
        """Remove what no slot of its epoch needs any more; the position alone decides."""
        if self.whole:
            return
        for use in [use for use in self.held if self.last[use] < delivered]:
            if not self._is_over(use):
                continue
            self.fragments.path(use).unlink(missing_ok=True)
            self.used -= self.held.pop(use)
            del self.last[use]

    def _is_over(self, use: int) -> bool:
        """Whether all of the plan that could need it once more is worked out."""
        end = self.job.stream.end
        if end is not None and self.scanned >= end:
            return True
        epoch, fragment = divmod(use, self.schedule.num_fragments)
        if self.scanned < self.last[use] + self.schedule.gap:
            return False
        return self.epochs[self.datasets[fragment]] > epoch or not self.schedule.is_shared(use)

    def _room(self, use: int) -> bool:
        """Make a use's bytes count, if they fit into the budget beside all others."""
        needed, own = self.fragments.num_bytes(use), _of(self.fragments.path(use).name)
        old = self.left[own].stat().st_size if own in self.left else 0
        for of in [of for of in self.left if of != own]:
            if self.used - old + needed <= self.job.max_bytes:
                break
            path = self.left.pop(of)
            self.used -= path.stat().st_size
            path.unlink()
        if self.used - old + needed > self.job.max_bytes:
            return False
        self.used += needed - old
        self.held[use] = needed
        return True

    def _collect(self, timeout_s: float) -> None:
        if not self.running:
            time.sleep(timeout_s)
            return
        done, _ = wait(self.running, timeout_s, FIRST_COMPLETED)
        for future in done:
            use, _ = self.running.pop(future)
            try:
                future.result()
            except UserError as error:
                raise RemoteError(f"{self.fragments.about(use)}: {error}") from None
            except OSError as error:
                raise RemoteError(f"{self.fragments.about(use)}: {describe(error)}") from None
            self.taken += 1
            self.folder.report(0, self.taken)
        patience = self.job.timeout_s * 1.25  # the request itself gives up before that, and says more
        for use, since in self.running.values():
            if time.monotonic() - since > patience:
                raise RemoteError(
                    f"{self.fragments.about(use)}: nothing came from {self.fragments.cache(use)} in {patience:g} s; check the "
                    "network and the server, or raise data.read_timeout_s, then start again to go on"
                )


def _of(name: str) -> str:
    """What a file of fragments holds, without the epoch that it is kept for."""
    return name.rpartition(".")[0]


def main() -> None:
    """Read the job from the parent, run it, and go when the parent goes."""
    job: Job = pickle.load(sys.stdin.buffer)

    def go_with_parent() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=go_with_parent, daemon=True).start()
    try:
        _Run(job).run()
    except UserError as error:
        why = str(error)
    except OSError as error:
        why = describe(error)
    except Exception as error:  # noqa: BLE001 - said here, and to those who wait for fragments
        traceback.print_exc()
        why = f"the process that fetches fragments met a bug: {type(error).__name__}: {error}"
    path = job.folder.root / "failed"
    aside(path).write_text(why, encoding="utf-8")
    aside(path).replace(path)
    os._exit(1)  # threads may still wait for the store


if __name__ == "__main__":
    main()
