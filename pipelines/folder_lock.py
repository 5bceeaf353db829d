"""Who may write in a shard folder: one build at a time, and the processes that work for it.

.build/owner   locked by the build for as long as it lives
.build/lock    locked, shared, by every process that writes for a build; the next build waits until all of them are gone
.build/run     names the build that holds the folder; a process that works for another one ends within moments

Locks hold between the processes of a machine and on most shared file systems, not on all. ``run`` works wherever the files
are seen: where locks do not reach, the build that started last goes on and the other stops with a message.
"""

import errno
import fcntl
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pipelines.errors import BuildError
from shards.atomic import write_file

PATIENCE_S = 10  # processes of a killed build end within moments
LOOK_EVERY_S = 1.0
LOST = 4  # exit code of a process whose build no longer holds the folder


@dataclass(frozen=True)
class FolderLock:
    """A build's hold on its folder. ``folder`` is its .build, ``run`` names the build."""

    folder: Path
    run: str

    @property
    def lost(self) -> bool:
        """Whether the build that this was given out by has ended, or another one has taken the folder over."""
        try:
            return (self.folder / "run").read_text() != self.run
        except FileNotFoundError:
            return True
        except OSError:
            return False  # cannot be told now; what is written there will say so

    def require(self) -> None:
        """Check that the folder is still held.

        Raises:
            BuildError: it is not.
        """
        if self.lost:
            raise lost(self.folder)

    def release(self) -> None:
        """End what works for this build elsewhere."""
        if not self.lost:
            with suppress(OSError):
                (self.folder / "run").unlink()

    def join(self) -> None:
        """Hold the folder in this process, which only works for the build, and end with the build."""
        descriptor = os.open(self.folder / "lock", os.O_RDWR)  # open until this process ends
        _lock(descriptor, fcntl.LOCK_SH)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self.lost:
            time.sleep(LOOK_EVERY_S)
        os._exit(LOST)


def lost(folder: Path) -> BuildError:
    """What a build is told that does not hold its folder any more."""
    return BuildError(
        f"{folder.parent}: another build took this folder over while this one was at work, or {folder.name} was removed; "
        "this one has stopped; run one build at a time in a folder",
        path=folder.parent,
    )


@contextmanager
def lock_folder(out: Path) -> Iterator[FolderLock]:
    """Hold a shard folder.

    Raises:
        BuildError: another build holds it.
    """
    folder = out / ".build"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "owner").open("a+b") as owner, (folder / "lock").open("a+b") as workers:
        _await(owner, out)
        lock = FolderLock(folder, uuid.uuid4().hex)
        write_file(folder / "run", lock.run.encode())  # what still works for a killed build now ends
        _await(workers, out)
        _lock(workers.fileno(), fcntl.LOCK_SH)
        try:
            yield lock
        finally:
            lock.release()


def _await(file: BinaryIO, out: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not _lock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB):
        if time.monotonic() > deadline:
            raise BuildError(
                f"{out}: another build is at work in this folder; wait for it, or choose another out", path=out
            )
        time.sleep(0.05)


def _lock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    return True  # or this file system has no locks; `run` is then all there is
