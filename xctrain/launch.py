"""Start one process per GPU on this node, pass signals on, and keep exit codes apart, which torchrun cannot."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO

from shards.parent import die_with_parent
from xctrain import phase
from xctrain.errors import ConfigError
from xctrain.processes import EXIT_STOPPED

DEFAULT_PORT = 29500  # where rank 0 listens if there are several nodes; torchrun's, too
LOGS = "logs"  # in the run folder
STALL_MARGIN_S = 60  # ranks that wait for others give up by themselves first, and say on whom they waited
_POLL_S = 0.05
_BY_STOP_SIGNAL = (-signal.SIGTERM, -signal.SIGINT, 130)  # codes of a process that does not handle them
_GRACE_S = 5.0  # for ranks to end by themselves once one of them is gone
SAVING_GRACE_S = 600.0  # for a checkpoint that is being written then, which needs no other rank; 84 GB at 140 MB/s
_TAIL_LINES = 5


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run, and which of them this is. Without a port, one node, on any free port."""

    count: int = 1
    rank: int = 0
    master: str = "127.0.0.1"  # name or address of node 0
    port: int | None = None

    @staticmethod
    def of(count: int, rank: int, master: str | None) -> "Nodes":
        """From what the command line says; ``master`` is HOST or HOST:PORT.

        Raises:
            ConfigError: there is no such node, or several nodes without the address of the first.
        """
        if count < 1:
            raise ConfigError(f"--nodes is {count}, expected 1 or more")
        if not 0 <= rank < count:
            raise ConfigError(f"--node-rank is {rank}, of {count} nodes; expected 0 to {count - 1}")
        if count == 1:
            return Nodes()
        if not master:
            raise ConfigError(f"--nodes is {count}, --master is missing; give name or address of node 0, or HOST:PORT")
        host, _, port = master.partition(":")
        if port and not (port.isdigit() and 0 < int(port) < 65536):
            raise ConfigError(f"--master is {master}, expected HOST or HOST:PORT; correct the port")
        return Nodes(count, rank, host, int(port or DEFAULT_PORT))

    def arguments(self, rank: int) -> list[str]:
        """What tells ``launch`` on node ``rank`` of them."""
        if self.count == 1:
            return []
        return ["--nodes", str(self.count), "--node-rank", str(rank), "--master", f"{self.master}:{self.port}"]


def launch(
    command: Sequence[str],
    processes: int,
    nodes: Nodes = Nodes(),
    *,
    logs: Path | None = None,
    stall_s: float | None = None,
) -> int:
    """Run a command as ``processes`` ranks on this node and give their common exit code.

    The ranks die with this process, even if it is killed. When one rank ends with an error the others are ended too, after
    the checkpoint that is being written.
    With ``logs``, only rank 0 prints on the screen; what the others say goes to a file each there. When no rank has
    entered a new phase for ``stall_s`` seconds, all are ended and what each one did last is said.
    """
    with tempfile.TemporaryDirectory(prefix="xctrain-") as folder, ExitStack() as files:
        board = phase.Board(Path(folder) / "phases", processes)
        environment = {
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // processes)),
            **os.environ,
            "WORLD_SIZE": str(processes * nodes.count),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": nodes.master,
            "MASTER_PORT": str(nodes.port or free_port()),
            phase.VARIABLE: str(board.path),
        }
        first = nodes.rank * processes
        outputs = [files.enter_context(_open_log(logs, rank)) for rank in range(first, first + processes)]
        ranks = [
            _start(command, {**environment, "RANK": str(first + i), "LOCAL_RANK": str(i)}, output)
            for i, output in enumerate(outputs)
        ]
        asked: list[int] = []

        def forward(number: int, _frame: FrameType | None) -> None:
            asked.append(number)
            for rank in ranks:
                if rank.poll() is None:
                    rank.send_signal(number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, forward)
        began = time.time()
        failed: list[int] = []
        stalled = False
        while any(rank.poll() is None for rank in ranks) and not failed and not stalled:
            time.sleep(_POLL_S)
            failed = [i for i, rank in enumerate(ranks) if rank.poll() not in (None, 0, EXIT_STOPPED)]
            stalled = (
                stall_s is not None
                and time.time() - max(began, *(p.since + p.patience_s for p in board.read())) > stall_s
            )
        if stalled:
            print(f"no rank has come further for {stall_s:g} seconds, all are ended", file=sys.stderr)
        codes = _end(ranks, board, grace_s=0 if stalled else _GRACE_S)
        if None in codes:
            _say_phases(board.read(), first)
        for i in (i for i in failed if not (asked and codes[i] in _BY_STOP_SIGNAL)):
            _say_last_words(logs, first + i)
    if nodes.rank and all(code in (0, EXIT_STOPPED) for code in codes):
        ended = "stopped after saving" if EXIT_STOPPED in codes else "done"
        where = f", and what its ranks printed in {logs}" if logs else ""
        print(f"node {nodes.rank}: {ended}; the summary stands on node 0{where}", file=sys.stderr)
    if asked and any(code in _BY_STOP_SIGNAL for code in codes):
        # It came before this rank listened for it, so before anything was trained.
        print("stopped before the first step, nothing was to be saved; start again to go on", file=sys.stderr)
        return EXIT_STOPPED
    return 1 if stalled else _exit_code(codes, first)


