"""What only larger builds and a lasting server show: minutes, so all of it is slow."""

import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from PIL import Image

pytestmark = pytest.mark.slow
PROJECT = Path(__file__).resolve().parents[2]


def tiny(number):
    image = Image.new("RGB", (24, 24), (number % 251, number % 241, number % 239))
    image.putpixel((3, 3), (255, 0, 0))
    image.putpixel((4, 4), (number % 256, number // 256, 7))
    return image


@pytest.fixture(scope="module")
def five_thousand(tmp_path_factory, coco, pictures):
    root = tmp_path_factory.mktemp("many")
    return coco(root, {f"{i}.png": pictures.encode(tiny(i), "PNG") for i in range(5000)})


@pytest.fixture
def prefect_home(tmp_path, monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_5000_pictures_without_a_server(five_thousand, command, prefect_home, tmp_path):
    path = tmp_path / "build.yaml"
    build = {"records_per_shard": 50}
    path.write_text(json.dumps({"source": str(five_thousand), "out": str(tmp_path / "out"), "build": build}))
    process = command("build", path)
    output, errors = process.communicate(timeout=250)
    assert process.returncode == 0, errors
    said = output + errors + (prefect_home / "embedded-api.log").read_text()
    assert "locked" not in said
    assert "Traceback" not in said
    database = sqlite3.connect(prefect_home / "prefect.db")
    states = dict(database.execute("select state_type, count(*) from task_run group by 1"))
    database.close()
    assert states == {"COMPLETED": 100 + 2}

    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*") if p.is_file()}
    began = time.monotonic()
    process = command("build", path)
    output, _ = process.communicate(timeout=200)
    assert "nothing has changed" in output
    assert time.monotonic() - began < 30
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*") if p.is_file()} == before


def peak_mb(source, out, num_shards):
    """Peak resident memory of the process that the flow runs in, in MB."""
    code = (
        "import resource, sys\nfrom pipelines.run import run_with_prefect\nfrom pipelines.config import BuildConfig\n"
        f"run_with_prefect(BuildConfig.model_validate({{'source': {str(source)!r}, 'out': {str(out)!r}, "
        f"'build': {{'records_per_shard': {5000 // num_shards}}}}}))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PROJECT)
    assert "locked" not in done.stdout + done.stderr
    return float(done.stdout.split()[-1])


def test_memory_does_not_grow_with_the_number_of_shards(five_thousand, prefect_home, tmp_path):
    few, many = (peak_mb(five_thousand, tmp_path / str(n), n) for n in (5, 50))
    assert many < 1.2 * few


def test_serve_runs_the_deployment_and_ends_with_everything(photos, command, prefect_home, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
    with (tmp_path / "serve.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "pipelines", "serve", "--port", str(port)], cwd=PROJECT, stdout=log, stderr=log
        )
    try:
        while "Ready" not in (tmp_path / "serve.log").read_text():
            assert server.poll() is None, (tmp_path / "serve.log").read_text()
            time.sleep(0.5)
        run = f"{sys.executable} -m prefect deployment run build-shards/coco --watch"
        done = subprocess.run(
            [*run.split(), "-p", f"source={photos}", "-p", f"out={tmp_path / 'out'}"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert re.search(r"Flow run finished successfully", done.stdout), done.stdout + done.stderr
        assert (tmp_path / "out" / "manifest.json").exists()
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=60) == 0
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(environment["PREFECT_API_URL"] + "/health", timeout=5)
