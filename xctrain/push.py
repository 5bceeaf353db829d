"""Checkpoints to an address, while training goes on; how they lie there stands in ``pushed.py``."""

import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from shards.errors import UserError
from shards.remote import Found, Remote, UnreachableError, shown
from xctrain.best import kept_steps
from xctrain.checkpoint import FILES, Checkpoints
from xctrain.config import Config
from xctrain.errors import ConfigError, TrainError
from xctrain.log import METRICS, keys_name
from xctrain.pushed import ABOUT, id_at, known, remember, scores_of, step_name, step_of, whole_steps
from xctrain.resume import checkpoints_of

_COPIES = ".push"  # of logs, which grow while they are sent


@dataclass(frozen=True)
class Pushed:
    """How one try to bring the address up to date ended."""

    step: int
    samples_consumed: int
    push_s: float
    failures: int  # in a row, this one included
    error: str | None


@dataclass(frozen=True)
class _Wanted:
    step: int
    samples_consumed: int
    logs: Mapping[str, int]
    saved: bool


def logs_of(run_dir: Path) -> dict[str, int]:
    """The logs of a run and their sizes now, in bytes."""
    paths = [run_dir / METRICS, *run_dir.glob(keys_name(0).replace("0", "*"))]
    sizes = {}
    for path in filter(Path.exists, paths):
        with path.open("rb") as file:  # which asks a file server anew, where other ranks may have written
            sizes[path.name] = os.fstat(file.fileno()).st_size
    return sizes