def num_gpus() -> int:
    """GPUs that torch would see, without importing torch: by the driver's device files and CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = len([p for p in Path("/dev").glob("nvidia[0-9]*") if p.name.removeprefix("nvidia").isdigit()])
    return found if visible is None else min(found, len([v for v in visible.split(",") if v.strip() not in ("", "-1")]))


def free_port() -> int:
    """A port on this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _open_log(logs: Path | None, rank: int) -> "AbstractContextManager[IO[bytes] | None]":
    """The file for what a rank prints, at its end; none for rank 0."""
    if logs is None or rank == 0:
        return nullcontext()
    logs.mkdir(parents=True, exist_ok=True)
    file = _log_path(logs, rank).open("ab")
    file.write(f"\n--- {time.strftime('%Y-%m-%d %H:%M:%S')} on {socket.gethostname()}\n".encode())
    file.flush()
    return file


def _log_path(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.log"


def _start(
    command: Sequence[str], environment: dict[str, str], output: "IO[bytes] | None"
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command,
        env=environment,
        stdout=output,
        stderr=output,
        start_new_session=True,  # Ctrl-C reaches the ranks once, through ``forward``
        preexec_fn=partial(die_with_parent, os.getpid()),
    )


def _end(ranks: Sequence["subprocess.Popen[bytes]"], board: phase.Board, grace_s: float) -> list[int | None]:
    """Give the ranks a moment to end by themselves, and time to one that is writing a checkpoint, then kill them; the exit
    codes of those that needed no killing."""
    began = time.monotonic()
    until, told = began + grace_s, False
    while any(rank.poll() is None for rank in ranks):
        now = time.monotonic()
        if any(at.saving for rank, at in zip(ranks, board.read(), strict=True) if rank.poll() is None):
            until = max(until, min(now + _GRACE_S, began + SAVING_GRACE_S))
            if now - began > grace_s and not told:
                told = True
                print(
                    f"a checkpoint is being written; waiting for it, {SAVING_GRACE_S:g} seconds at most",
                    file=sys.stderr,
                )
        if now >= until:
            break
        time.sleep(_POLL_S)
    codes = [rank.poll() for rank in ranks]
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
        rank.wait()
    return codes


def _say_phases(phases: Sequence[phase.Phase], first: int) -> None:
    """What each rank did last."""
    for rank, last in enumerate(phases, start=first):
        if last.text:
            print(f"rank {rank} was last at: {last.text}, since {time.time() - last.since:.0f} s", file=sys.stderr)


def _say_last_words(logs: Path | None, rank: int) -> None:
    """The end of what a rank printed that is not on the screen."""
    if logs is None or rank == 0:
        return
    path = _log_path(logs, rank)
    lines = path.read_text(errors="replace").rpartition("\n--- ")[2].splitlines()[1:]  # of this start
    for line in lines[-_TAIL_LINES:]:
        print(f"rank {rank}: {line}", file=sys.stderr)
    print(f"rank {rank}: more in {path}", file=sys.stderr)


def _exit_code(codes: Sequence[int | None], first: int) -> int:
    """The code that tells most: what a user can mend before a rank that lost its peers, before stopped, before done."""
    for rank, code in enumerate(codes, start=first):
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            print(f"rank {rank} was ended by {name}; start again to go on from the newest checkpoint", file=sys.stderr)
    for wanted in (2, 1):
        if wanted in codes:
            return wanted
    if failed := [code for code in codes if code not in (0, EXIT_STOPPED)]:
        return failed[0] if failed[0] is not None and failed[0] > 0 else 1
    return EXIT_STOPPED if EXIT_STOPPED in codes else 0
