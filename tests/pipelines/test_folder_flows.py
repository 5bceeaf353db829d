"""The flows around a build, each in a process of its own, on the embedded API of all tests."""

import functools
import hashlib
import http.server
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]


def flow(name, **parameters):
    """Run a flow; the exit code and all that was said."""
    code = f"from pipelines.folder_flows import {name}\n{name}(**{parameters!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT, timeout=120)
    return done.returncode, done.stdout + done.stderr


def last_run(ask):
    return ask("/flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 1})[0]


def task_states(ask, run, expected):
    """State of each task run by its name; the server writes them in its own time."""
    deadline = time.monotonic() + 30
    while True:
        runs = ask("/task_runs/filter", {"flow_runs": {"id": {"any_": [run["id"]]}}})
        states = {task["name"]: task["state_type"] for task in runs}
        if states == expected or time.monotonic() > deadline:
            return states
        time.sleep(0.2)


def artifact(ask, run, key):
    question = {"artifacts": {"flow_run_id": {"any_": [run["id"]]}, "key": {"any_": [key]}}}
    return ask("/artifacts/filter", question)[0]["data"]


def test_verify_shards_is_a_task_for_each_shard(ask, drawn_shards):
    code, said = flow("verify_shards", folder=str(drawn_shards))
    assert code == 0, said
    run = last_run(ask)
    assert run["state_type"] == "COMPLETED"
    names = ["train-000000.tar", "train-000001.tar", "train-000002.tar", "val-000000.tar", "manifest and keys"]
    expected = dict.fromkeys(names, "COMPLETED")
    assert task_states(ask, run, expected) == expected
    assert "every byte as the manifest says" in artifact(ask, run, "verify-report")


def test_findings_fail_the_shards_task_and_the_run_and_stand_on_its_page(ask, drawn_shards, tmp_path):
    folder = shutil.copytree(drawn_shards, tmp_path / "shards")
    with (folder / "train-000001.tar").open("r+b") as file:
        file.seek(800)
        file.write(b"\0\0\0\0")
    code, said = flow("verify_shards", folder=str(folder))
    assert code == 1
    assert f"{folder}: 112 samples in 4 shards: 2 findings, the first: train-000001.tar: sha256 is " in said
    run = last_run(ask)
    assert run["state_type"] == "FAILED"
    names = ["train-000000.tar", "train-000002.tar", "val-000000.tar", "manifest and keys"]
    expected = {**dict.fromkeys(names, "COMPLETED"), "train-000001.tar": "FAILED"}
    assert task_states(ask, run, expected) == expected
    table = artifact(ask, run, "verify-report")
    assert "| train-000001.tar | 000000000040 | crc32 of 000000000040.png is " in table


@pytest.fixture
def server(tmp_path):
    """URL of a folder."""
    (tmp_path / "served").mkdir()
    handler = functools.partial(QuietHandler, directory=str(tmp_path / "served"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


def test_download_coco_fetches_what_it_can_and_names_what_it_cannot(ask, server, tmp_path):
    (tmp_path / "served" / "a.bin").write_bytes(b"a" * 5000)
    (tmp_path / "served" / "b.bin").write_bytes(b"b" * 5000)
    good = {"url": f"{server}/a.bin", "sha256": hashlib.sha256(b"a" * 5000).hexdigest()}
    bad = {"url": f"{server}/b.bin", "sha256": "0" * 64}
    code, said = flow("download_coco", out=str(tmp_path / "out"), dataset="none", files=[bad, good])
    assert code == 1
    assert "b.bin: what" in said
    assert "is not the file: its sha256 is" in said
    run = last_run(ask)
    assert run["state_type"] == "FAILED"
    expected = {"plan": "COMPLETED", "a.bin": "COMPLETED", "b.bin": "FAILED"}
    assert task_states(ask, run, expected) == expected
    assert (tmp_path / "out" / "a.bin").stat().st_size == 5000
    code, said = flow("download_coco", out=str(tmp_path / "out"), dataset="none", files=[good])
    assert code == 0, said
    assert "| a.bin | was there |" in artifact(ask, last_run(ask), "download")


@pytest.mark.parametrize("name", ["download_coco", "verify_shards"])
def test_every_parameter_of_the_form_is_described(ask, name):
    from pipelines import folder_flows

    for parameter, schema in getattr(folder_flows, name).parameters.properties.items():
        assert schema["description"], parameter
