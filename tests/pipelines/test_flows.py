"""The build through Prefect, on one embedded API for all tests."""

import inspect
import json
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from pipelines.config import BuildConfig
from pipelines.run import run_plain

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture
def config_file(photos, tmp_path):
    path = tmp_path / "build.yaml"
    path.write_text(
        json.dumps({"source": str(photos), "out": str(tmp_path / "out"), "build": {"records_per_shard": 2}})
    )
    return path


def last_run(ask):
    """The flow run that began last."""
    return ask("/flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 1})[0]


def test_a_flow_run_gives_the_bytes_of_the_plain_build(
    ask, command, config_file, photos, make_config, data_files, tmp_path
):
    process = command("build", config_file, "build.processes=2")
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert "29 kept (train 24, val 5), 0 rejected" in output
    assert "Traceback" not in errors
    assert "locked" not in errors
    run_plain(make_config(photos, tmp_path / "plain", build={"records_per_shard": 2}))
    assert data_files(tmp_path / "out") == data_files(tmp_path / "plain")

    run = last_run(ask)
    assert run["state_type"] == "COMPLETED"
    num_shards = len(list((tmp_path / "out").glob("*.tar")))
    assert num_shards == 15
    ours = {"flow_runs": {"id": {"any_": [run["id"]]}}}
    assert ask("/task_runs/count", ours) <= num_shards + 2  # written by the server in its own time


def test_the_runs_page_shows_what_was_kept_and_links_the_report(ask, command, config_file, tmp_path):
    process = command("build", config_file)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    question = {"artifacts": {"flow_run_id": {"any_": [last_run(ask)["id"]]}}}
    (artifact,) = [a for a in ask("/artifacts/filter", question) if a["key"] == "build-report"]
    assert "| kept, train | 24 |" in artifact["data"]
    assert "| kept, val | 5 |" in artifact["data"]
    assert (tmp_path / "out" / "report.html").as_uri() in artifact["data"]


def test_a_shard_is_tried_again_by_prefect(ask, command, heavy, tmp_path):
    process = command("build", heavy, "build.processes=1")
    kill_a_build_process(process, tmp_path / "out")
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    killed = r"a build process was killed by signal 9 \(the kernel does that when memory runs out\)"
    assert re.search(rf"train-00000\d: {killed}; trying again \(1 of 2\)", errors), errors
    ours = {"flow_runs": {"id": {"any_": [last_run(ask)["id"]]}}}
    deadline = time.monotonic() + 30
    while max(task["run_count"] for task in ask("/task_runs/filter", ours)) != 2:
        assert time.monotonic() < deadline  # written by the server in its own time
        time.sleep(0.2)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_in_seconds_and_marks_it(ask, command, heavy, tmp_path, signum):
    process = command("build", heavy, "build.processes=1")
    while not build_processes(tmp_path / "out"):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    began = time.monotonic()
    process.send_signal(signum)
    _, errors = process.communicate(timeout=200)
    assert time.monotonic() - began < 30
    assert process.returncode == 75, errors
    assert "the build was stopped; finished shards are kept, the same command goes on from there" in errors
    assert "Traceback" not in errors
    assert last_run(ask)["state_type"] == "CRASHED"
    assert not build_processes(tmp_path / "out")
    process = command("build", heavy, "--plain")
    process.communicate(timeout=200)
    assert process.returncode == 0


@pytest.fixture
def heavy(coco, pictures, tmp_path):
    """A config whose build takes some seconds: pictures that have to be converted."""
    files = {f"{i}.png": pictures.encode(pictures.photo(i, 320, 240, "RGBA"), "PNG") for i in range(48)}
    path = tmp_path / "build.yaml"
    source = coco(tmp_path / "source", files)
    build = {"records_per_shard": 8}
    path.write_text(json.dumps({"source": str(source), "out": str(tmp_path / "out"), "build": build}))
    return path


@pytest.mark.parametrize("delay_s", [0, 0.2, 0.4, 0.6])
def test_signals_at_the_end_leave_the_exit_code(ask, command, config_file, tmp_path, delay_s):
    process = command("build", config_file)
    while not (tmp_path / "out" / "manifest.json").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)
    time.sleep(delay_s)
    for signum in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
        process.send_signal(signum)
        time.sleep(0.01)
    output, errors = process.communicate(timeout=200)
    assert process.returncode in (0, 75), errors
    assert ("29 kept" in output) == (process.returncode == 0)
    assert ("the build was stopped" in errors) == (process.returncode == 75)
    assert "Traceback" not in errors


