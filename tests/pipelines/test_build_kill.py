import json
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from kinds import KINDS

from pipelines.run import run_plain
from pipelines.state import read_json


@pytest.fixture(scope="module")
def source(tmp_path_factory, coco, pictures):
    """Enough work for a build of some seconds: pictures that have to be converted."""
    root = tmp_path_factory.mktemp("slow")
    files = {f"{i}.png": pictures.encode(pictures.photo(i, 320, 240, "RGBA"), "PNG") for i in range(48)}
    return coco(root, files)


@pytest.fixture(scope="module")
def reference(source, make_config, data_files, tmp_path_factory):
    """Data files of the undisturbed build, and how long it took."""
    out = tmp_path_factory.mktemp("reference") / "out"
    run_plain(make_config(source, out))
    return data_files(out)


@pytest.fixture
def config_file(source, tmp_path):
    path = tmp_path / "build.yaml"
    build = {"records_per_shard": 8, "processes": 2}
    path.write_text(json.dumps({"source": str(source), "out": str(tmp_path / "out"), "build": build}))
    return path


def kill_until_done(command, config_file, reference, data_files, kills, draws, *arguments):
    out = config_file.parent / "out"
    for _ in range(kills):
        process = command("build", config_file, *arguments)
        began = time.monotonic()
        while not (out / ".build").exists() and time.monotonic() - began < 60:
            time.sleep(0.01)
        time.sleep(draws.uniform(0.1, 1.2))
        process.kill()
        process.communicate()
        for name, data in data_files(out).items():
            assert data == reference[name], f"{name} is half-made after a kill"
    process = command("build", config_file, *arguments)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert data_files(out) == reference
    assert not list(out.rglob(".*.tmp"))


def test_a_build_killed_at_random_moments_ends_with_the_same_bytes(command, config_file, reference, data_files):
    kill_until_done(command, config_file, reference, data_files, 3, random.Random(0), "--plain")


@pytest.mark.parametrize(
    "kind",
    ["parquet_struct", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "parquet_struct")],
)
def test_a_killed_build_of_any_kind_of_source_ends_with_the_same_bytes(
    command, make_config, data_files, pictures, tmp_path, kind
):
    made = [pictures.encode(pictures.photo(i, 320, 240, "RGBA"), "PNG") for i in range(40)]
    values = KINDS[kind](tmp_path, [(i, f"{i}.png", data, [f"number {i}"]) for i, data in enumerate(made)])
    run_plain(make_config(values, tmp_path / "reference"))
    path = tmp_path / "build.yaml"
    content = {"source": values, "out": tmp_path / "out", "build": {"records_per_shard": 8, "processes": 2}}
    path.write_text(json.dumps(content, default=str))
    kill_until_done(command, path, data_files(tmp_path / "reference"), data_files, 2, random.Random(kind), "--plain")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_kills_of_all_kinds_end_with_the_bytes_of_an_undisturbed_build(
    command, coco, pictures, make_config, data_files, monkeypatch, tmp_path
):
    """SIGKILL, SIGTERM and SIGINT to the build, and SIGKILL to its processes; in turns plain and as a flow."""
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    files = {f"{i}.png": pictures.encode(pictures.photo(i, 320, 240, "RGBA"), "PNG") for i in range(240)}
    source, out, config_file = coco(tmp_path / "source", files), tmp_path / "out", tmp_path / "build.yaml"
    run_plain(make_config(source, tmp_path / "reference"))
    reference = data_files(tmp_path / "reference")
    build = {"records_per_shard": 8, "processes": 2}
    config_file.write_text(json.dumps({"source": str(source), "out": str(out), "build": build}))
    draws, kills, codes = random.Random(3), 0, Counter()
    while kills < 100:
        plain = draws.random() < 0.7  # a flow takes seconds to start
        before = run_of(out)
        process = command("build", config_file, *(["--plain"] if plain else []))
        wait_for_work(process, out, before)
        time.sleep(draws.uniform(0, 0.6))
        how = draws.choice(["process", signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        if how == "process":
            for pid in build_processes(out):
                _kill(pid)
            time.sleep(draws.uniform(0, 0.6))
        process.send_signal(signal.SIGKILL if how == "process" else how)
        _, errors = process.communicate(timeout=200)
        codes[process.returncode] += 1
        kills += process.returncode != 0
        assert "Traceback" not in errors, errors
        for name, data in data_files(out).items():
            assert data == reference[name], f"{name} is half-made after kill {kills}"
        if process.returncode == 0:  # it was faster, or there was nothing left to do
            assert data_files(out) == reference
            shutil.rmtree(out)
    print(dict(codes))
    goes_on(command, config_file)
    assert data_files(out) == reference
    assert not list(out.rglob(".*.tmp"))
    assert not build_processes(out)


def run_of(out):
    """Which build holds the folder, or held it when it was killed."""
    with suppress(FileNotFoundError):
        return (out / ".build" / "run").read_text()
    return None


def wait_for_work(process, out, before):
    """Until a build that is not ``before`` writes a shard, or has ended."""
    while process.poll() is None and (run_of(out) in (None, before) or not list(out.glob(".*.tar.tmp"))):
        time.sleep(0.005)


def build_processes(out):
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"pipelines.workers\0{out}/" in (process / "cmdline").read_bytes().decode(errors="replace"):
                found.append(int(process.name))
    return found


def test_shards_that_are_finished_survive_a_kill_untouched(command, config_file, reference, data_files):
    """Five shards and more; SIGKILL while one is being written after two were finished."""
    out = config_file.parent / "out"
    process = command("build", config_file, "--plain", "build.processes=1")
    while len(finished := list((out / ".build" / "results").glob("*.json"))) < 2 or not list(out.glob(".*.tar.tmp")):
        assert process.poll() is None
        time.sleep(0.001)
    process.kill()
    process.communicate()
    shards = [out / f"{result.stem}.tar" for result in finished]
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in shards}
    assert {path.name: data for path, (data, _) in before.items()}.items() <= reference.items()
    assert {p.name for p in out.glob("*.tar")} <= reference.keys()
    goes_on(command, config_file)
    assert data_files(out) == reference  # the manifest too
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in shards} == before


