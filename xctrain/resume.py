"""Which checkpoint a run goes on from, and whether the config allows it."""

import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from shards.order import Order
from shards.settings import read_yaml
from shards.stream import Stream
from xctrain import checkpoint
from xctrain.checkpoint import Checkpoints
from xctrain.config import Config, trajectory_fields
from xctrain.errors import CheckpointError, ConfigError, ResumeError
from xctrain.log import METRICS, read_lines
from xctrain.state import Segment, TrainState

# Identity of what is not in the config. Never accepted: positions would mean other samples.
MANIFEST = "data.shards"
MODEL = "model.path"
_NEVER_ACCEPTED = {MANIFEST, "data.split"}
# What a new segment begins with: position goes on, the rest of the epoch comes in another order or other batches.
_NEW_SEGMENT = {"train.seed", "train.global_batch", "order.fragment", "order.window", "order.lanes"}


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to go on from."""

    path: Path
    state: TrainState
    position: Mapping[str, Any]  # all of position.json
    notes: tuple[str, ...]  # what a user should know: checkpoints passed over, accepted changes


def checkpoints_of(config: Config) -> Checkpoints:
    """The checkpoints of the config's run."""
    return Checkpoints(config.run.dir / "checkpoints", config.train.keep)


def find(config: Config, manifest_id: str) -> tuple[ResumePoint | None, list[str]]:
    """Where to go on from by ``train.resume``, None to start; and lines that say what was passed over.

    Raises:
        ResumeError: never, or another run's checkpoint, and the folder holds a run; auto, and no checkpoint of several
            is whole; or the config forbids it.
        CheckpointError: the named checkpoint is not whole.
    """
    _require_known_names(config)
    checkpoints = checkpoints_of(config)
    setting = config.train.resume
    if setting == "never":
        _require_empty(config, checkpoints)
        return None, []
    if setting == "auto":
        path, notes = checkpoints.newest_valid()
        if path is None:
            _require_nothing_to_lose(config, checkpoints, notes)
            return None, []
    else:
        path, notes = Path(setting), []
        _require_checkpoint(path)
        if not is_own(config, path):
            _require_fork(config, checkpoints, path)
        checkpoint.check(path)
    state, position = checkpoint.read_position(path)
    accepted = accept_changes(config, path, state, manifest_id)
    notes += [f"accepted: {line}" for line in accepted.values()]
    return ResumePoint(path, state, position, tuple(notes)), notes


def _require_empty(config: Config, checkpoints: Checkpoints) -> None:
    folder = config.run.dir
    steps = checkpoints.steps()
    if steps or (folder / METRICS).exists():
        found = f"its newest checkpoint is {checkpoints.path(steps[0]).name}" if steps else f"it has a {METRICS}"
        raise ResumeError(
            f"{folder}: holds a run ({found}), train.resume=never starts only where there is none; choose another "
            "run.dir, or go on with train.resume=auto",
            path=folder,
        )


def is_own(config: Config, path: Path) -> bool:
    """Whether a checkpoint is of the config's run, whose logs go up to it; not one that was gone back on."""
    own = path.resolve().parent == checkpoints_of(config).folder.resolve()
    return own and not path.name.startswith("set-aside-")


def _require_nothing_to_lose(config: Config, checkpoints: Checkpoints, passed_over: list[str]) -> None:
    """Require, before a run starts at step 0 by itself, that no checkpoint is damaged and that it is no fork."""
    if passed_over:
        why = "; ".join(line.removeprefix("passed over ") for line in passed_over)
        raise ResumeError(
            f"{checkpoints.folder}: every checkpoint ({len(passed_over)}) is damaged: {why}. Nothing was touched; restore "
            f"one of them, or choose another run.dir, or move {checkpoints.folder} away to start over",
            path=checkpoints.folder,
        )
    if source := _fork_source(config):
        raise ResumeError(
            f"{config.run.dir}: began from {source} and has no checkpoint of its own yet; go on with "
            f"train.resume={source}, or choose another run.dir",
            path=config.run.dir,
        )


def _require_checkpoint(path: Path) -> None:
    if not path.is_dir():
        raise ConfigError(
            f"train.resume is {path}, there is no such folder; give a checkpoint's folder, auto or never", path=path
        )
    if not (path / checkpoint.FILES).exists():
        inside = Checkpoints(path / "checkpoints" if (path / "checkpoints").is_dir() else path, keep=1)
        newest, _ = inside.newest_valid()
        if newest:
            raise ConfigError(
                f"train.resume is {path}, which is a folder of checkpoints; give one of them, such as {newest}",
                path=path,
            )


def _require_fork(config: Config, checkpoints: Checkpoints, path: Path) -> None:
    """Require that a run which goes on from another run's checkpoint does so in a folder of its own."""
    folder, steps = config.run.dir, checkpoints.steps()
    if not steps and (not (folder / METRICS).exists() or _fork_source(config) == str(path.resolve())):
        return
    raise ResumeError(
        f"{folder}: holds a run, train.resume={path} is not a checkpoint that it can go back to; choose another run.dir "
        "for what goes on from there, or go on with train.resume=auto",
        path=folder,
    )


def _fork_source(config: Config) -> str | None:
    """The checkpoint of another run that this one began from."""
    first = next(read_lines(config.run.dir / METRICS), {})
    return first.get("source") if first.get("event") == "start" else None


