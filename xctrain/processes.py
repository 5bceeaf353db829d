"""Signals, and processes that do not outlive the one that started them."""

import ctypes
import os
import signal
import time
from types import FrameType

_PR_SET_PDEATHSIG = 1  # Source: prctl(2)
_SAME_SIGNAL_S = 1.0  # a terminal and a launcher may both deliver one Ctrl-C

EXIT_STOPPED = 75  # stopped by a signal after saving: start again to go on


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent is gone, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def become_worker(_worker: int = 0) -> None:
    """Set up a loader worker: it dies with its trainer, and leaves Ctrl-C to it."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


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
        elif now - self._since > _SAME_SIGNAL_S:
            os._exit(1)
