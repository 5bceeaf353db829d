"""Start one process per GPU on this node, pass signals on, and keep exit codes apart, which torchrun cannot."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from types import FrameType

from xctrain.processes import EXIT_STOPPED, die_with_parent

_POLL_S = 0.05
_BY_STOP_SIGNAL = (-signal.SIGTERM, -signal.SIGINT, 130)  # codes of a process that does not handle them
_GRACE_S = 5.0  # for ranks to end by themselves once one of them is gone; what they could save is saved already


def launch(command: Sequence[str], processes: int) -> int:
    """Run a command as ``processes`` ranks and give their common exit code.

    The ranks die with this process, even if it is killed. When one rank ends with an error the others are ended too.
    """
    port = str(free_port())
    ranks = [_start(command, rank, processes, port) for rank in range(processes)]
    asked: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() not in (None, 0, EXIT_STOPPED) for rank in ranks):
            break
        time.sleep(_POLL_S)
    codes = _end(ranks)
    if asked and any(code in _BY_STOP_SIGNAL for code in codes):
        return EXIT_STOPPED  # it came before this rank listened for it, so before anything was trained
    return _exit_code(codes)


def free_port() -> int:
    """A port on this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(command: Sequence[str], rank: int, processes: int, port: str) -> "subprocess.Popen[bytes]":
    cpus = len(os.sched_getaffinity(0))
    environment = {
        "OMP_NUM_THREADS": str(max(1, cpus // processes)),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return subprocess.Popen(
        command,
        env=environment,
        start_new_session=True,  # Ctrl-C reaches the ranks once, through ``forward``
        preexec_fn=partial(die_with_parent, os.getpid()),
    )


def _end(ranks: Sequence["subprocess.Popen[bytes]"]) -> list[int | None]:
    """Give the ranks a moment to end by themselves, then kill them; the exit codes of those that needed no killing."""
    until = time.monotonic() + _GRACE_S
    while time.monotonic() < until and any(rank.poll() is None for rank in ranks):
        time.sleep(_POLL_S)
    codes = [rank.poll() for rank in ranks]
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
        rank.wait()
    return codes


def _exit_code(codes: Sequence[int | None]) -> int:
    """The code that tells most: what a user can mend before a rank that lost its peers, before stopped, before done."""
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            print(f"rank {rank} was ended by {name}; start again to go on from the newest checkpoint", file=sys.stderr)
    for wanted in (2, 1):
        if wanted in codes:
            return wanted
    if failed := [code for code in codes if code not in (0, EXIT_STOPPED)]:
        return failed[0] if failed[0] is not None and failed[0] > 0 else 1
    return EXIT_STOPPED if EXIT_STOPPED in codes else 0
