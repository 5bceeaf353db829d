"""What a rank and its loader workers do about signals and memory."""

import ctypes
import gc
import multiprocessing
import os
import signal
import time
from types import FrameType

from shards.cli import SAME_SIGNAL_S
from shards.parent import die_with_parent

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # Source: mallopt(3)
_LARGE_BYTES = 1 << 25  # the most that it takes for the latter

EXIT_STOPPED = 75  # stopped by a signal after saving: start again to go on


def become_worker(_worker: int = 0) -> None:
    """Set up a loader worker: it dies with its trainer, and leaves Ctrl-C to it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    die_with_parent(parent.pid)
    keep_freed_memory()
    gc.freeze()  # looking for garbage among what it has in common with its trainer would copy all of that: 60 MB
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def keep_freed_memory() -> None:
    """Have glibc use freed memory again instead of giving it back to the kernel, which hands it out page by page.

    A batch of pictures is freed as a whole; without this reading the next one took ten times as long.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 8 * _LARGE_BYTES)


class StopRequest:
    """Whether SIGTERM or SIGINT has asked this process to stop. A second signal leaves at once."""

    def __init__(self) -> None:
        self._since: float | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)

    def __bool__(self) -> bool:
        return self._since is not None

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
            os.write(2, b"asked to stop: that is after this step and its save; a second signal ends at once, unsaved\n")
        elif now - self._since > SAME_SIGNAL_S:
            os._exit(1)
