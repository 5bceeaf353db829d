"""The official COCO files, or any list of URLs, into a folder: whole and checked under their final names, or not there.

OUT/.download/NAME.part, NAME.json   the bytes so far, and the version of the file that they are from
OUT/.download/NAME.done              size and times of a file that was found to be whole, so that it is not read again
"""

import fcntl
import fnmatch
import hashlib
import json
import os
import queue
import shutil
import threading
import zipfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from pipelines.download_config import ANNOTATIONS, CAPTIONS, CAPTIONS_BYTES, DownloadConfig
from pipelines.errors import BuildError, DownloadError
from pipelines.progress import Progress, progress_bar
from pipelines.transfer import Partial, Wanted, ask_size, fetch, open_client
from shards.atomic import publish, write_file, written_aside
from shards.errors import ConfigError, counted
from shards.places import require_folder


@dataclass(frozen=True)
class Downloaded:
    """What a download came to; bytes are those of the whole files."""

    out: Path
    fetched: Sequence[str]
    present: Sequence[str]
    num_bytes: int
    next_step: str = ""

    def to_json(self) -> dict[str, Any]:
        """The same for programs."""
        return {**vars(self), "out": str(self.out), "fetched": list(self.fetched), "present": list(self.present)}

    def __str__(self) -> str:
        number = counted(len(self.fetched) + len(self.present), "file")
        text = (
            f"{self.out}: {number}, {size(self.num_bytes)}; {len(self.fetched)} fetched, {len(self.present)} were there"
        )
        return f"{text}\nnext: {self.next_step}" if self.next_step else text


class Download:
    """One download, as a context manager that holds the folder. ``plan``, then ``fetch`` each name, then ``finish``."""

    def __init__(self, config: DownloadConfig) -> None:
        self.config = config
        self._wanted = {wanted.name: wanted for wanted in config.wanted}
        self._kept = config.out / ".download"
        self._hosts = {
            urlsplit(w.url).netloc: threading.BoundedSemaphore(config.connections_per_host) for w in config.wanted
        }
        self._stop = threading.Event()
        self._todo: list[str] = []
        self._held = ExitStack()
        self._client: httpx.Client

    def __enter__(self) -> Self:
        with ExitStack() as held:
            require_folder(self.config.out, "out")
            require_folder(self._kept, f"out/{self._kept.name}")
            self._kept.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context((self._kept / "lock").open("a"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BuildError(
                    f"{self.config.out}: another download is at work in this folder; wait for it, or choose another out"
                ) from None
            self._client = held.enter_context(open_client(self.config.timeout_s))
            self._held = held.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._held.close()

    def stop(self) -> None:
        """Make every ``fetch`` end soon; what came is kept."""
        self._stop.set()

    def plan(self) -> list[str]:
        """Names of the files that are still to be fetched, and first a check that the disk has room for them.

        Raises:
            ConfigError: a file of that name is there which is not the one that is meant.
            DownloadError: the disk is too small; nothing was fetched.
        """
        todo = [wanted for wanted in self._wanted.values() if not self._is_there(wanted)]
        rank: dict[str, int] = {}
        order = {}
        for wanted in todo:  # hosts take turns, so that no thread waits for a busy host while another is idle
            host = urlsplit(wanted.url).netloc
            order[wanted.name] = rank[host] = rank.get(host, -1) + 1
        self._todo = sorted(order, key=order.__getitem__)
        self._require_room(todo)
        return self._todo

    @property
    def num_bytes(self) -> int:
        """Bytes of the files in ``plan``, as far as their sizes are known beforehand."""
        return sum(self._wanted[name].num_bytes or 0 for name in self._todo)

    def _is_there(self, wanted: Wanted) -> bool:
        path = self.config.out / wanted.name
        try:
            status = path.stat()
        except FileNotFoundError:
            return False
        stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, wanted.sha256, wanted.md5]
        done = self._kept / f"{wanted.name}.done"
        if done.exists() and done.read_text() == json.dumps(stamp):
            return True
        if not (wanted.has_digest or wanted.name.endswith(".zip") or wanted.num_bytes is not None):
            problem = "nothing tells whether it is whole: give its sha256"
        else:
            found = problem_of(path, wanted)
            if found is None:
                self._remember(wanted)
                return True
            problem = found
        raise ConfigError(f"{path}: is there already, but {problem}; move it away, or choose another out", path=path)

    def _remember(self, wanted: Wanted) -> None:
        status = (self.config.out / wanted.name).stat()
        stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, wanted.sha256, wanted.md5]
        write_file(self._kept / f"{wanted.name}.done", json.dumps(stamp).encode())

    def _require_room(self, todo: Sequence[Wanted]) -> None:
        needed, unknown = 0, []
        for wanted in todo:
            num_bytes = wanted.num_bytes if wanted.num_bytes is not None else ask_size(self._client, wanted)
            if num_bytes is None:
                unknown.append(wanted.name)
            needed += max(0, (num_bytes or 0) - Partial(self._kept, wanted.name).size)
            needed += CAPTIONS_BYTES if wanted.name in ANNOTATIONS else 0
        free = shutil.disk_usage(self.config.out).free
        if needed > free:
            more = f" and {', '.join(unknown)}, whose size is unknown," if unknown else ""
            raise DownloadError(
                f"{self.config.out}: {counted(len(todo), 'file')} need {size(needed)} more{more} and {size(free)} are free "
                f"there; free {size(needed - free)}, choose another out, or fetch less (parts)",
                path=self.config.out,
            )

    def fetch(self, name: str, progress: Progress = lambda count: None) -> None:
        """Fetch one planned file, check it and give it its name; for threads. Counts bytes as progress.

        Raises:
            DownloadError: it could not be fetched, or is not what it should be; never under its final name then.
        """
        wanted, partial = self._wanted[name], Partial(self._kept, name)
        with self._hosts[urlsplit(wanted.url).netloc]:
            joined = fetch(self._client, wanted, partial, self.config.tries, self._stop, progress)
            problem = problem_of(partial.path, wanted)
            if problem and joined:  # bytes of two tries: the file may have changed in between without a word
                progress(-partial.size)
                partial.remove()
                fetch(self._client, wanted, partial, self.config.tries, self._stop, progress)
                problem = problem_of(partial.path, wanted)
        if problem:
            partial.remove()
            raise DownloadError(
                f"{name}: what {wanted.shown} sent is not the file: {problem}; nothing of it was kept; check the URL and "
                "what is known of the file, or try another mirror",
                path=self.config.out / name,
            )
        with partial.path.open("rb") as file:
            os.fsync(file.fileno())
        publish(partial.path, self.config.out / name)
        self._remember(wanted)
        partial.remove()

    def finish(self) -> Downloaded:
        """Put COCO's caption files where a build looks for them."""
        for name in ANNOTATIONS & self._wanted.keys():
            unpack(self.config.out / name, CAPTIONS, self.config.out)
        there = [name for name in self._wanted if name not in self._todo]
        total = sum((self.config.out / name).stat().st_size for name in self._wanted)
        step, parts = "", set(self.config.parts)
        if self.config.dataset != "none" and "annotations" in parts and parts & {"train", "val"}:
            step = f"python -m pipelines build configs/build.yaml source.root={self.config.out} out=data/shards"
            step += "" if "train" in parts else " source.split=val"
            step += "" if len(parts) == 3 else " held_out=none"
        return Downloaded(self.config.out, self._todo, there, total, step)