def build_processes(out):
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"pipelines.workers\0{out}/" in (process / "cmdline").read_bytes().decode(errors="replace"):
                found.append(int(process.name))
    return found


def kill_a_build_process(process, out):
    """SIGKILL to one that is at a shard."""
    while not list((out / ".build" / "slices").glob("*.json")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    for pid in build_processes(out):
        os.kill(pid, signal.SIGKILL)


def test_every_parameter_of_the_form_is_described(ask):
    from pipelines.flows import add_shards, build_shards

    for flow in (build_shards, add_shards):
        schema = flow.parameters
        assert all(parameter["description"] for parameter in schema.properties.values())
        for name, model in schema.definitions.items():
            for field, about in model["properties"].items():
                assert about.get("description"), f"{name}.{field} has no description"
    assert schema.definitions["RunConfig"]["properties"]["runner"]["enum"] == ["processes", "threads", "dask", "ray"]


def test_an_addition_is_a_flow_run_of_its_own(ask, command, config_file, coco, pictures, tmp_path):
    process = command("build", config_file, "--plain", "build.processes=2")
    process.communicate(timeout=200)
    files = {f"{i}.jpg": pictures.encode(pictures.photo(i)) for i in range(700, 704)}
    more = coco(tmp_path / "more", files, first_id=700)
    process = command("add", tmp_path / "out", config_file, f"source={more}", "build.processes=2")
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert "4 added (train 4) to now 33 (train 28, val 5), 0 rejected" in output
    assert "Traceback" not in errors
    flows = {flow["id"]: flow["name"] for flow in ask("/flows/filter", {})}
    runs = ask("/flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 1})
    assert [(flows[run["flow_id"]], run["state_type"]) for run in runs] == [("add-shards", "COMPLETED")]


def test_a_failed_build_is_one_paragraph_and_a_failed_run(ask, command, config_file):
    failed = {"flow_runs": {"state": {"type": {"any_": ["FAILED", "CRASHED"]}}}}
    before = ask("/flow_runs/count", failed)
    process = command("build", config_file, "filters.min_side_px=1000")
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "29 of 29 records rejected (too_small 29)" in errors
    assert "Traceback" not in errors
    assert ask("/flow_runs/count", failed) == before + 1


def test_wrong_input_never_reaches_prefect(ask, command, config_file):
    before = ask("/flow_runs/count", {})
    process = command("build", config_file, "source=/nowhere")
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 2
    assert "/nowhere: does not exist" in errors
    assert ask("/flow_runs/count", {}) == before


def test_the_flows_parameters_are_the_fields_of_the_config(ask):
    from pipelines.flows import build_shards

    assert inspect.signature(build_shards.fn).parameters.keys() == BuildConfig.model_fields.keys()
    assert build_shards.name == "build-shards"


def test_the_embedded_api_ends_with_its_process(command, config_file, monkeypatch, tmp_path):
    """Killed in the middle, a build leaves no server behind that would hold the database against the next."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    process = command("build", config_file)
    log = tmp_path / "home" / "embedded-api.log"
    while not log.exists():
        assert process.poll() is None
    holders = []
    while not holders:
        holders = _holding(log, process.pid)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 30
    while _holding(log, process.pid):
        assert time.monotonic() < deadline, "the embedded API outlives its build"
        time.sleep(0.1)


def _holding(path, parent):
    """Other processes that have the file open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            names = [str(descriptor.readlink()) for descriptor in (process / "fd").iterdir()]
        except OSError:
            continue
        if str(path) in names and int(process.name) != parent:
            found.append(int(process.name))
    return found
