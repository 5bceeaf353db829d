"""The process of one tracker: sends what stands in a run's ``metrics.jsonl``, and what is added to it, until told to end.

Started by ``trackers.py``; ``python -m xctrain.follow RUN TRACKER PARENT``. Ends with its parent.
"""

import contextlib
import os
import select
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

from shards.parent import die_with_parent
from shards.settings import load_settings
from xctrain.config import Config
from xctrain.log import METRICS, SAMPLES, parse, read_lines
from xctrain.tracked import (
    Opened,
    Point,
    Sample,
    environment_of,
    open_tracker,
    save_status,
    tracker_folder,
    tracker_log,
)

END = b"end\n"
_POLL_S = 0.5
_LONGEST_PAUSE_S = 60.0
_LINES_AT_ONCE = 1000  # of a long log, so that it is never in memory as a whole
_NOT_VALUES = ("event", "step", "samples_consumed", "time", "digest")
_EVENTS = {"step": "train", "eval": "eval"}


def main(argv: list[str]) -> int:
    """Follow the log of a run for one tracker; 1 if it could not be given everything."""
    run_dir, name, parent = Path(argv[0]).resolve(), argv[1], int(argv[2])
    die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the trainer finishes its step, then tells us to end
    os.nice(5)
    screen = os.fdopen(os.dup(2), "w")
    os.dup2(1, 2)  # what trackers say goes to a file
    failures, first, pause = 0, "", 1.0
    while True:
        save_status(run_dir, name, failures, first)
        last_try = told_to_end(0)
        try:
            feed(begin(run_dir, name), run_dir / METRICS)
        except Exception as error:  # noqa: BLE001 - a tracker may raise anything
            failures, first = failures + 1, first or f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if failures == 1:
                traceback.print_exc()
                print(
                    f"tracker {name}: {first}; training goes on, it is tried again; more in {tracker_log(run_dir, name)}",
                    file=screen,
                    flush=True,
                )
        else:
            return 0
        if last_try:
            save_status(run_dir, name, failures, first)
            return 1
        told_to_end(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def begin(run_dir: Path, name: str) -> Opened:
    """Open the tracker in its folder, where the run left off."""
    folder = tracker_folder(run_dir, name)
    folder.parent.mkdir(exist_ok=True)
    os.chdir(folder.parent)
    config = load_settings(Config, run_dir / "config.yaml").moved_to(run_dir)
    os.environ.update(environment_of(config, folder))
    return open_tracker(config, name, folder, newest_run_id(run_dir / METRICS))


def feed(opened: Opened, log: Path) -> None:
    """Send what the log holds and what is added, until told to end; then what is left."""
    try:
        with log.open("rb") as file:
            ending = False
            while True:
                while events := list(islice(whole_lines(file), _LINES_AT_ONCE)):
                    give(opened, events, log.parent / SAMPLES)
                if ending:
                    break
                ending = told_to_end(_POLL_S)
    except BaseException:
        with contextlib.suppress(Exception):
            opened.tracker.finish()
        raise
    opened.tracker.finish()


def give(opened: Opened, events: Sequence[Mapping[str, Any]], samples: Path) -> None:
    """Send figures and captions in the order of the log: W&B drops what comes after a later step."""
    points: list[Point] = []
    for event in events:
        points.append(point_of(event))
        if opened.show and event["event"] == "samples":
            opened.send(points)
            opened.show(event["step"], samples_of(samples, event["path"]))
            points = []
    opened.send(points)


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
    """Events from where the file stands; a line that is not whole yet is left for the next time, a damaged one out."""
    while (line := file.readline()).endswith(b"\n"):
        with contextlib.suppress(ValueError):
            yield parse(line, METRICS)
    file.seek(-len(line), os.SEEK_CUR)


def point_of(event: Mapping[str, Any]) -> Point:
    """The figures of a log line; none of a line that has no curve."""
    group = _EVENTS.get(event["event"], "")
    if not group or event.get("blank"):
        return Point(0, {})
    prefix = f"{group}/{event['source']}/" if isinstance(event.get("source"), str) else f"{group}/"
    numbers = {k: float(v) for k, v in event.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return Point(event["step"], {prefix + k: v for k, v in numbers.items() if k not in _NOT_VALUES}, event.get("time"))


def newest_run_id(log: Path) -> str:
    """What trackers know the run by, as its newest start says."""
    found = ""
    with log.open("rb") as file:
        for event in whole_lines(file):
            found = event["run_id"] if event["event"] == "start" and "run_id" in event else found
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
