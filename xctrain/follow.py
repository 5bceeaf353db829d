"""The process of one tracker: sends what stands in a run's ``metrics.jsonl``, and what is added to it, until told to end.

The log is the truth, and is cut back when steps are done again; so one point a step is a matter of where to begin:

- TensorBoard, trackio and W&B offline write files here: they are begun anew at each start, from the log's first line;
- MLflow, and W&B at a server, cannot take a point back: they are asked what they have, and get what follows it.

Started by ``trackers.py``; ``python -m xctrain.follow RUN TRACKER PARENT``. Ends with its parent.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from shards.atomic import write_file
from shards.settings import load_settings
from xctrain.config import Config
from xctrain.log import METRICS, SAMPLES, read_lines
from xctrain.processes import die_with_parent

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

END = b"end\n"
_POLL_S = 0.5
_LONGEST_PAUSE_S = 60.0
_MLFLOW_AT_ONCE = 1000  # its limit
_LINES_AT_ONCE = 1000  # of a long log, so that it is never in memory as a whole
_NOT_VALUES = ("event", "step", "samples_consumed", "time", "digest")
_EVENTS = {"step": "train", "eval": "eval"}


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


def main(argv: list[str]) -> int:
    """Follow the log of a run for one tracker; 1 if it could not be given everything."""
    run_dir, name, parent = Path(argv[0]).resolve(), argv[1], int(argv[2])
    die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the trainer finishes its step, then tells us to end
    os.nice(5)
    screen = os.fdopen(os.dup(2), "w")
    os.dup2(1, 2)  # what trackers say goes to a file
    folder = tracker_folder(run_dir, name)
    folder.parent.mkdir(exist_ok=True)
    os.chdir(folder.parent)
    config = load_settings(Config, run_dir / "config.yaml").moved_to(run_dir)
    os.environ.update(environment_of(config, folder))
    if went_back(config):
        _save_status(run_dir, name, run_id=None)
    failures, first, pause = 0, "", 1.0
    while True:
        _save_status(run_dir, name, failures=failures, first=first)
        last_try = told_to_end(0)
        try:
            feed(open_tracker(config, name, folder), run_dir / METRICS)
        except Exception as error:  # noqa: BLE001 - a tracker may raise anything
            failures, first = failures + 1, first or f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if failures == 1:
                print(f"tracker {name}: {first}; training goes on, it is tried again", file=screen, flush=True)
        else:
            return 0
        if last_try:
            _save_status(run_dir, name, failures=failures, first=first)
            return 1
        told_to_end(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def feed(opened: Opened, log: Path) -> None:
    """Send what the log holds and what is added, until told to end; then what is left."""
    try:
        with log.open("rb") as file:
            ending = False
            while True:
                while events := list(islice(whole_lines(file), _LINES_AT_ONCE)):
                    opened.send([point_of(event) for event in events])
                    for event in events:
                        if opened.show and event["event"] == "samples":
                            opened.show(event["step"], samples_of(log.parent / SAMPLES, event["path"]))
                if ending:
                    break
                ending = told_to_end(_POLL_S)
    except BaseException:
        with contextlib.suppress(Exception):
            opened.tracker.finish()
        raise
    opened.tracker.finish()


def samples_of(folder: Path, name: str) -> list[Sample]:
    """What the captions of a step say, with the pictures that are there."""
    lines = list(read_lines(folder / name))
    found = [Sample(line["key"], folder / f"{line['key']}.jpg", line["caption"]) for line in lines]
    return [sample for sample in found if sample.picture.exists()]


def told_to_end(timeout_s: float) -> bool:
    """Whether the trainer has told this process to end, or does so in the next seconds."""
    readable, _, _ = select.select([0], [], [], timeout_s)
    return bool(readable)  # its line stays unread, so that the answer stays


def whole_lines(file: IO[bytes]) -> Iterator[dict[str, Any]]:
    """Events from where the file stands; a line that is not whole yet is left for the next time."""
    while (line := file.readline()).endswith(b"\n"):
        yield json.loads(line)
    file.seek(-len(line), os.SEEK_CUR)


def point_of(event: Mapping[str, Any]) -> Point:
    """The figures of a log line; none of a line that has no curve."""
    group = _EVENTS.get(event["event"], "")
    if not group or event.get("blank"):
        return Point(0, {})
    prefix = f"{group}/{event['source']}/" if isinstance(event.get("source"), str) else f"{group}/"
    numbers = {k: float(v) for k, v in event.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return Point(event["step"], {prefix + k: v for k, v in numbers.items() if k not in _NOT_VALUES}, event.get("time"))


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


def open_tracker(config: Config, name: str, folder: Path) -> Opened:
    """Accelerate's tracker of this name, on the run that an earlier start began, if there was one."""
    from accelerate.state import PartialState

    PartialState(cpu=True)  # Accelerate's trackers ask it whether they are on the main process
    project, run_name = config.watch.project, config.run.dir.name
    settings = dict(_flat(config.model_dump(mode="json")))
    run_id = read_status(config.run.dir, name).get("run_id")
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

    run_id = run_id or uuid.uuid4().hex[:12]
    _save_status(config.run.dir, name, run_id=run_id)
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


def _open_mlflow(config: Config, folder: Path, run_id: str | None, settings: Mapping[str, str]) -> Opened:
    from accelerate.tracking import MLflowTracker
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    for variable in ("MLFLOW_RUN_ID", "MLFLOW_NESTED_RUN"):  # Accelerate would prefer them
        os.environ.pop(variable, None)
    place = None if config.watch.online else (folder / "artifacts").as_uri()
    tracker = MLflowTracker(config.watch.project, place, run_id=run_id, run_name=config.run.dir.name)
    tracker.start()
    begun = tracker.tracker.info.run_id
    if begun != run_id:
        _save_status(config.run.dir, "mlflow", run_id=begun)
        tracker.store_init_configuration(dict(settings))
    client = MlflowClient()
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


def went_back(config: Config) -> bool:
    """Whether the newest start of a run went back by request, so that what a server has is another past."""
    start: Mapping[str, Any] = {}
    with (config.run.dir / METRICS).open("rb") as file:
        for event in whole_lines(file):
            start = event if event["event"] == "start" else start
    return config.train.resume not in ("auto", "never") and bool(start.get("lost_steps"))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)


def tracker_folder(run_dir: Path, name: str) -> Path:
    """Where a tracker's own files lie."""
    return run_dir / "trackers" / name


def read_status(run_dir: Path, name: str) -> dict[str, Any]:
    """What is remembered of a tracker: run_id, failures of this start, the first of them."""
    try:
        values = json.loads(_status_path(run_dir, name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _save_status(run_dir: Path, name: str, **values: Any) -> None:
    with contextlib.suppress(OSError):  # a full disk: the run has more to say of that
        write_file(_status_path(run_dir, name), json.dumps(read_status(run_dir, name) | values).encode())


def _status_path(run_dir: Path, name: str) -> Path:
    return tracker_folder(run_dir, name).with_suffix(".json")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
