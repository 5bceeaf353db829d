"""The build on Dask clusters of two workers in processes of their own, found by address; on Ray in test_ray.py."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from pipelines import remote
from pipelines.build import Build
from pipelines.cluster import require_reachable_api
from pipelines.config import RunConfig
from pipelines.errors import BuildError
from shards.errors import ConfigError

pytest.importorskip("prefect_dask", reason="needs pip install .[dask]")


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory):
    """Address of a Dask scheduler."""
    log = tmp_path_factory.mktemp("dask") / "scheduler.log"
    with log.open("w") as file:
        process = dask("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", stdout=file, stderr=file)
    try:
        yield wait_for_line(log, "Scheduler at:", process).split()[-1]
    finally:
        end(process)


@pytest.fixture
def workers(scheduler, tmp_path):
    """Two Dask workers with one thread each, somewhere else."""
    logs = [tmp_path / f"worker{i}.log" for i in range(2)]
    started = []
    try:
        for log in logs:
            with log.open("w") as file:
                flags = ["--no-nanny", "--nthreads", "1", "--no-dashboard", "--local-directory", str(tmp_path)]
                started.append(dask("worker", scheduler, *flags, cwd=tmp_path, stdout=file, stderr=file))
        for log, process in zip(logs, started, strict=True):
            wait_for_line(log, "Registered to:", process)
        yield started
    finally:
        for process in started:
            end(process)


def dask(*arguments, **options):
    return subprocess.Popen([sys.executable, "-m", "dask", *arguments], **options)


def end(process):
    process.kill()
    process.wait()


def wait_for_line(log, text, process):
    while True:
        for line in log.read_text().splitlines():
            if text in line:
                return line
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)


@pytest.fixture
def config_file(work, tmp_path):
    path = tmp_path / "build.yaml"
    build = {"records_per_shard": 5, "processes": 1, "runner": "dask"}
    path.write_text(json.dumps({"source": str(work), "out": str(tmp_path / "out"), "build": build}))
    return path


def test_a_dask_cluster_gives_the_bytes_of_the_plain_build(
    ask, command, config_file, scheduler, workers, work_built, data_files
):
    process = command("build", config_file, f"build.address={scheduler}")
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert data_files(config_file.parent / "out") == work_built
    run = ask("/flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 1})[0]
    assert run["state_type"] == "COMPLETED"
    assert not list((config_file.parent / "out" / ".build" / "slices").iterdir())


def test_the_shard_of_a_killed_dask_worker_is_built_by_the_other_one(
    ask, command, config_file, scheduler, workers, work_built, data_files
):
    out = config_file.parent / "out"
    process = command("build", config_file, f"build.address={scheduler}")
    wait_for_attempts(out, process, 2)
    workers[0].kill()
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert data_files(out) == work_built
    assert not (out / ".build" / "attempts").exists()


def test_a_stopped_build_on_a_cluster_goes_on_without_one(
    ask, command, config_file, scheduler, workers, work_built, data_files
):
    out = config_file.parent / "out"
    process = command("build", config_file, f"build.address={scheduler}")
    wait_for_attempts(out, process, 1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 75, errors
    assert "Traceback" not in errors
    process = command("build", config_file, "build.runner=processes")
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert data_files(out) == work_built


@pytest.mark.slow
def test_a_scheduler_that_dies_is_an_error_in_words(ask, command, config_file, tmp_path, work_built, data_files):
    log = tmp_path / "scheduler.log"
    with log.open("w") as file:
        scheduler = dask("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", stdout=file, stderr=file)
    address = wait_for_line(log, "Scheduler at:", scheduler).split()[-1]
    worker = dask("worker", address, "--no-nanny", "--nthreads", "1", "--no-dashboard", cwd=tmp_path)
    try:
        process = command("build", config_file, f"build.address={address}")
        wait_for_attempts(config_file.parent / "out", process, 1)
        end(scheduler)
        _, errors = process.communicate(timeout=200)
    finally:
        end(scheduler)
        end(worker)
    assert process.returncode == 1
    assert re.search(r"error: the dask cluster lost the work \(.*\); see that its workers live", errors), errors
    process = command("build", config_file, "build.runner=threads")
    process.communicate(timeout=200)
    assert data_files(config_file.parent / "out") == work_built


@pytest.mark.slow
def test_a_scheduler_without_workers_is_an_error(ask, command, config_file, scheduler):
    process = command("build", config_file, f"build.address={scheduler}")
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 1
    assert f"the Dask scheduler at {scheduler} has no workers, 60 s were waited; start some with" in errors


def wait_for_attempts(out, process, number):
    """Wait until that many workers are at a shard."""
    while len(list((out / ".build").glob("attempts/*"))) < number:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def test_a_scheduler_that_does_not_answer_is_an_error_before_any_shard(ask, command, config_file):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    began = time.monotonic()
    process = command("build", config_file, f"build.address={address}")
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 2
    assert f"build.address is {address}, but nothing answers there (Connection refused); start that cluster" in errors
    assert "Traceback" not in errors
    assert time.monotonic() - began < 30


def test_plain_builds_refuse_a_cluster(command, config_file):
    process = command("build", config_file, "--plain")
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 2
    assert "build.runner is dask, which runs through Prefect; leave out --plain" in errors


def test_an_address_without_a_cluster_is_refused():
    with pytest.raises(ValueError, match="address is 'tcp://a:1', runner is processes; give runner=dask or runner=ray"):
        RunConfig(address="tcp://a:1")


def test_workers_elsewhere_need_an_api_that_they_can_reach():
    config = RunConfig(runner="dask", address="tcp://big-machine:8786")
    with pytest.raises(ConfigError, match="can only be reached from this machine; start a server that they can reach"):
        require_reachable_api(config, "http://127.0.0.1:4200/api")
    require_reachable_api(config, "http://head:4200/api")
    require_reachable_api(RunConfig(runner="dask", address="tcp://localhost:8786"), "http://127.0.0.1:4200/api")


@pytest.mark.parametrize("address", ["tcp://host", "host:none", "", "tcp://:8786"])
def test_an_address_without_host_and_port_is_refused(address):
    with pytest.raises(ConfigError, match="expected one such as tcp://HOST:8786 or ray://HOST:10001"):
        require_reachable_api(RunConfig(runner="ray", address=address), "http://127.0.0.1:4200/api")


def built_elsewhere(job, name, **changes):
    arguments = {"order": str(job.write_order(name)), "run": job.lock.run, "expected": remote.versions(), **changes}
    return remote.build_shard(name, **arguments)


@pytest.fixture
def job(photos, make_config, tmp_path):
    copy = shutil.copytree(photos, tmp_path / "photos")
    with Build(make_config(copy, tmp_path / "out")) as job:
        yield job


def test_a_worker_that_cannot_see_the_shard_folder_names_itself_and_the_path(job, tmp_path):
    name = job.plan()[0]
    order = tmp_path / "elsewhere" / ".build" / "slices" / f"{name}.json"
    with pytest.raises(
        BuildError, match=f"on {socket.gethostname()}: {order} cannot be seen there; every worker must see"
    ):
        built_elsewhere(job, name, order=str(order))


def test_a_worker_that_cannot_see_the_source_names_itself_and_the_path(job, tmp_path):
    name = job.plan()[0]
    (tmp_path / "photos" / "train2017").rename(tmp_path / "away")
    with pytest.raises(ConfigError, match=f"on {socket.gethostname()}: .*/photos/train2017: .*; every worker must see"):
        built_elsewhere(job, name)


def test_a_worker_with_other_versions_is_refused(job):
    name = job.plan()[0]
    expected = {**remote.versions(), "pillow": "1.0"}
    with pytest.raises(BuildError, match=rf"on {socket.gethostname()}: has pillow \S+ \(here 1.0\); other versions"):
        built_elsewhere(job, name, expected=expected)


def test_two_workers_at_the_same_shard_leave_it_whole(job, data_files, tmp_path):
    """As when a cluster gives a worker up that is still alive."""
    name = job.plan()[0]
    built_elsewhere(job, name)
    first = data_files(tmp_path / "out")
    built_elsewhere(job, name)
    assert data_files(tmp_path / "out") == first
    assert job.state.finished(job.planned.slices[0])


def test_a_worker_of_an_older_build_stops(job):
    name = job.plan()[0]
    with pytest.raises(BuildError, match="another build took this folder over while this one was at work"):
        built_elsewhere(job, name, run="older")
    assert not list(job.state.attempts.iterdir())
