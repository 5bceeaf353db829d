"""What may happen to a build at work: it says so, and a rerun ends with the bytes of an undisturbed build."""

import json
import shutil
import sys
import time
from pathlib import Path

import owndisk
import pytest

from pipelines.build import Build
from pipelines.errors import BuildError
from pipelines.images import FolderImages
from pipelines.run import run_plain
from shards.manifest import Manifest

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pictures_that_take_time(tmp_path_factory, coco, pictures):
    """20 pictures that have to be converted; do not change."""
    files = {f"{i}.png": pictures.encode(pictures.photo(i, 400, 300, "RGBA"), "PNG") for i in range(20)}
    return coco(tmp_path_factory.mktemp("slow"), files)


SETTINGS = {"records_per_shard": 4, "processes": 1}


@pytest.fixture(scope="module")
def reference(pictures_that_take_time, make_config, data_files, tmp_path_factory):
    """The data files of the undisturbed build: five shards."""
    out = tmp_path_factory.mktemp("reference") / "out"
    run_plain(make_config(pictures_that_take_time, out, build=SETTINGS))
    return data_files(out)


@pytest.fixture
def source(pictures_that_take_time, tmp_path):
    return shutil.copytree(pictures_that_take_time, tmp_path / "source")


@pytest.fixture
def build(source, tmp_path, command):
    """Start the command, its out, and a function that runs it to its end and returns code and errors."""
    path, out = tmp_path / "build.yaml", tmp_path / "out"
    path.write_text(json.dumps({"source": str(source), "out": str(out), "build": SETTINGS}))

    def finish():
        process = command("build", path, "--plain")
        _, errors = process.communicate(timeout=200)
        return process.returncode, errors

    return lambda: command("build", path, "--plain"), out, finish


def wait_for(path, process):
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)


def test_a_kill_while_the_third_of_five_shards_is_written_keeps_the_first_two(build, reference, data_files):
    start, out, finish = build
    process = start()
    wait_for(out / ".train-000002.tar.tmp", process)
    process.kill()
    process.communicate()
    finished = {path.stem for path in (out / ".build" / "results").glob("train-*.json")}
    # the third may be finished where this test came late; of one that is not, files may be there, named before its result
    assert {"train-000000", "train-000001"} <= finished < {f"train-00000{i}" for i in range(5)}
    found = {name: data for name, data in data_files(out).items() if name.startswith(tuple(finished))}
    assert {name: reference[name] for name in found} == found
    written = {name: (out / name).stat().st_mtime_ns for name in found}
    code, errors = finish()
    assert code == 0, errors
    assert {name: (out / name).stat().st_mtime_ns for name in found} == written
    assert len(Manifest.load(out).shards) == 5
    assert data_files(out) == reference
    assert not list(out.rglob(".*.tmp"))


def test_a_source_folder_that_vanishes_rejects_no_picture(build, source, reference, data_files):
    start, out, finish = build
    process = start()
    wait_for(out / "train-000000.tar", process)
    (source / "train2017").rename(source / "elsewhere")
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "was there when the build began and is not any more (missing_file: no such file among the images)" in errors
    assert "finished shards are kept" in errors
    assert "Traceback" not in errors
    assert not (out / "manifest.json").exists()
    assert finish()[0] == 2  # and without it nothing begins
    (source / "elsewhere").rename(source / "train2017")
    code, errors = finish()
    assert code == 0, errors
    assert data_files(out) == reference


def test_what_vanishes_while_it_is_listed_or_hashed_is_no_rejection(source, make_config, tmp_path):
    folder = source / "train2017"
    images = FolderImages(folder)
    build = Build(make_config(source, tmp_path / "out", build=SETTINGS))
    ask = build._hash_files

    def hash_files(requests, spool):
        (folder / "3.png").unlink()
        yield from ask(requests, spool)

    build._hash_files = hash_files
    with build, pytest.raises(BuildError, match=r"3\.png: was there when the build began and is not any more"):
        build.plan()
    folder.rename(source / "elsewhere")
    with pytest.raises(
        BuildError, match="train2017: the folder of images is gone; bring it back and run the build again"
    ):
        images.stamp("1.png")


def test_an_image_that_changes_and_is_brought_back(build, source, reference, data_files):
    start, out, finish = build
    kept = {path: path.read_bytes() for path in (source / "train2017").iterdir()}
    process = start()
    wait_for(out / "train-000000.tar", process)
    for path in kept:
        path.write_bytes(b"overwritten")
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "the file changed after the build had begun; run the build again once it is settled" in errors
    assert "Traceback" not in errors
    for path, data in kept.items():
        path.write_bytes(data)
    code, errors = finish()
    assert code == 0, errors
    assert data_files(out) == reference


def test_a_disk_that_is_full_and_has_room_again(pictures_that_take_time, reference, tmp_path):
    """A real one: a file system in memory of a name space of its own, first small, then larger."""
    disk, result, path = tmp_path / "disk", tmp_path / "result", tmp_path / "build.yaml"
    for folder in (disk, result):
        folder.mkdir()
    path.write_text(json.dumps({"source": str(pictures_that_take_time), "out": str(disk / "out"), "build": SETTINGS}))
    size = sum(map(len, reference.values())) // 2
    build = f"{sys.executable} -m pipelines build {path} --plain"
    script = (
        f"{build} 2> {result}/errors; echo $? > {result}/code\n"
        f"ls {disk}/out > {result}/names\n"
        f"{owndisk.resize(disk, str(8 * size))}\n"
        f"{build} && cp {disk}/out/*.* {result}\n"
    )
    done = owndisk.run(disk, str(size), script)
    assert done.returncode == 0, done.stderr
    errors = (result / "errors").read_text()
    assert (result / "code").read_text().strip() == "1"
    assert "No space left on device; free some space and run it again" in errors
    assert "finished shards are kept" in errors
    assert "Traceback" not in errors
    assert "manifest.json" not in (result / "names").read_text()
    assert {name: (result / name).read_bytes() for name in reference} == reference
