"""Processes that do not outlive the one that started them."""

import ctypes
import os
import signal

_libc = ctypes.CDLL(None)  # loaded here, as nothing may be loaded between fork and exec
_PR_SET_PDEATHSIG = 1  # Source: prctl(2)


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent, process ``parent``, is gone, however that happens.

    Also for ``preexec_fn``. The kernel says nothing of a parent that was gone before; then this process ends here.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(1)