def run_download(config: DownloadConfig) -> Downloaded:
    """Fetch with nothing but threads of this process.

    Raises:
        DownloadError: the first file that failed; the others were fetched nevertheless.
    """
    with Download(config) as job:
        names = job.plan()
        with progress_bar(job.num_bytes, "download", "B") as progress:
            try:
                for_each(lambda name: job.fetch(name, progress), names, config.connections)
            except BaseException:
                job.stop()
                raise
        return job.finish()


def for_each(function: Callable[[str], Any], names: Sequence[str], limit: int) -> None:
    """Call ``function`` for every name in daemon threads, which a signal need not wait for; then raise the first error."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)

    def work() -> None:
        while True:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                function(name)
                ended.put(None)
            except BaseException as error:  # noqa: BLE001 - raised again by the caller
                ended.put(error)

    for _ in range(min(limit, len(names))):
        threading.Thread(target=work, daemon=True).start()
    errors = [error for error in (ended.get() for _ in names) if error is not None]
    if len(errors) > 1 and isinstance(errors[0], DownloadError):
        raise DownloadError(f"{errors[0]} ({len(errors)} files failed, this is the first)")
    if errors:
        raise errors[0]


def problem_of(path: Path, wanted: Wanted) -> str | None:
    """What shows that a file is not the one that is wanted; None if nothing does."""
    found = path.stat().st_size
    begins = _beginning(path)
    if wanted.num_bytes is not None and found != wanted.num_bytes:
        return f"it has {found} bytes, expected {wanted.num_bytes}{begins}"
    for kind in ("sha256", "md5"):
        if expected := getattr(wanted, kind):
            digest = _digest(path, kind)
            if digest != expected:
                return f"its {kind} is {digest}, expected {expected}{begins}"
    if wanted.has_digest or not wanted.name.endswith(".zip"):
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        return f"it is no whole zip ({error}){begins}"
    return f"its member {bad!a} is damaged" if bad else None


def _digest(path: Path, kind: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()


def _beginning(path: Path) -> str:
    """How a text begins that came in place of a file."""
    with path.open("rb") as file:
        begin = file.read(60)
    text = " ".join(begin.decode("ascii", "replace").split())
    return f"; it begins with {text!r}" if text and text.isascii() and text.isprintable() else ""


def unpack(archive: Path, pattern: str, folder: Path) -> None:
    """The members that fit ``pattern`` below ``folder``, each whole or absent; those that are there already stay."""
    with zipfile.ZipFile(archive) as opened:
        for member in opened.infolist():
            path = folder / member.filename
            if not fnmatch.fnmatch(member.filename, pattern) or ".." in PurePosixPath(member.filename).parts:
                continue
            if path.exists() and path.stat().st_size == member.file_size and _crc32(path) == member.CRC:
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            with opened.open(member) as source, written_aside(path) as file:
                shutil.copyfileobj(source, file, 1 << 20)


def _crc32(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            found = zlib.crc32(chunk, found)
    return found


def size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:.1f} GB"