def accept_changes(config: Config, path: Path, state: TrainState, manifest_id: str) -> dict[str, str]:
    """Fields that differ from the checkpoint's and were accepted by name, each with a line that says so.

    Raises:
        ResumeError: a field differs and was not accepted, or cannot be.
    """
    asked = _accepted(config)
    changes = differences(config, path, state, manifest_id)
    for name, (saved, now) in changes.items():
        if name in _NEVER_ACCEPTED:
            what = "manifest_id" if name == MANIFEST else name
            raise ResumeError(
                f"{path.name}: saved with {what}={saved}, {name}={config.data.shards if name == MANIFEST else now} has "
                f"{now}; these are other samples: use the data that the run began with, or choose another run.dir",
                path=path,
            )
    if missing := [name for name in changes if name not in asked]:
        found = ", ".join(f"{name}={changes[name][0]}" for name in missing)
        here = ", ".join(f"{name}={changes[name][1]}" for name in missing)
        pronoun = f"set it to {changes[missing[0]][0]}" if len(missing) == 1 else "set them back"
        raise ResumeError(
            f"{path.name}: saved with {found}, this run has {here}; {pronoun}, or accept the change with "
            f"train.resume_with={','.join(missing)}, or choose another run.dir",
            path=path,
        )
    return {name: f"{name} was {saved}, is {now}" for name, (saved, now) in changes.items()}


def _require_known_names(config: Config) -> None:
    names = [*trajectory_fields(config), MODEL]
    if unknown := sorted(_accepted(config) - {*names}):
        near = difflib.get_close_matches(unknown[0], names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"those are {', '.join(names)}"
        raise ConfigError(f"train.resume_with: {unknown[0]} is not a field that must match; {hint}")


def _accepted(config: Config) -> set[str]:
    return {name.strip() for name in config.train.resume_with.split(",") if name.strip()}


def differences(config: Config, path: Path, state: TrainState, manifest_id: str) -> dict[str, tuple[Any, Any]]:
    """Fields that must match and do not: what the checkpoint has, what the config has."""
    saved = read_yaml(path / checkpoint.CONFIG)
    changes: dict[str, tuple[Any, Any]] = {}
    if state.segments[-1].manifest_id != manifest_id:
        changes[MANIFEST] = (state.segments[-1].manifest_id, manifest_id)
    for name, now in trajectory_fields(config).items():
        section, field = name.split(".")
        before = saved.get(section, {}).get(field, now)  # a field that is newer than the checkpoint has its default
        if before != now:
            changes[name] = (before, now)
    return changes


def require_model(config: Config, point: ResumePoint, model_id: str) -> None:
    """Require that the base model is the one that the run began with, wherever it lies now.

    Raises:
        ResumeError: it is another, and that was not accepted.
    """
    saved = point.position.get("model_id")
    if saved != model_id and MODEL not in _accepted(config):
        raise ResumeError(
            f"{point.path.name}: saved with the base model {saved}, {config.model.path} is {model_id}; use that model, "
            f"accept the change with train.resume_with={MODEL}, or choose another run.dir",
            path=point.path,
        )


def next_segments(config: Config, state: TrainState, num_samples: int, manifest_id: str) -> tuple[Segment, ...]:
    """The run's segments up to now: one more if this start changes the order, the global batch or where batches begin.

    The last batch of a run by epochs ends where the run ends; goes the run on after all, whole batches begin there.
    """
    segment = Segment(
        first_n=state.samples_consumed,
        first_step=state.step,
        first_epoch=state.samples_consumed // num_samples,
        num_samples=num_samples,
        global_batch=config.train.global_batch,
        manifest_id=manifest_id,
        split=config.data.split,
        seed=config.train.seed,
        fragment=config.order.fragment,
        window=config.order.window,
        lanes=config.order.lanes,
    )
    if not state.segments:
        return (segment,)
    last = state.segments[-1]
    same = replace(segment, first_n=last.first_n, first_step=last.first_step, first_epoch=last.first_epoch)
    whole_batches = (state.samples_consumed - last.first_n) % last.global_batch == 0
    return state.segments if same == last and whole_batches else (*state.segments, segment)


def run_length(config: Config, segments: tuple[Segment, ...], order: Order) -> tuple[int, int]:
    """Global batches and positions of the whole run, past segments included."""
    last = segments[-1]
    batches = 0  # of the past segments, each with its own global batch
    for segment, following in pairwise(segments):
        batches += -(-(following.first_n - segment.first_n) // segment.global_batch)
    if config.train.num_steps is not None:
        return config.train.num_steps, last.first_n + max(0, config.train.num_steps - batches) * last.global_batch
    assert config.train.epochs is not None
    end = Stream(order, last.global_batch).num_positions(config.train.epochs)
    return batches + max(0, -(-(end - last.first_n) // last.global_batch)), end


def newest_checkpoint(run_dir: Path) -> Path:
    """The newest whole checkpoint of a run; newer ones that were passed over are named on the screen.

    Raises:
        CheckpointError: there is none.
    """
    path, passed_over = Checkpoints(run_dir / "checkpoints", keep=1).newest_valid()
    for line in passed_over:
        print(line, file=sys.stderr)
    if path is None:
        raise CheckpointError(
            f"{run_dir}: has no whole checkpoint; train first, or give another run folder", path=run_dir
        )
    return path
