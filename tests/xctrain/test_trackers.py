"""Trackers get each step once, over kills and resumes, and never stop or delay a run. Read back from their own files."""

import json
import re
import shlex
import signal
import sqlite3
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import owndisk
import pytest
import runs
from small import config_of, train_here

from shards.errors import UserError
from xctrain.errors import ConfigError
from xctrain.follow import newest_run_id, point_of
from xctrain.start import make_plan
from xctrain.tracked import Point

Points = dict[tuple[str, int], list[float]]  # by name and step, in the order in which they lie in the files


def tensorboard_points(run: Path) -> Points:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    points: Points = {}
    for path in sorted((run / "trackers/tensorboard").glob("events.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.tag.startswith(("train/", "eval/")):
                    points.setdefault((value.tag, event.step), []).append(value.tensor.float_val[0])
    return points


def wandb_points(run: Path) -> Points:
    """Of all offline runs in the folder, which would all be synced to the one run that their names end in."""
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    points: Points = {}
    folders = list((run / "trackers/wandb").rglob("*.wandb"))
    assert len({path.name for path in folders}) <= 1
    for path in folders:
        for data in _wandb_records(path.read_bytes()):
            record = proto.Record()
            record.ParseFromString(data)
            values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            for name in (n for n in values if n.startswith(("train/", "eval/"))):
                points.setdefault((name, values["_step"]), []).append(values[name])
    return points


def _wandb_records(data: bytes) -> Iterator[bytes]:
    """A .wandb file holds records in LevelDB's log format, behind a header of 7 bytes.

    Source: LevelDB, doc/log_format.md.
    """
    block, place, parts = 32768, 7, b""
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        if not kind:
            return
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def wandb_captions(run: Path) -> list[int]:
    """Steps at which a W&B run has captions."""
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    steps = []
    for path in (run / "trackers/wandb").rglob("*.wandb"):
        for data in _wandb_records(path.read_bytes()):
            record = proto.Record()
            record.ParseFromString(data)
            values = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            steps += [json.loads(values["_step"])] if "captions" in values else []
    return steps


def trackio_points(run: Path) -> Points:
    points: Points = {}
    for step, metrics in _rows(run / "trackers/trackio", "select step, metrics from metrics"):
        for name, value in json.loads(metrics).items():
            if name.startswith(("train/", "eval/")):
                points.setdefault((name, step), []).append(value)
    return points


def mlflow_points(run: Path) -> Points:
    points: Points = {}
    for name, step, value in _rows(run / "trackers/mlflow", "select key, step, value from metrics"):
        points.setdefault((name, step), []).append(value)
    assert _rows(run / "trackers/mlflow", "select count(*) from runs") in ([], [(0,)], [(1,)])
    return points


def _rows(folder: Path, query: str) -> list[tuple[Any, ...]]:
    """Rows of the databases in a folder; none while they are being made."""
    rows: list[tuple[Any, ...]] = []
    for path in folder.glob("*.db"):
        database = sqlite3.connect(path)
        with closing(database), suppress(sqlite3.OperationalError):
            rows += database.execute(query).fetchall()
    return rows


TRACKERS: dict[str, Callable[[Path], Points]] = {
    "tensorboard": tensorboard_points,
    "wandb": wandb_points,
    "trackio": trackio_points,
    "mlflow": mlflow_points,
}


def due_points(run: Path) -> Points:
    """What the log says that a tracker should hold."""
    points: Points = {}
    for kind in ("step", "eval"):
        for event in runs.events(run, kind):
            point = point_of(event)
            for name, value in point.values.items():
                points[name, point.step] = [value]
    return points


def newest_checkpoint(run: Path) -> int:
    return max((int(path.name[-8:]) for path in (run / "checkpoints").glob("step-*")), default=10**9)


def last_point(points: Points) -> int:
    return max((step for _, step in points), default=0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TRACKERS)
def test_after_a_kill_a_tracker_ends_with_one_point_for_each_step(
    name: str, drawn_shards: Path, tmp_path: Path
) -> None:
    pytest.importorskip(name)
    run = tmp_path / "run"
    save_every = 300 if name == "mlflow" else 100  # it takes what has come up since its last transaction
    changes = {"train__save_every": save_every, "watch__trackers": f"[{name}]"}
    changes |= {"eval__every": 150, "eval__num_images": 2, "eval__max_new_tokens": 2}
    changes |= {"watch__captions_every": 50, "watch__num_captions": 1}
    changes |= {"optim__schedule": "constant", "train__log_keys": False}  # the same steps for any number of them
    arguments = runs.settings(drawn_shards, run, **changes)
    process = runs.launcher([*arguments, "train.num_steps=100000"], 2)
    until = time.monotonic() + 120
    try:
        while last_point(TRACKERS[name](run)) < newest_checkpoint(run) + 5:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < until
            time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    held = last_point(TRACKERS[name](run))
    steps = runs.last_step(run) + save_every
    process = runs.launcher([*arguments, f"train.num_steps={steps}", "train.resume_with=train.num_steps"], 2)
    printed = runs.finish(process)
    begun = runs.events(run, "start")[-1]
    assert begun["previous_end"] == "killed"  # as a rule some steps beyond its newest checkpoint
    assert held > begun["step"], "nothing that the tracker held was done again"
    found, due = TRACKERS[name](run), due_points(run)
    assert {key for key, values in found.items() if len(values) != 1} == set()
    assert found.keys() == due.keys()
    assert Counter(step for tag, step in found if tag == "train/loss") == dict.fromkeys(range(1, steps + 1), 1)
    for (tag, step), [value] in found.items():
        if tag in ("train/loss", "eval/bleu1"):
            assert value == pytest.approx(due[tag, step][0], rel=1e-6), (tag, step)
    assert "training goes on" not in printed
    assert not runs.events(run, "tracker")
    if name == "wandb":
        assert wandb_captions(run) == [event["step"] for event in runs.events(run, "samples")]


def test_tensorboard_has_captions_with_pictures_and_the_time_of_each_step(drawn_shards: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    run = tmp_path / "run"
    changes = {"watch__captions_every": 4, "watch__num_captions": 2, "eval__max_new_tokens": 2, "data__workers": 0}
    runs.train(drawn_shards, run, watch__trackers="[tensorboard]", train__num_steps=8, **changes)
    [path] = (run / "trackers/tensorboard").glob("events.*")
    texts, pictures, times = [], [], []
    for event in EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            if value.tag == "train/loss":
                times.append((event.step, event.wall_time))
            if value.tag.startswith("captions/"):
                is_text = value.metadata.plugin_data.plugin_name == "text"
                (texts if is_text else pictures).append((value.tag.split("/")[1], event.step))
    keys = [json.loads(line)["key"] for line in (run / "samples/step-00000008.jsonl").read_text().splitlines()]
    assert texts == [(key, step) for step in (0, 4, 8) for key in keys]
    assert pictures == [(key, 0) for key in keys]
    assert times == [(line["step"], line["time"]) for line in runs.events(run, "step")]  # not when it was told


def test_a_run_keeps_its_id_unless_it_goes_back_by_request(drawn_shards: Path, tmp_path: Path) -> None:
    run, longer = tmp_path / "run", {"train__num_steps": 15, "train__resume_with": "train.num_steps"}
    train_here(drawn_shards, run)
    first = newest_run_id(run / "metrics.jsonl")
    train_here(drawn_shards, run, **longer)
    assert newest_run_id(run / "metrics.jsonl") == first
    train_here(
        drawn_shards, run, train__resume=str(run / "checkpoints/step-00000015"), **longer
    )  # the newest: not back
    assert newest_run_id(run / "metrics.jsonl") == first
    train_here(drawn_shards, run, train__resume=str(run / "checkpoints/step-00000010"), **longer)
    assert newest_run_id(run / "metrics.jsonl") not in ("", first)


def stand_in(folder: Path, body: str) -> Path:
    """A folder from which ``import wandb`` gives this text: a library that fails as real ones do."""
    (folder / "wandb").mkdir(parents=True)
    (folder / "wandb/__init__.py").write_text(body)
    return folder


def train_with(library: Path, shards: Path, run: Path, **changes: Any) -> str:
    """Train to the end beside a tracker that imports from ``library``; what was printed."""
    arguments = runs.settings(shards, run, watch__trackers="[wandb]", data__workers=0, **changes)
    return runs.finish(runs.start(runs.rank_command(arguments), imports_from=library))


RAISES = """
import types
config = types.SimpleNamespace(update=lambda *a, **k: None)
class Run:
    step = 0
    def log(self, values, step=None): raise ConnectionError("the server is away")
    def finish(self): pass
def init(**options): return Run()
"""


def test_a_tracker_that_raises_is_said_once_and_counted_and_training_goes_on(
    drawn_shards: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    printed = train_with(stand_in(tmp_path / "lib", RAISES), drawn_shards, run, train__num_steps=60)
    assert printed.count("tracker wandb: ConnectionError: the server is away; training goes on") == 1
    [event] = runs.events(run, "tracker")
    assert event["failures"] >= 1
    assert event["first"] == "ConnectionError: the server is away"
    assert not event["whole"]
    assert f"tracker wandb: failed {event['failures']} time" in printed
    assert runs.last_step(run) == 60
    assert runs.events(run, "stop")[0]["reason"] == "done"


def test_a_server_that_is_away_for_a_while_leaves_no_gap(drawn_shards: Path, tmp_path: Path) -> None:
    run, sent = tmp_path / "run", tmp_path / "sent.jsonl"
    away = tmp_path / "away"
    away.touch()
    body = f"""
import json, os
class Run:
    step = 0
    def log(self, values, step=None):
        if step == 3 and os.path.exists({str(away)!r}):
            os.unlink({str(away)!r})
            raise TimeoutError("no answer")
        open({str(sent)!r}, "a").write(json.dumps([step, values["train/loss"]]) + "\\n")
    def finish(self): pass
def init(**options):
    open({str(sent)!r}, "w").close()
    return Run()
"""
    printed = train_with(stand_in(tmp_path / "lib", body), drawn_shards, run)
    lines = [json.loads(line) for line in sent.read_text().splitlines()]
    assert lines == [[event["step"], event["loss"]] for event in runs.events(run, "step")]
    assert "tracker wandb: failed 1 time, first: TimeoutError: no answer;" in printed
    assert runs.events(run, "tracker")[0]["whole"]


def test_a_tracker_that_cannot_begin_is_said_at_once_with_its_reason(drawn_shards: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "trackers").touch()
    log = run / "logs/tracker-wandb.log"
    # Steps enough that the tracker's process is up before the run ends.
    printed = train_with(stand_in(tmp_path / "lib", RAISES), drawn_shards, run, train__num_steps=300)
    first, end = (line for line in printed.splitlines() if line.startswith("tracker wandb: "))
    reason = f"FileExistsError: [Errno 17] File exists: '{run}/trackers'"
    assert first == f"tracker wandb: {reason}; training goes on, it is tried again; more in {log}"
    assert f"first: {reason}; the next start" in end
    assert end.endswith(f"more in {log}")
    assert "Traceback" in log.read_text()
    assert runs.events(run, "tracker")[0]["first"] == reason


def test_a_tracker_named_twice_is_refused(drawn_shards: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"watch\.trackers names wandb more than once; name each once"):
        config_of(drawn_shards, tmp_path / "run", watch__trackers="[wandb, mlflow, wandb]")


def test_a_tracker_that_hangs_or_dies_delays_no_step(drawn_shards: Path, tmp_path: Path) -> None:
    took = {}
    for kind, text in (("hangs", "import time; time.sleep(1000)"), ("dies", "import os; os._exit(7)")):
        body = f"class Run:\n    step = 0\n    def log(self, *a, **k):\n        {text}\ndef init(**options): return Run()\n"
        run = tmp_path / kind
        code = (
            "import sys; from xctrain import trackers; trackers._DRAIN_S = 2.0; from tiny import *; "
            "from xctrain.session import train_rank; "
            "train_rank(load_settings(Config, None, sys.argv[1:]), open_tiny)"
        )
        arguments = runs.settings(drawn_shards, run, watch__trackers="[wandb]", data__workers=0, train__num_steps=1000)
        library = stand_in(tmp_path / f"lib-{kind}", body)
        printed = runs.finish(runs.start([sys.executable, "-c", code, *arguments], imports_from=library))
        said = (
            f"its process ended with exit code 7; training goes on without it, .*; more in {run}/logs/tracker-wandb.log"
        )
        assert bool(re.search(said, printed)) == (kind == "dies")
        took[kind] = max(event["step_s"] for event in runs.events(run, "step")[5:])
        [event] = runs.events(run, "tracker")
        assert event["first"] == (
            "its process did not end in time" if kind == "hangs" else "its process ended with exit code 7"
        )
    assert max(took.values()) < 1.0


def test_no_process_of_a_tracker_outlives_a_killed_run(drawn_shards: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = runs.settings(drawn_shards, run, watch__trackers="[tensorboard]", train__num_steps=100000)
    process = runs.launcher(arguments, 2)
    until = time.monotonic() + 120
    try:
        while not list((run / "trackers/tensorboard").glob("events.*")):
            assert time.monotonic() < until
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    until = time.monotonic() + 30
    while left := [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(run) in _read(p)]:
        assert time.monotonic() < until, left
        time.sleep(0.05)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def test_a_disk_that_is_full_for_a_tracker_ends_no_run(drawn_shards: Path, tmp_path: Path) -> None:
    """A real one: a file system in memory of a name space of its own, of 64 kB."""
    run = tmp_path / "run"
    (run / "trackers").mkdir(parents=True)
    changes = {"watch__trackers": "[tensorboard]", "train__num_steps": 200, "data__workers": 0}
    train = shlex.join(runs.rank_command(runs.settings(drawn_shards, run, **changes)))
    done = owndisk.run(run / "trackers", "64k", f"exec {train}")
    err = done.stderr
    assert done.returncode == 0, done.stdout + err
    assert err.count("No space left on device; training goes on, it is tried again") == 1
    assert re.search(r"tracker tensorboard: failed \d+ times?, first: .*No space left on device", err)
    assert runs.last_step(run) == 200
    assert not runs.events(run, "tracker")[0]["whole"]


def test_a_missing_package_is_an_error_before_the_run_that_names_the_extra(
    drawn_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xctrain.trackers.find_spec", lambda _name: None)
    config = config_of(drawn_shards, tmp_path / "run", watch__trackers="[mlflow]")
    with pytest.raises(ConfigError, match=r"watch.trackers names mlflow, .* `pip install 'xctrain\[mlflow\]'`"):
        make_plan(config, world_size=1)
    assert not (tmp_path / "run").exists()


def test_a_server_without_an_address_is_an_error_before_the_run(
    drawn_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xctrain.trackers.find_spec", lambda name: name)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = config_of(drawn_shards, tmp_path / "run", watch__trackers="[mlflow]", watch__online=True)
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI is not set"):
        make_plan(config, world_size=1)


def test_figures_are_named_by_what_they_are_of() -> None:
    about = {"step": 3, "samples_consumed": 12, "time": 1.8e9}
    step = {"event": "step", **about, "loss": 2.0, "digest": "00", "sources": {"a": 4}}
    assert point_of(step) == Point(3, {"train/loss": 2.0}, 1.8e9)
    score = {"event": "eval", **about, "split": "val", "bleu4": 0.1, "cider": None}
    assert point_of(score).values == {"eval/bleu4": 0.1}
    assert point_of({**score, "source": "own"}).values == {"eval/own/bleu4": 0.1}
    assert point_of({**score, "blank": True}).values == {}
    assert point_of({"event": "save", "step": 3, "save_s": 1.0}).values == {}
