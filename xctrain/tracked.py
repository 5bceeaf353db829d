"""Accelerate's trackers, opened where a run left off, and kept in its folder.

The log is the truth, and is cut back when steps are done again; so one point a step is a matter of where to begin:

- TensorBoard, trackio and W&B offline write files here: they are begun anew at each start, from the log's first line;
- MLflow, and W&B at a server, cannot take a point back: they are asked what they have, and get what follows it.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shards.atomic import write_file
from xctrain.config import Config

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

_MLFLOW_AT_ONCE = 1000  # its limit
_MLFLOW_TAG = "xctrain.run_id"


@dataclass(frozen=True)
class Point:
    """The figures of a log line."""

    step: int
    values: dict[str, float]  # by the names that trackers group them under
    time_s: float | None = None  # when they came up, in seconds since 1970


@dataclass(frozen=True)
class Sample:
    """A held-out picture and what the model says of it."""

    key: str
    picture: Path
    caption: str


@dataclass(frozen=True)
class Opened:
    """A tracker that runs, and what it has already: it gets values for which ``lacks`` is true."""

    tracker: "GeneralTracker"
    lacks: Callable[[str, int], bool]
    send_all: Callable[[Sequence[Point]], None] | None = None  # several steps at once
    takes_time: bool = False  # and not only that at which it is told
    show: Callable[[int, Sequence[Sample]], None] | None = None  # captions with their pictures

    def send(self, points: Sequence[Point]) -> None:
        """Give it what it lacks of these figures."""
        lacking = [replace(p, values={k: v for k, v in p.values.items() if self.lacks(k, p.step)}) for p in points]
        lacking = [point for point in lacking if point.values]
        if self.send_all:
            self.send_all(lacking)
            return
        for point in lacking:
            when = {"walltime": point.time_s} if self.takes_time else {}
            self.tracker.log(point.values, step=point.step, **when)


def environment_of(config: Config, folder: Path) -> dict[str, str]:
    """What keeps a tracker's files in the run folder and, unless asked for, the network out of it."""
    inside = str(folder)
    values = {
        "WANDB_CACHE_DIR": inside,
        "WANDB_DATA_DIR": inside,
        "WANDB_ARTIFACT_DIR": inside,
        "WANDB_CONSOLE": "off",
        "WANDB_ERROR_REPORTING": "false",
        "TRACKIO_DIR": inside,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "GRADIO_ANALYTICS_ENABLED": "false",
        "HF_HUB_OFFLINE": "1",
    }
    if not (config.watch.online and folder.name == "wandb"):  # whose own settings say where to send it
        values |= {f"XDG_{kind}_HOME": inside for kind in ("CONFIG", "CACHE", "DATA")}
    if not config.watch.online:
        database = f"sqlite:///{folder / 'mlflow.db'}"
        values |= {"WANDB_MODE": "offline", "WANDB_CONFIG_DIR": inside, "MLFLOW_TRACKING_URI": database}
    return values


def open_tracker(config: Config, name: str, folder: Path, run_id: str) -> Opened:
    """Accelerate's tracker of this name, on the run that an earlier start began, if there was one."""
    from accelerate.state import PartialState

    PartialState(cpu=True)  # Accelerate's trackers ask it whether they are on the main process
    project, run_name = config.watch.project, config.run.dir.name
    settings = dict(_flat(config.model_dump(mode="json")))
    keeps = name == "mlflow" or (name == "wandb" and config.watch.online)
    if folder.is_dir() and not keeps:
        shutil.rmtree(folder)  # it is made from the log again
    folder.mkdir(exist_ok=True)
    if name == "mlflow":
        return _open_mlflow(config, folder, run_id, settings)
    tracker: GeneralTracker
    if name == "tensorboard":
        from accelerate.tracking import TensorBoardTracker

        tracker = TensorBoardTracker("", folder, purge_step=0)  # a page that is open drops what it had read
        tracker.start()
        tracker.log({"config": "".join(f"    {k}: {v}\n" for k, v in settings.items())}, step=0)
        return Opened(tracker, lambda _key, _step: True, takes_time=True, show=_shown_by_tensorboard(tracker))
    if name == "trackio":
        from accelerate.tracking import TrackioTracker

        tracker = TrackioTracker(project, name=run_name, resume="never", embed=False, config=settings)
        tracker.start()
        return Opened(tracker, lambda _key, _step: True)
    from accelerate.tracking import WandBTracker

    resume = "allow" if config.watch.online else None
    tracker = WandBTracker(project, id=run_id, name=run_name, dir=str(folder), config=settings, resume=resume)
    tracker.start()
    begun = int(tracker.tracker.step)  # of a run that goes on, the step after its last one

    def show(step: int, samples: Sequence[Sample]) -> None:
        import wandb

        if step >= begun:
            pictures = [wandb.Image(str(sample.picture), caption=sample.caption) for sample in samples]
            tracker.log({"captions": pictures}, step=step)

    return Opened(tracker, lambda _key, step: step >= begun, show=show)


