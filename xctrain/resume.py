"""Which checkpoint a run goes on from, and whether the config allows it."""

import difflib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from shards.errors import UserError, counted
from shards.mix import Stretches
from shards.remote import is_remote
from shards.settings import read_yaml
from shards.stream import Stream
from xctrain import checkpoint
from xctrain.checkpoint import Checkpoints
from xctrain.config import Config, default_of, trajectory_fields
from xctrain.data import Data, joint_quarantine_id
from xctrain.errors import CheckpointError, ConfigError, ResumeError
from xctrain.log import METRICS, read_lines
from xctrain.state import Segment, Source, TrainState

# Identity of what is not in the config.
DATA = "data.shards"
QUARANTINE = "data.quarantine"
MODEL = "model.path"


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to go on from."""

    path: Path
    state: TrainState
    position: Mapping[str, Any]  # all of position.json
    notes: tuple[str, ...]  # what a user should know: checkpoints passed over, accepted changes


def checkpoints_of(config: Config) -> Checkpoints:
    """The checkpoints of the config's run."""
    return Checkpoints(config.run.dir / "checkpoints", config.train.keep, config.checkpoint.best)


def find(config: Config, data: Data) -> tuple[ResumePoint | None, list[str]]:
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
    if setting == "auto" or is_remote(setting):  # the latter has been brought here, see bring.fetch_run
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
    accepted = accept_changes(config, path, state, data)
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
    """Require, before a run starts at step 0 by itself, that no checkpoint is damaged or gone, and that it is no fork."""
    if passed_over:
        why = "; ".join(line.removeprefix("passed over ") for line in passed_over)
        raise ResumeError(
            f"{checkpoints.folder}: every checkpoint ({len(passed_over)}) is damaged: {why}. Nothing was touched; restore "
            f"one of them, or choose another run.dir, or move {config.run.dir} away to start over",
            path=checkpoints.folder,
        )
    if source := _fork_source(config):
        raise ResumeError(
            f"{config.run.dir}: began from {source} and has no checkpoint of its own yet; go on with "
            f"train.resume={source}, or choose another run.dir",
            path=config.run.dir,
        )
    saved = [line["step"] for line in read_lines(config.run.dir / METRICS, []) if line["event"] == "save"]
    if saved:
        raise ResumeError(
            f"{checkpoints.folder}: holds no checkpoint, though the run's log tells of one at step {saved[-1]}. Nothing was "
            f"touched; put the checkpoints back, or choose another run.dir, or move {config.run.dir} away to start over",
            path=checkpoints.folder,
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
    return first.get("source") if first.get("fork") else None


def accept_changes(config: Config, path: Path, state: TrainState, data: Data) -> dict[str, str]:
    """Fields that differ from the checkpoint's and were accepted by name, each with a line that says so.

    Raises:
        ResumeError: a field differs and was not accepted, or cannot be.
    """
    asked = _accepted(config)
    _require_same_samples(config, path, state, data)
    changes = differences(config, path, state, data)
    if missing := [name for name in changes if name not in asked]:
        found = ", ".join(f"{name}={changes[name][0]}" for name in missing)
        here = ", ".join(f"{name}={changes[name][1]}" for name in missing)
        pronoun = f"set it to {changes[missing[0]][0]}" if len(missing) == 1 else "set them back"
        if missing == [QUARANTINE]:
            pronoun = "give the list that the run had"
        raise ResumeError(
            f"{checkpoint.label(path)}: saved with {found}, this run has {here}; {pronoun}, or accept the change with "
            f"train.resume_with={','.join(missing)}, or choose another run.dir",
            path=path,
        )
    return {name: f"{name} was {saved}, is {now}" for name, (saved, now) in changes.items()}


def _require_same_samples(config: Config, path: Path, state: TrainState, data: Data) -> None:
    """Require the data that the epoch under way is made of; positions would mean other samples. Never accepted."""
    segment = state.segment_at(state.samples_consumed)
    advice = "these are other samples: use the data that the run began with, or choose another run.dir"
    if config.data.split != segment.split:
        raise ResumeError(
            f"{checkpoint.label(path)}: saved with data.split={segment.split}, "
            f"data.split={config.data.split} has {config.data.split}; {advice}",
            path=path,
        )
    if source := data.missing(segment):
        here = "; ".join(f"{d.label} has {d.reader.manifest.manifest_id}" for d in data.datasets)
        named = f" ({source.name})" if source.name else ""
        if config.data.sources.keys() == {""}:
            here = f"{DATA}={config.data.shards} has {data.manifest_id}"
        raise ResumeError(
            f"{checkpoint.label(path)}: saved with manifest_id={source.manifest_id}{named}, {here}; {advice}", path=path
        )


def _require_known_names(config: Config) -> None:
    names = [*trajectory_fields(config), MODEL, DATA, QUARANTINE]
    if unknown := sorted(_accepted(config) - {*names}):
        near = difflib.get_close_matches(unknown[0], names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"those are {', '.join(names)}"
        raise ConfigError(f"train.resume_with: {unknown[0]} is not a field that must match; {hint}")


def _accepted(config: Config) -> set[str]:
    return {name.strip() for name in config.train.resume_with.split(",") if name.strip()}


def differences(config: Config, path: Path, state: TrainState, data: Data) -> dict[str, tuple[Any, Any]]:
    """Fields that must match and do not: what the checkpoint has, what the config has.

    Shards that were added to a dataset are no difference: they come from the next epoch on, see ``next_segments``.
    """
    saved = read_yaml(path / checkpoint.CONFIG)
    changes: dict[str, tuple[Any, Any]] = {}
    before_parts, parts = state.segments[-1].parts, data.sources
    if _composition(before_parts) != _composition(parts):
        changes[DATA] = (_composition(before_parts), _composition(parts))
    elif (before_id := joint_quarantine_id(before_parts)) != (now_id := joint_quarantine_id(parts)):
        changes[QUARANTINE] = _left_out(before_parts, before_id), _left_out(parts, now_id)
    for name, now in trajectory_fields(config).items():
        section, field = name.split(".")
        before = saved.get(section, {}).get(field, default_of(name))  # a field may be newer than the checkpoint
        if before != now and name != "data.split":
            changes[name] = (before, now)
    return changes


def _left_out(sources: tuple[Source, ...], quarantine_id: str | None) -> str:
    number = counted(sum(len(source.left_out) for source in sources), "sample")
    return f"{number} ({quarantine_id[:12]})" if quarantine_id else "none"


def _composition(sources: tuple[Source, ...]) -> str:
    return " + ".join(f"{source.name or 'one dataset'} x {source.repeat}" for source in sources)


def require_model(config: Config, point: ResumePoint, model_id: str) -> None:
    """Require that the base model is the one that the run began with, wherever it lies now.

    Raises:
        ResumeError: it is another, and that was not accepted.
    """
    saved = point.position.get("model_id")
    if saved != model_id and MODEL not in _accepted(config):
        raise ResumeError(
            f"{checkpoint.label(point.path)}: saved with the base model {saved}, {config.model.path} is {model_id}; use that "
            f"model, accept the change with train.resume_with={MODEL}, or choose another run.dir",
            path=point.path,
        )


def next_segments(config: Config, state: TrainState, data: Data) -> tuple[Segment, ...]:
    """The run's segments: up to now, one more if this start changes something, and one ahead if the data are others.

    Another order, global batch or place where batches begin begins here; the last batch of a run by epochs ends where
    the run ends, so if the run goes on after all, whole batches begin there. Other data begin with the next epoch: shards
    that were added, another quarantine list, another mix. Until then the epoch goes on with what it began with.
    """
    here = state.samples_consumed
    begun = tuple(s for s in state.segments if s.first_n < here)
    wanted = Segment(
        first_n=here,
        first_step=state.step,
        first_epoch=0,
        num_samples=sum(s.repeat * s.num_samples for s in data.sources),
        global_batch=config.train.global_batch,
        manifest_id=data.manifest_id,
        split=config.data.split,
        seed=config.train.seed,
        fragment=config.order.fragment,
        window=config.order.window,
        lanes=config.order.lanes,
        quarantine_id=joint_quarantine_id(data.sources),
        sources=() if data.sources == (Source("", data.manifest_id, len(data.reader)),) else data.sources,
    )
    if not begun:
        return (wanted,)
    last = begun[-1]
    whole_batches = (here - last.first_batch_n) % last.global_batch == 0
    if not whole_batches or _batches_and_order(last) != _batches_and_order(wanted):
        kept = {name: getattr(last, name) for name in _DATA_FIELDS}
        last = replace(wanted, **kept, first_epoch=last.epoch_at(here))
        begun = (*begun, last)
    if last.parts == wanted.parts:
        return begun
    ahead = last.epoch_start(here)
    epoch = last.epoch_at(ahead)
    following = replace(
        wanted,
        first_n=ahead,
        first_step=last.first_step + max(0, ahead - last.first_batch_n) // last.global_batch,
        first_epoch=epoch,
        base_n=ahead,
        base_epoch=epoch,
        batches_from=last.first_batch_n,
    )
    return (*(s for s in begun if s.first_n < ahead), following)


_DATA_FIELDS = ("num_samples", "manifest_id", "quarantine_id", "base_n", "base_epoch", "sources")


def _batches_and_order(segment: Segment) -> tuple[object, ...]:
    return segment.global_batch, segment.order_settings, segment.order_version


def describe_data(state: TrainState, segments: tuple[Segment, ...]) -> list[str]:
    """Lines that say which other data a start has found, and from where on they come."""
    if segments[-1].parts == state.segment_at(state.samples_consumed).parts:
        return []
    ahead, before = segments[-1], state.segment_at(state.samples_consumed)
    lines = []
    for source in ahead.parts:
        old = next((s for s in before.parts if s.name == source.name), None)
        name = f"{source.name}: " if source.name else ""
        left_out = f", {len(source.left_out)} left out" if source.left_out else ""
        times = f", {source.repeat} times an epoch" if source.repeat > 1 else ""
        if source != old:
            was = f" instead of {old.num_samples}" if old else ""
            lines.append(f"{name}{counted(source.num_samples, 'sample')}{was}{left_out}{times}")
    where = "from here on" if ahead.first_n == state.samples_consumed else "until then its data stay what they were"
    return [f"other data from epoch {ahead.first_epoch} on, at position {ahead.first_n}: {'; '.join(lines)}; {where}"]


def run_length(config: Config, segments: tuple[Segment, ...], order: Stretches) -> tuple[int, int]:
    """Global batches and positions of the whole run, past segments included."""
    groups = {segment.first_batch_n: segment.global_batch for segment in segments}  # by where batches are counted from
    starts = sorted(groups)
    last, size = starts[-1], groups[starts[-1]]
    batches = sum(-(-(after - start) // groups[start]) for start, after in pairwise(starts))
    if config.train.num_steps is not None:
        return config.train.num_steps, last + max(0, config.train.num_steps - batches) * size
    assert config.train.epochs is not None
    end = Stream(order, size).num_positions(config.train.epochs)
    return batches + max(0, -(-(end - last) // size)), end


def best_checkpoint(config: Config) -> Path:
    """The checkpoint of a run that scored best by ``checkpoint.best``.

    Raises:
        ConfigError: none was scored, or the run was not told by what.
    """
    metric = config.checkpoint.best
    if metric is None:
        raise ConfigError(
            f"{config.run.dir}: checkpoint.best was not set, so the best checkpoint was not kept; name one by its folder",
            path=config.run.dir,
        )
    path = checkpoints_of(config).best()
    if path is None:
        raise ConfigError(
            f"{config.run.dir}: no checkpoint has a score in {metric}; train beyond the next evaluation, or name a checkpoint "
            "by its folder",
            path=config.run.dir,
        )
    return path


def newest_checkpoint(run_dir: Path) -> Path:
    """The newest whole checkpoint of a run; newer ones that were passed over are named on the screen.

    Raises:
        ConfigError, CheckpointError: as ``no_checkpoint``.
    """
    path, passed_over = Checkpoints(run_dir / "checkpoints", keep=1).newest_valid()
    if path is None:
        raise no_checkpoint(run_dir, passed_over)
    for line in passed_over:
        print(line, file=sys.stderr)
    return path


def no_checkpoint(run_dir: Path, passed_over: Sequence[str]) -> UserError:
    """What to raise where a command needs a checkpoint of a run and no whole one is there: none at all, or all damaged."""
    if passed_over:
        found = passed_over[0].removeprefix("passed over ")
        return CheckpointError(
            f"{run_dir}: has no whole checkpoint, the newest is damaged ({found}); put a copy of one back, or train again in "
            "another run folder",
            path=run_dir,
        )
    if not run_dir.is_dir():
        found, advice = "there is no such run folder", "give the run.dir of a run"
    elif not (run_dir / "config.yaml").is_file():
        found, advice = "has no config.yaml, so it is not a run folder", "give the run.dir of a run"
    else:
        found, advice = "has no checkpoint", "train first, or give another run folder"
    return ConfigError(f"{run_dir}: {found}; {advice}", path=run_dir)
