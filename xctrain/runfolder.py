"""The folder of a run: its config, which of its checkpoints is meant, who may write in it, whether all ranks see the same."""

import errno
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shards.manifest import NAME as MANIFEST
from shards.settings import load_settings
from xctrain import checkpoint, resume
from xctrain.config import Config
from xctrain.errors import ConfigError, RunError, TrainError
from xctrain.state import TrainState

if TYPE_CHECKING:
    from xctrain.ranks import Ranks

_LOCK = ".lock"


def require_run_folder(folder: Path) -> None:
    """Refuse a run.dir that is a file, or holds a dataset, whose report the run's would replace.

    Raises:
        ConfigError: it is one of them; nothing was written.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run.dir is {folder}, which is no folder; choose another", path=folder)
    if (folder / MANIFEST).exists():
        raise ConfigError(
            f"run.dir is {folder}, which is a shard folder (it holds {MANIFEST}); choose another", path=folder
        )


def config_of(run_dir: Path) -> Config:
    """The config that a run was last started with.

    Raises:
        ConfigError: it is no run folder.
        RunError: the file in it is damaged.
    """
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise ConfigError(
            f"{run_dir}: has no config.yaml, so it is not a run folder; give the run.dir of a run", path=run_dir
        )
    try:
        return load_settings(Config, path).moved_to(run_dir)
    except ConfigError as error:
        found = str(error).partition(";")[0]
        raise RunError(
            f"{found}; the run wrote that file: put a copy back, such as checkpoints/step-N/config.yaml of the run",
            path=path,
        ) from None


def chosen_checkpoint(run_dir: Path, which: str, setting: str) -> Path:
    """The newest whole checkpoint of a run, its best, or the one in a folder, as ``setting`` says.

    Raises:
        ConfigError, CheckpointError: it is not there, or damaged.
    """
    if which == "newest":
        return resume.newest_checkpoint(run_dir)
    path = resume.best_checkpoint(config_of(run_dir)) if which == "best" else Path(which)
    if not path.is_dir():
        raise ConfigError(
            f"{setting} is {which}, there is no such folder; give a checkpoint's folder, newest or best", path=path
        )
    checkpoint.check(path)
    return path


def make_run_folder(folder: Path) -> None:
    """Make it if it is not there.

    Raises:
        ConfigError: it cannot be made, or not written to; a full disk stays an OSError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _LOCK).open("a").close()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        raise ConfigError(
            f"run.dir is {folder}, which cannot be written to: {error.strerror}; choose another, or mend its permissions",
            path=folder,
        ) from None


def lock(config: Config) -> Any:
    """Hold the run folder for this process; the kernel lets go of it when the process ends, however that happens.

    Raises:
        RunError: another process trains in it.
    """
    make_run_folder(config.run.dir)
    file = (config.run.dir / _LOCK).open("a+")
    for left in reversed(range(50)):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not left:
                file.seek(0)
                raise RunError(
                    f"{config.run.dir}: process {file.read().strip() or 'unknown'} is training in it; wait for it, end it, "
                    "or choose another run.dir",
                    path=config.run.dir,
                ) from None
            time.sleep(0.1)  # a run that was just killed may still be going away
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    os.fsync(file.fileno())
    return file


def require_one_folder(config: Config, ranks: "Ranks", state: TrainState) -> None:
    """Refuse ranks that do not look at one run folder, as on nodes that have a disk each.

    Raises:
        TrainError: on every rank; names two nodes and what they see.
    """
    path = config.run.dir / _LOCK
    held = (path.read_text().strip() if path.exists() else "") or "none"
    data = state.segments[-1]
    dataset = f"{data.manifest_id[:16]}{f' without list {data.quarantine_id[:16]}' if data.quarantine_id else ''}"
    sights = ranks.gather([(socket.gethostname(), held, state.step, dataset)])
    for rank, sight in enumerate(sights):
        if sight[1:] != sights[0][1:]:
            seen = [f"rank {r} on {h} sees lock {k}, step {s}, dataset {d}" for r, (h, k, s, d) in enumerate(sights)]
            raise TrainError(
                f"{config.run.dir}: is not the same folder for all: {seen[0]}; {seen[rank]}; give a run.dir and data.shards on "
                "a file system that the nodes share",
                on_every_rank=True,
            )