class Pusher:
    """Makes an address hold the checkpoints that a run keeps, in a thread of its own; what fails is tried again with the
    next checkpoint, and never stops the run.
    """

    def __init__(self, run_dir: Path, checkpoints: Checkpoints, address: str) -> None:
        self.address = address
        self._run_dir = run_dir
        self._checkpoints = checkpoints
        self._lock = threading.Lock()
        self._wanted: _Wanted | None = None
        self._thread: threading.Thread | None = None
        self._news: list[Pushed] = []
        self._failures = 0
        self._error: str | None = None

    def claim(self) -> None:
        """Require, before anything is trained, that the address is free or this run's. A store that does not answer is
        asked again with the first checkpoint.

        Raises:
            ConfigError, RemoteError: it holds something else, or refuses.
        """
        try:
            remote = Remote(self.address)
            remote.require_bucket()
            self._require_ours(remote, remote.list())
        except UnreachableError as error:
            print(f"checkpoint.push: {error}; tried again with the first checkpoint", file=sys.stderr)

    def offer(self, step: int, samples_consumed: int, logs: Mapping[str, int], *, saved: bool = True) -> None:
        """Bring the address up to date with the checkpoints up to ``step``, soon; ``saved``: older ones there may go."""
        with self._lock:
            self._wanted = _Wanted(step, samples_consumed, logs, saved)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="push", daemon=True)
                self._thread.start()

    def news(self) -> list[Pushed]:
        """How the tries ended since this was last asked."""
        with self._lock:
            found, self._news = self._news, []
        return found

    def finish(self) -> str | None:
        """Wait until all is sent or has failed; why the newest is not there, None if it is."""
        if self._thread:
            print(f"sending the newest checkpoint to {shown(self.address)}; another signal leaves it", file=sys.stderr)
        while thread := self._thread:
            thread.join()
        return self._error

    def _work(self) -> None:
        while True:
            with self._lock:
                wanted, self._wanted = self._wanted, None
                if wanted is None:
                    self._thread = None
                    return
            began = time.monotonic()
            self._error = None
            try:
                with self._checkpoints.hold(wanted.step) as steps:
                    self._send(wanted, steps)
            except UserError as error:
                self._error = str(error)
            except Exception as error:  # noqa: BLE001 - each store has its own kinds, and none ends a run
                self._error = f"{type(error).__name__}: {error}"
            self._failures = self._failures + 1 if self._error else 0
            if self._error:
                tries = "1 try" if self._failures == 1 else f"{self._failures} tries in a row"
                print(
                    f"warning: {step_name(wanted.step)} is not at {shown(self.address)}, {tries} failed: {self._error}; training "
                    "goes on, the next checkpoint tries again",
                    file=sys.stderr,
                )
            outcome = Pushed(
                wanted.step, wanted.samples_consumed, time.monotonic() - began, self._failures, self._error
            )
            with self._lock:
                self._news.append(outcome)

    def _send(self, wanted: "_Wanted", steps: list[int]) -> None:
        remote = Remote(self.address)
        there = remote.list()
        self._require_ours(remote, there)
        todo = [s for s in steps if not self._holds(remote, there, s)]
        if todo:
            self._send_logs(remote, wanted.logs)
        for number in todo:
            self._send_checkpoint(remote, there, self._checkpoints.path(number))
        if wanted.saved:
            self._prune(remote, wanted.step)

    def _require_ours(self, remote: Remote, there: Mapping[str, Found]) -> None:
        own = known(self._run_dir).get("id")
        if own is None:
            own = uuid.uuid4().hex
            remember(self._run_dir, own, None)
        theirs = id_at(remote, there)
        if theirs == own:
            return
        if steps := whole_steps(there):
            raise ConfigError(
                f"{remote}: holds the checkpoints of another run (up to {step_name(steps[0])}); go on from them with "
                f"train.resume={remote} in a run.dir that holds no run, or choose another checkpoint.push"
            )
        if theirs is None and there:
            raise ConfigError(
                f"{remote}: is not empty and holds no run (it holds {min(there)}); choose another checkpoint.push"
            )
        path = self._copy(ABOUT)
        path.write_text(json.dumps({"id": own}))
        remote.put(ABOUT, path)

    def _holds(self, remote: Remote, there: Mapping[str, Found], step: int) -> bool:
        name = f"{step_name(step)}/{FILES}"
        return name in there and remote.read(name) == (self._checkpoints.path(step) / FILES).read_bytes()

    def _send_logs(self, remote: Remote, logs: Mapping[str, int]) -> None:
        for name, size in logs.items():
            copy = self._copy(name)
            with (self._run_dir / name).open("rb") as source, copy.open("wb") as target:
                left = size
                while left and (data := source.read(min(left, 2**20))):
                    target.write(data)
                    left -= len(data)
            remote.put(name, copy)
            copy.unlink()

    def _send_checkpoint(self, remote: Remote, there: Mapping[str, Found], path: Path) -> None:
        if f"{path.name}/{FILES}" in there:  # of a past that was gone back on
            remote.remove(f"{path.name}/{FILES}")
        for name in sorted(json.loads((path / FILES).read_text(encoding="utf-8"))):
            remote.put(f"{path.name}/{name}", path / name)
        remote.put(f"{path.name}/{FILES}", path / FILES)

    def _prune(self, remote: Remote, saved: int) -> None:
        there = remote.list()
        whole = whole_steps(there)
        scores = scores_of(remote, whole) if self._checkpoints.metric else {}
        kept = kept_steps(whole, saved, self._checkpoints.keep, scores, self._checkpoints.metric)
        names = [name for name in there if (step := step_of(name)) is not None and step not in kept]
        names.sort(key=lambda name: not name.endswith(f"/{FILES}"))  # from then on it is no checkpoint
        for name in names:
            remote.remove(name)

    def _copy(self, name: str) -> Path:
        folder = self._run_dir / _COPIES
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name


def claim(config: Config) -> None:
    """Require that the address of ``checkpoint.push`` is free or the run's own, before anything is trained.

    Raises:
        ConfigError, RemoteError: it holds something else, or refuses.
    """
    if pusher := make_pusher(config, checkpoints_of(config)):
        pusher.claim()


def make_pusher(config: Config, checkpoints: Checkpoints) -> Pusher | None:
    """What sends the checkpoints of the config's run, if it asks for that."""
    address = config.checkpoint.push
    return Pusher(config.run.dir, checkpoints, address) if address else None


def push_rest(config: Config) -> None:
    """Send what a complete run holds and its address lacks.

    Raises:
        TrainError: that failed.
    """
    checkpoints = checkpoints_of(config)
    pusher = make_pusher(config, checkpoints)
    if pusher and (steps := checkpoints.steps()):
        pusher.offer(steps[0], 0, logs_of(config.run.dir))
        if error := pusher.finish():
            refuse_unpushed(config, error)


def refuse_unpushed(config: Config, error: str) -> NoReturn:
    """Raise what says that a complete run's newest checkpoint is not at its address."""
    assert config.checkpoint.push
    raise TrainError(
        f"{config.run.dir}: training is done, but its newest checkpoint is not at {shown(config.checkpoint.push)}: {error}; "
        "start again to send it"
    )
