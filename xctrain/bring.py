"""A run that was sent to an address, brought into a run folder that holds none: another machine goes on with it."""

import json
import os
import shutil
from pathlib import Path

from shards.atomic import aside, publish, sync_folder
from shards.remote import Remote, is_remote, shown
from xctrain import checkpoint
from xctrain.best import best_step
from xctrain.checkpoint import FILES
from xctrain.config import Config
from xctrain.errors import CheckpointError, ResumeError
from xctrain.log import METRICS
from xctrain.pushed import id_at, known, remember, scores_of, step_name, whole_steps
from xctrain.resume import checkpoints_of


def source(config: Config) -> str | None:
    """The address that a start brings the run from; None if the run folder is what it goes on from, or starts in.

    Raises:
        ResumeError: train.resume names an address, and the run folder holds another run.
    """
    named = config.train.resume if is_remote(config.train.resume) else None
    address = named or (config.checkpoint.push if config.train.resume == "auto" else None)
    if address is None:
        return None
    checkpoints, folder = checkpoints_of(config), config.run.dir
    here = known(folder)
    if checkpoints.steps() or checkpoints.newest_valid()[0]:
        if named and here.get("from") != named:
            raise ResumeError(
                f"{folder}: holds a run that was not brought from {shown(named)}; choose another run.dir for what goes on from "
                "there, or go on with train.resume=auto",
                path=folder,
            )
        return None
    if named and here.get("from") != named and (folder / METRICS).exists():
        raise ResumeError(
            f"{folder}: holds a run (it has a {METRICS}), train.resume={shown(named)} brings another; choose another run.dir",
            path=folder,
        )
    return address


def fetch_run(config: Config) -> list[str]:
    """Bring the run's logs, newest whole checkpoint and best one here, if this start goes on from an address; what to say.

    Whole or not at all: the newest checkpoint comes last, and a start that was killed before it begins anew.

    Raises:
        CheckpointError: there is none there, or every one is damaged. ResumeError: as ``source``.
        RemoteError: the store refuses, or does not answer.
    """
    address = source(config)
    if address is None:
        return []
    remote = Remote(address)
    there = remote.list()
    whole = whole_steps(there)
    named = is_remote(config.train.resume)
    if not whole:
        if named:
            raise CheckpointError(f"train.resume is {remote}, which holds no whole checkpoint; check the address")
        return []
    checkpoints, folder = checkpoints_of(config), config.run.dir
    remember(folder, id_at(remote, there), address)
    for name in there:
        if name == METRICS or (name.startswith("keys-rank") and "/" not in name):
            _fetch(remote, name, aside(folder / name))
            publish(aside(folder / name), folder / name)
    notes: list[str] = []
    for newest in whole:
        try:
            _fetch_checkpoint(remote, checkpoints.path(newest))
            break
        except CheckpointError as error:
            notes.append(f"passed over {error}")
    else:
        raise CheckpointError(f"{remote}: every checkpoint ({len(whole)}) is damaged: {'; '.join(notes)}")
    best = best_step(scores_of(remote, [step for step in whole if step <= newest]), checkpoints.metric)
    if best is not None and best != newest:
        _fetch_checkpoint(remote, checkpoints.path(best))
        publish(aside(checkpoints.path(best)), checkpoints.path(best))
        notes.append(f"brought from {remote}: the best checkpoint, {step_name(best)}")
    publish(aside(checkpoints.path(newest)), checkpoints.path(newest))
    return [*notes, f"brought from {remote}: {step_name(newest)}"]


def _fetch(remote: Remote, name: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        remote.fetch(name, path)
    except FileNotFoundError:
        raise CheckpointError(f"{remote}/{name}: is missing") from None
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _fetch_checkpoint(remote: Remote, path: Path) -> None:
    """Bring a checkpoint here, under the name that it has until it is whole.

    Raises:
        CheckpointError: it is damaged.
    """
    temporary = aside(path)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        listed = json.loads(remote.read(f"{path.name}/{FILES}"))
        names = sorted(name for name in listed if Path(name).name == name != "..")
    except (ValueError, TypeError):
        raise CheckpointError(f"{remote}/{path.name}: {FILES} is damaged") from None
    try:
        for name in (*names, FILES):
            _fetch(remote, f"{path.name}/{name}", temporary / name)
        checkpoint.check(temporary)
    except CheckpointError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(str(error).replace(str(temporary), f"{remote}/{path.name}")) from None
    sync_folder(temporary)
