"""What a start finds in the logs of its run, and what it leaves of them before it writes on."""

import json
import os
import platform
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shards.atomic import write_file
from shards.errors import counted
from shards.remote import is_remote
from xctrain import resume
from xctrain.config import Config
from xctrain.log import CAPTIONS, METRICS, SAMPLES, JsonLines, cut_back, keys_name, read_lines
from xctrain.resume import ResumePoint
from xctrain.spikes import WINDOW
from xctrain.state import TrainState
from xctrain.world import gpu_name

if TYPE_CHECKING:
    from xctrain.ranks import Ranks


def open_logs(
    config: Config,
    ranks: "Ranks",
    state: TrainState,
    point: ResumePoint | None,
    notes: Sequence[str],
    world: dict[str, Any],
) -> tuple[JsonLines | None, JsonLines | None]:
    """Cut every log back to the state, note this start, and open the logs of this rank."""
    folder = config.run.dir
    log = None
    if ranks.is_main:
        previous = previous_end(folder, state)
        own = point is not None and resume.is_own(config, point.path)  # else the logs of before lie with another run
        if lost := previous["lost_steps"]:
            ended = {"killed": "was killed", "stopped": "stopped"}.get(previous["previous_end"], "ended")
            last, redone = state.step + lost, counted(lost, "step")
            notes = [
                *notes,
                f"the last start {ended} at step {last}; the {redone} after step {state.step} are trained again",
            ]
        notes = [*notes, *(_missing_logs(folder, state) if own else ())]
        # Checkpoints first: a kill in between must not leave one that the logs do not reach.
        gone = resume.checkpoints_of(config).go_back(state.step if point else -1)
        notes = [*notes, *gone]
        asked_for = config.train.resume not in ("auto", "never") and not is_remote(config.train.resume)
        run_id = None if gone and asked_for else logged_run_id(folder)
        cut_back(folder, state.samples_consumed if point else -1)
        for path in [p for name in (CAPTIONS, SAMPLES) for p in (folder / name).glob("*step-*.jsonl")]:
            if int(path.stem.rpartition("step-")[2]) > state.step:
                path.unlink()
        write_file(folder / "config.yaml", config.to_yaml().encode())
        about = {"platform": platform.platform(), "cores": os.cpu_count(), "gpu": gpu_name()}
        environment = {**world, **about, "command": sys.argv, "started_in": str(Path.cwd())}
        write_file(folder / "environment.json", json.dumps(environment, indent=1).encode())
        log = JsonLines(folder / METRICS)
        log.write(
            event="start",
            step=state.step,
            samples_consumed=state.samples_consumed,
            time=time.time(),
            world_size=ranks.world_size,
            resumed_from=state.step if point else None,
            source=str(point.path.resolve()) if point else None,
            fork=point is not None and not own,
            **previous,
            run_id=run_id or uuid.uuid4().hex[:12],
            notes=notes,
        )
        for note in notes:
            print(note, file=sys.stderr)
    ranks.barrier()
    keys = JsonLines(folder / keys_name(ranks.rank)) if config.train.log_keys else None
    return log, keys


def _missing_logs(folder: Path, state: TrainState) -> Iterator[str]:
    keys = keys_name(0).replace("0", "*")
    for name in (METRICS, *([keys] if state.keys_from not in (None, state.samples_consumed) else [])):
        if not any(folder.glob(name)):
            yield (
                f"{folder / name}: is missing; training goes on exactly, but the audit will miss what was logged up to step "
                f"{state.step}, unless you end the run, put a copy back and start again"
            )


def logged_run_id(folder: Path) -> str | None:
    """What trackers know the run by: in the log, which goes wherever the run goes."""
    found = [
        line["run_id"] for line in read_lines(folder / METRICS) if line.get("event") == "start" and "run_id" in line
    ]
    return str(found[-1]) if found else None


def previous_end(folder: Path, state: TrainState) -> dict[str, Any]:
    """How the last start ended, and how many steps go back to the checkpoint with it; empty for a first start."""
    last: dict[str, Any] = {}
    last_step = 0
    for line in read_lines(folder / METRICS):
        last = line
        if line["event"] in ("start", "step"):  # others may name a step that was still to come
            last_step = line["step"]
    if not last:
        return {"previous_end": None, "lost_steps": 0}
    end = last.get("reason", "stopped") if last.get("event") == "stop" else "killed"
    return {"previous_end": end, "lost_steps": max(0, last_step - state.step)}


def losses_before(config: Config) -> list[float]:
    """Losses of the last steps in the log."""
    events = deque((e for e in read_lines(config.run.dir / METRICS) if e["event"] == "step"), maxlen=WINDOW)
    return [event["loss"] for event in events]


def keys_from(config: Config, state: TrainState, point: ResumePoint | None) -> int | None:
    """Position from which every trained key is in this run's logs; None if they are not logged."""
    if not config.train.log_keys:
        return None
    own = point is None or resume.is_own(config, point.path)  # another run's checkpoint comes without its logs
    return state.keys_from if own and state.keys_from is not None else state.samples_consumed
