"""The build on a Ray cluster of two nodes on this machine, found by address. Slow: starting one takes half a minute."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

pytest.importorskip("prefect_ray", reason="needs pip install .[ray]")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def config_file(work, tmp_path):
    path = tmp_path / "build.yaml"
    build = {"records_per_shard": 5, "processes": 2, "runner": "ray"}
    path.write_text(json.dumps({"source": str(work), "out": str(tmp_path / "out"), "build": build}))
    return path


@pytest.fixture
def cluster():
    """Two Ray nodes of one CPU each in processes of their own: (address for clients, the second node's process)."""
    code = (
        "import sys, time\nfrom ray.cluster_utils import Cluster\n"
        "cluster = Cluster(initialize_head=True, head_node_args={'num_cpus': 1, 'include_dashboard': False, "
        "'ray_client_server_port': 23001})\n"
        "node = cluster.add_node(num_cpus=1)\ncluster.wait_for_nodes()\n"
        "print(node.all_processes['raylet'][0].process.pid, flush=True)\nsys.stdin.read()\ncluster.shutdown()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        yield "ray://127.0.0.1:23001", int(process.stdout.readline())
    finally:
        process.communicate()


def finish(process, timeout_s=180):
    output, errors = process.communicate(timeout=timeout_s)
    assert "Traceback" not in errors, errors
    return process.returncode, output, errors


def wait_for_attempts(out, process, number):
    while len(list((out / ".build").glob("attempts/*/.*.tmp"))) < number:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def test_two_ray_nodes_give_the_bytes_of_the_plain_build_and_one_killed_meanwhile_changes_nothing(
    ask, command, config_file, cluster, work_built, data_files
):
    address, second_node = cluster
    out = config_file.parent / "out"
    code, _, errors = finish(command("build", config_file, f"build.address={address}"))
    assert code == 0, errors
    assert data_files(out) == work_built

    shutil.rmtree(out)
    process = command("build", config_file, f"build.address={address}")
    wait_for_attempts(out, process, 2)
    os.kill(second_node, signal.SIGKILL)
    code, _, errors = finish(process)
    assert code == 0, errors
    assert data_files(out) == work_built


def test_a_build_without_an_address_has_a_cluster_of_its_own_beside_one_that_runs(
    ask, command, config_file, cluster, work_built, data_files
):
    code, _, errors = finish(command("build", config_file))
    assert code == 0, errors
    assert data_files(config_file.parent / "out") == work_built


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_ray_cluster_of_its_own_ends_with_the_build(ask, command, config_file, work_built, data_files, signum):
    out = config_file.parent / "out"
    mark = uuid.uuid4().hex
    process = command("build", config_file, env={**os.environ, "BUILD_OF_THIS_TEST": mark})
    wait_for_attempts(out, process, 1)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == (75 if signum == signal.SIGTERM else -signal.SIGKILL), errors
    deadline = time.monotonic() + 120
    while left := processes_of(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.5)
    code, _, errors = finish(command("build", config_file, "build.runner=processes"))
    assert code == 0, errors
    assert data_files(out) == work_built


def processes_of(build):
    """What a build has started and what that has started, by the mark in their environment; other builds have another."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if build.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:80])
        except OSError:
            continue
    return found
