"""TensorBoard, Weights & Biases, trackio and MLflow, each fed by a process of its own that follows ``metrics.jsonl``.

Training writes its log and knows no more of them: a tracker that hangs, raises or dies takes nothing from a step.
"""

import os
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from typing import Any

from xctrain import phase
from xctrain.config import Config
from xctrain.errors import ConfigError
from xctrain.follow import END
from xctrain.tracked import read_status, tracker_log

_DRAIN_S = 60.0  # how long the end of a run waits for its trackers to take the rest
_KILL_S = 10.0
# What makes a process a rank in the eyes of Accelerate, with the variables of all launchers that it knows.
_OF_A_RANK = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "ACCELERATE_",
    "TORCHELASTIC_",
    "MPI_",
    "PMI_",
    "OMPI_",
    "MV2_",
)


def require_trackers(config: Config) -> None:
    """Require what the trackers of a config need, before anything is trained.

    Raises:
        ConfigError: a package is missing, or the address of a server.
    """
    for name in config.watch.trackers:
        if find_spec(name) is None:
            raise ConfigError(
                f"watch.trackers names {name}, that package is not installed; `pip install 'xctrain[{name}]'`, "
                "or leave it out"
            )
        if name == "mlflow" and config.watch.online and not os.environ.get("MLFLOW_TRACKING_URI"):
            raise ConfigError(
                "watch.online is true, MLFLOW_TRACKING_URI is not set; set it to the server's address, or leave "
                "watch.online out to write into the run folder"
            )


class Trackers:
    """The processes of a run's trackers, from its first step to its end; on rank 0 only."""

    def __init__(self, config: Config, *, shown: bool) -> None:
        self._names = config.watch.trackers if shown else ()
        self._run_dir = config.run.dir
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ending = False

    def begin(self) -> None:
        """Start them; the log has been cut back to where the run goes on."""
        for name in self._names:
            log = tracker_log(self._run_dir, name)
            log.parent.mkdir(exist_ok=True)
            environment = {k: v for k, v in os.environ.items() if not k.startswith((*_OF_A_RANK, phase.VARIABLE))}
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "xctrain.follow", str(self._run_dir), name, str(os.getpid())]
            with log.open("ab") as output:
                process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=output)
            self._processes[name] = process
            threading.Thread(target=self._watch, args=(name, process), daemon=True).start()

    def end(self) -> list[dict[str, Any]]:
        """Let them take the rest and end; what failed, by tracker, as the log has it."""
        self._ending = True
        for process in self._processes.values():
            assert process.stdin
            try:
                process.stdin.write(END)
                process.stdin.close()
            except BrokenPipeError:
                pass  # it has ended by itself
        until = time.monotonic() + _DRAIN_S
        return [found for name, process in self._processes.items() if (found := self._end(name, process, until))]

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, *_: object) -> None:
        """Leave none behind, as after an error; what they lack they get at the next start."""
        self._ending = True
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()

    def _watch(self, name: str, process: "subprocess.Popen[bytes]") -> None:
        """Say at once that it ended by itself, which it does not while it can try again."""
        code = process.wait()
        if not self._ending:
            print(
                f"tracker {name}: its process ended with exit code {code}; training goes on without it, the next start of "
                f"the run sends what it lacks; more in {tracker_log(self._run_dir, name)}",
                file=sys.stderr,
            )

    def _end(self, name: str, process: "subprocess.Popen[bytes]", until: float) -> dict[str, Any] | None:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_KILL_S)
        status = read_status(self._run_dir, name)
        failures, first = status.get("failures", 0), status.get("first", "")
        if process.returncode != 0 and not failures:
            how = "did not end in time" if process.returncode < 0 else f"ended with exit code {process.returncode}"
            failures, first = 1, f"its process {how}"
        if not failures:
            return None
        lacks = "" if process.returncode == 0 else "; the next start of the run sends what it lacks"
        print(
            f"tracker {name}: failed {failures} time{'' if failures == 1 else 's'}, first: {first}{lacks}; "
            f"{self._run_dir / 'metrics.jsonl'} is whole, more in {tracker_log(self._run_dir, name)}",
            file=sys.stderr,
        )
        return {"tracker": name, "failures": failures, "first": first, "whole": process.returncode == 0}
