"""The flows through ``serve``: a Prefect server, a process worker and the deployments of prefect.yaml. Minutes long."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from pipelines import prefect_api
from pipelines.config import RunConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PROJECT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120


class Server:
    """A running ``serve``, asked as its users ask it."""

    def __init__(self, url, home):
        self.environment = {**os.environ, "PREFECT_API_URL": url, "PREFECT_HOME": str(home)}
        self.url = url

    def prefect(self, *arguments):
        command = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
        done = subprocess.run(command, cwd=PROJECT, env=self.environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def ask(self, path, question=None):
        body = None if question is None else json.dumps(question).encode()
        request = urllib.request.Request(f"{self.url}{path}", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)

    def run(self, deployment, **parameters):
        """Start a run; its id."""
        flags = [text for name, value in parameters.items() for text in ("-p", f"{name}={json.dumps(value)}")]
        said = self.prefect("deployment", "run", deployment, *flags)
        return next(word.rpartition("/")[2] for word in said.split() if "/runs/flow-run/" in word)

    def messages(self, run):
        """What the run's log says so far."""
        return [log["message"] for log in self.ask("/logs/filter", {"logs": {"flow_run_id": {"any_": [run]}}})]

    def state(self, run):
        return self.ask(f"/flow_runs/{run}")["state_type"]

    def ended(self, run):
        """State of a run once it does not change any more."""
        deadline = time.monotonic() + PATIENCE_S
        while (state := self.state(run)) in ("SCHEDULED", "PENDING", "RUNNING", "CANCELLING"):
            assert time.monotonic() < deadline, state
            time.sleep(0.3)
        return state


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = home / "serve.log"
    environment = {**os.environ, **prefect_api.ENVIRONMENT, "PREFECT_HOME": str(home)}
    with log.open("w") as file:
        command = [sys.executable, "-m", "pipelines", "serve", "--port", str(port)]
        process = subprocess.Popen(command, cwd=PROJECT, stdout=file, stderr=file, env=environment)
    try:
        while "Ready" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.5)
        yield Server(f"http://127.0.0.1:{port}/api", home)
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 0
    records = re.split(r"^(?=\d\d:\d\d:\d\d\.\d+ \|)", log.read_text(), flags=re.MULTILINE)
    # Prefect's own: SQLite refuses a heartbeat that read before another one wrote; the next one comes 30 s later.
    records = [r for r in records if "Worker channel heartbeat persistence failed" not in r]
    assert "database is locked" not in "".join(records)


def test_every_flow_is_deployed_with_described_parameters(server):
    found = {d["name"]: d for d in server.ask("/deployments/filter", {}) if d["work_pool_name"] == "xctrain"}
    assert list(found) == ["coco"]
    flows = {flow["name"] for flow in server.ask("/flows/filter", {})}
    assert {"build-shards", "add-shards", "verify-shards", "download-coco"} <= flows
    for deployment in server.ask("/deployments/filter", {}):
        schema = deployment["parameter_openapi_schema"]
        assert schema["properties"]
        for name, parameter in schema["properties"].items():
            assert parameter["description"], name
        for name, model in schema.get("definitions", {}).items():
            for field, about in model["properties"].items():
                assert about.get("description"), f"{name}.{field}"


def test_what_a_mapping_leaves_out_is_as_the_deployment_has_it(server, photos, tmp_path):
    build = {"processes": 1 + len(os.sched_getaffinity(0))}
    run = server.run("build-shards/coco", source=str(photos), out=str(tmp_path / "out"), build=build)
    assert server.ended(run) == "COMPLETED"
    settings = json.loads((tmp_path / "out" / "manifest.json").read_bytes())["settings"]
    assert settings["build"]["records_per_shard"] == 256
    deadline = time.monotonic() + PATIENCE_S
    said = {"as in the deployment: build.records_per_shard=256", RunConfig(**build).note}
    while not said <= set(server.messages(run)):  # a log may come later
        assert time.monotonic() < deadline, server.messages(run)
        time.sleep(0.5)


@pytest.mark.parametrize(
    ("how", "state"), [(signal.SIGTERM, "CRASHED"), (signal.SIGKILL, "CRASHED"), (None, "CANCELLED")]
)
def test_a_run_that_is_stopped_is_marked_and_gives_back_its_turn_folder_and_processes(
    server, work, work_built, data_files, tmp_path, how, state
):
    out = tmp_path / "out"
    build = {"records_per_shard": 5, "processes": 2}
    run = server.run("build-shards/coco", source=str(work), out=str(out), build=build)
    deadline = time.monotonic() + PATIENCE_S
    while not (pids := processes("pipelines.workers", str(out))):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if how is None:
        server.ask(f"/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
    else:
        parents = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids}
        os.kill(parents.pop(), how)
    assert server.ended(run) == state
    deadline = time.monotonic() + PATIENCE_S
    while processes("pipelines.workers", str(out)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run = server.run("build-shards/coco", source=str(work), out=str(out), build=build)
    assert server.ended(run) == "COMPLETED"
    assert data_files(out) == work_built


def processes(*words):
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if all(word in line for word in words):
            found.append(int(process.name))
    return found


def test_builds_wait_for_their_turn(server, work, tmp_path):
    build = {"records_per_shard": 5, "processes": 1}
    runs = [server.run("build-shards/coco", source=str(work), out=str(tmp_path / name), build=build) for name in "ab"]
    together = False
    while not all(server.state(run) == "COMPLETED" for run in runs):
        together |= all(server.state(run) == "RUNNING" for run in runs)
        time.sleep(0.2)
    assert not together


def test_the_deployments_for_containers_fit_their_work_pools(server):
    for kind in ("docker", "kubernetes"):
        server.prefect("work-pool", "create", "--type", kind, "--overwrite", f"xctrain-{kind}")
    server.prefect("deploy", "--prefect-file", "configs/prefect-docker.yaml", "--all")
    for kind in ("docker", "kubernetes"):
        pool = server.ask(f"/work_pools/xctrain-{kind}")
        known = pool["base_job_template"]["variables"]["properties"]
        for flow in ("build-shards", "verify-shards"):
            deployment = server.ask(f"/deployments/name/{flow}/{kind}")
            assert deployment["work_pool_name"] == f"xctrain-{kind}"
            assert deployment["job_variables"]["image"] == "xctrain:latest"
            assert deployment["job_variables"].keys() <= known.keys()
            assert deployment["pull_steps"]