def goes_on(command, config_file):
    process = command("build", config_file, "--plain")
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_build_and_the_same_command_goes_on(command, config_file, reference, data_files, signum):
    out = config_file.parent / "out"
    for _ in range(5):  # on a busy machine a build can end before the signal reaches it: then that try shows nothing
        shutil.rmtree(out, ignore_errors=True)
        process = command("build", config_file, "--plain")
        while not list((out / ".build" / "slices").glob("*.json")):
            time.sleep(0.005)
        process.send_signal(signum)
        _, errors = process.communicate(timeout=200)
        if process.returncode != 0:
            break
    assert process.returncode == 75, errors
    assert "the build was stopped; finished shards are kept, the same command goes on from there" in errors
    assert "Traceback" not in errors
    assert not list(out.rglob(".*.tmp"))
    goes_on(command, config_file)
    assert data_files(out) == reference


def kill_build_processes(process, out):
    """SIGKILL to the processes that are at a shard."""
    while not list((out / ".build" / "slices").glob("*.json")):
        time.sleep(0.01)
    workers = []
    while not workers:
        workers = _children(process.pid)
    for pid in workers:
        _kill(pid)


def test_the_shard_of_a_killed_build_process_is_tried_again(command, config_file, reference, data_files):
    out = config_file.parent / "out"
    process = command("build", config_file, "--plain")
    kill_build_processes(process, out)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    killed = r"a build process was killed by signal 9 \(the kernel does that when memory runs out\)"
    assert re.search(rf"^train-00000\d: {killed}; trying again \(1 of 2\)$", errors, re.MULTILINE), errors
    assert data_files(out) == reference


def test_without_retries_a_killed_build_process_is_an_error_that_names_the_signal(
    command, config_file, reference, data_files
):
    out = config_file.parent / "out"
    process = command("build", config_file, "--plain", "build.retries=0")
    kill_build_processes(process, out)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "a build process was killed by signal 9 (the kernel does that when memory runs out); run the" in errors
    goes_on(command, config_file)
    assert data_files(out) == reference
    assert read_json(out / ".build" / "settings.json")


def _children(pid):
    """Processes that any thread of ``pid`` has started."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has ended
            found += map(int, (task / "children").read_text().split())
    return found


def _kill(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