def _shown_by_tensorboard(tracker: "GeneralTracker") -> Callable[[int, Sequence[Sample]], None]:
    """Each picture once, and what is said of it as a text that changes with the steps."""
    drawn: set[str] = set()

    def show(step: int, samples: Sequence[Sample]) -> None:
        import numpy as np
        from PIL import Image

        for sample in samples:
            if sample.key not in drawn:
                drawn.add(sample.key)
                pixels = np.array(Image.open(sample.picture).convert("RGB"))[None]
                tracker.log_images({f"captions/{sample.key}": pixels}, step=step, dataformats="NHWC")
            tracker.log({f"captions/{sample.key}": sample.caption}, step=step)

    return show


def _open_mlflow(config: Config, folder: Path, run_id: str, settings: Mapping[str, str]) -> Opened:
    from accelerate.tracking import MLflowTracker
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    for variable in ("MLFLOW_RUN_ID", "MLFLOW_NESTED_RUN"):  # Accelerate would prefer them
        os.environ.pop(variable, None)
    place = None if config.watch.online else (folder / "artifacts").as_uri()
    client, project = MlflowClient(), config.watch.project
    experiment = client.get_experiment_by_name(os.environ.get("MLFLOW_EXPERIMENT_NAME", project))
    same = f"tags.`{_MLFLOW_TAG}` = '{run_id}'"  # MLflow numbers its runs itself
    there = client.search_runs([experiment.experiment_id], same) if experiment else []
    found = there[0].info.run_id if there else None
    tracker = MLflowTracker(project, place, run_id=found, run_name=config.run.dir.name, tags={_MLFLOW_TAG: run_id})
    tracker.start()
    begun = tracker.tracker.info.run_id
    if found is None:
        tracker.store_init_configuration(dict(settings))
    last: dict[str, int] = {}

    def lacks(key: str, step: int) -> bool:
        if key not in last:  # a kill may have left some figures of a step behind, others not
            last[key] = max((m.step for m in client.get_metric_history(begun, key)), default=-1)
        return step > last[key]

    def send_all(points: Sequence[Point]) -> None:  # one step takes 30 ms, a hundred little more
        now = time.time()
        figures = [Metric(k, v, round((p.time_s or now) * 1000), p.step) for p in points for k, v in p.values.items()]
        for i in range(0, len(figures), _MLFLOW_AT_ONCE):
            client.log_batch(begun, figures[i : i + _MLFLOW_AT_ONCE])

    return Opened(tracker, lacks, send_all)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)


def tracker_folder(run_dir: Path, name: str) -> Path:
    """Where a tracker's own files lie."""
    return run_dir / "trackers" / name


def tracker_log(run_dir: Path, name: str) -> Path:
    """Where what a tracker's process prints lies."""
    return run_dir / "logs" / f"tracker-{name}.log"


def read_status(run_dir: Path, name: str) -> dict[str, Any]:
    """What is remembered of a tracker: failures of this start, and the first of them."""
    try:
        values = json.loads(_status_path(run_dir, name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def save_status(run_dir: Path, name: str, failures: int, first: str) -> None:
    """Remember how often a tracker failed in this start."""
    with contextlib.suppress(OSError):  # a full disk: the run has more to say of that
        write_file(_status_path(run_dir, name), json.dumps({"failures": failures, "first": first}).encode())


def _status_path(run_dir: Path, name: str) -> Path:
    return tracker_log(run_dir, name).with_suffix(".json")  # not among its own files, which may be what fails
