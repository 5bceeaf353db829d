"""A run as its folder has it: what it trained on so far, and the data that it read."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shards.mix import Stretches
from shards.settings import load_settings
from xctrain import checkpoint, resume
from xctrain.config import Config
from xctrain.data import Data, open_data
from xctrain.dataconfig import SourceConfig
from xctrain.errors import ConfigError, RunError
from xctrain.runfolder import config_of
from xctrain.state import TrainState

_READ_TRIES = 3


@dataclass(frozen=True)
class Trained:
    """A run as its newest whole checkpoint describes it, and the data it read."""

    config: Config
    state: TrainState
    data: Data
    passed_over: tuple[str, ...]  # checkpoints that are newer and damaged, each with why

    @property
    def order(self) -> Stretches:
        """What stands at every position."""
        return self.data.order(self.state.segments)


def open_run(run_dir: Path, shards: Sequence[str] = (), *, begun: bool = False) -> Trained:
    """The newest whole checkpoint of a run folder, and its shards: in ``shards`` if given (of a mix ``NAME=DIR``), else
    where the run read them.

    ``begun``: a run that has not saved yet will do, from its config.yaml.

    Raises:
        ConfigError: no run folder, no checkpoint in it, or no shards there.
        CheckpointError: every checkpoint is damaged.
        RunError: the shards have changed since.
    """
    path, passed_over, config, state = _read_newest(run_dir)
    if not path and not (begun and config and not passed_over):
        raise resume.no_checkpoint(run_dir, passed_over)
    assert config is not None
    data = open_shards(config, shards)
    if not state.segments:
        state = replace(state, segments=resume.next_segments(config, state, data))
    ahead = [s for s in state.segments if s.first_n > state.samples_consumed and data.missing(s)]
    state = replace(state, segments=tuple(s for s in state.segments if s not in ahead))  # those data were never read
    for segment in state.segments:
        if missing := data.missing(segment):
            folders = ", ".join(d.place for d in data.datasets)
            found = ", ".join(d.reader.manifest.manifest_id for d in data.datasets)
            raise RunError(
                f"{folders}: its manifest_id is {found}, the run was trained on {missing.manifest_id}; "
                "put the data that the run was trained on back, or give their folder with --shards DIR",
                path=data.datasets[0].reader.folder,
            )
    return Trained(config, state, data, tuple(passed_over))


def _read_newest(run_dir: Path) -> tuple[Path | None, list[str], Config | None, TrainState]:
    """The newest whole checkpoint, what was passed over, and the run's config and state; those of its start without one."""
    checkpoints = checkpoint.Checkpoints(run_dir / "checkpoints", keep=1)
    for left in reversed(range(_READ_TRIES)):
        path, passed_over = checkpoints.newest_valid()
        try:
            if path:
                config: Config | None = load_settings(Config, path / checkpoint.CONFIG).moved_to(run_dir)
            else:
                config = config_of(run_dir) if (run_dir / "config.yaml").is_file() else None
            state = checkpoint.read_position(path)[0] if path else TrainState()
        except (FileNotFoundError, ConfigError):
            if not left or path is None or path.exists():
                raise
            continue  # the run is training, and has just given it its name, or a newer one its place
        return path, passed_over, config, state
    raise AssertionError


def open_shards(config: Config, given: Sequence[str] = ()) -> Data:
    """The run's data, see ``where_shards_lie``; lists of what is left out are not read: segments remember it."""
    try:
        return open_data(where_shards_lie(config, given).data)
    except ConfigError as error:
        if given:
            raise
        raise ConfigError(
            f"{error}; the path is the data.shards that the run {config.run.dir} was trained with: give another folder "
            "with --shards DIR",
            path=error.path,
        ) from None


def where_shards_lie(config: Config, given: Sequence[str] = ()) -> Config:
    """The config with its datasets in ``given``, or where data.shards leads from here, or from where the run was started.

    Raises:
        ConfigError: ``given`` does not name the datasets of a mix.
    """
    places = _named_places(config, given)
    started_in = _started_in(config.run.dir)
    sources = {}
    for name, source in config.data.sources.items():
        folder = places.get(name, source.path)
        if name not in places and started_in and isinstance(folder, Path) and not folder.exists():
            there = Path(started_in) / folder
            folder = there if there.exists() else folder
        sources[name] = SourceConfig(path=folder, repeat=source.repeat)
    shards = sources[""].path if "" in sources else sources
    return config.model_copy(update={"data": config.data.model_copy(update={"shards": shards, "quarantine": None})})


def _named_places(config: Config, given: Sequence[str]) -> dict[str, Path | str]:
    names = list(config.data.sources)
    if names == [""]:
        if len(given) > 1:
            raise ConfigError(f"--shards was given {len(given)} times, the run has one dataset; give its folder once")
        return dict.fromkeys(names, given[0]) if given else {}
    places: dict[str, Path | str] = {}
    for text in given:
        name, equals, folder = text.partition("=")
        if not equals or name not in names:
            raise ConfigError(
                f"--shards is {text}, the run mixes {', '.join(names)}; give NAME=DIR for each that was moved"
            )
        places[name] = folder
    return places


def _started_in(run_dir: Path) -> str | None:
    try:
        found = json.loads((run_dir / "environment.json").read_text(encoding="utf-8"))["started_in"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(found)
