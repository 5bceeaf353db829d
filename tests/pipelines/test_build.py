"""What a build writes, and what it refuses before it writes anything."""

import json
import subprocess
import sys
import tarfile
from itertools import pairwise
from pathlib import Path

import pytest
from builds import copied

from pipelines.build import Build
from pipelines.errors import BuildError
from pipelines.run import run_plain
from shards.errors import ConfigError
from shards.manifest import Manifest
from shards.reader import SplitReader
from shards.verify import verify


def test_a_build_is_a_dataset_with_both_splits(built):
    assert Manifest.load(built).splits == {"train": 24, "val": 5}
    assert verify(built) == []
    assert (built / "report.html").exists()
    assert not list(built.rglob(".*.tmp"))
    assert list((built / ".build" / "slices").iterdir()) == []


def test_a_sample_holds_the_original_bytes_and_where_they_came_from(built, photos):
    reader = SplitReader(built, "train")
    sample = reader.read(0)
    original = (photos / "train2017" / sample.meta["file_name"]).read_bytes()
    assert sample.image == original
    assert sample.key == f"{sample.meta['image_id']:012d}"
    assert sample.captions == tuple(f"picture {sample.meta['image_id']} seen {x}" for x in ("once", "twice"))
    assert sample.meta["source"]["kind"] == "coco"


def test_neighbours_in_a_shard_are_unrelated(built):
    ids = list(map(int, SplitReader(built, "train").keys()))
    assert sorted(ids) == list(range(1, 25))
    assert sum(abs(a - b) == 1 for a, b in pairwise(ids)) < 6


@pytest.mark.parametrize("processes", [2, 4])
def test_the_number_of_processes_changes_nothing(built, photos, make_config, data_files, tmp_path, processes):
    run_plain(make_config(photos, tmp_path / "out", build={"processes": processes}))
    assert data_files(tmp_path / "out") == data_files(built)


@pytest.mark.parametrize("top", ["", "train2017/"])
def test_a_zip_gives_the_bytes_of_the_folder(built, photos, make_config, data_files, zipped, tmp_path, top):
    archive = zipped(photos / "train2017", tmp_path / "train.zip", top)
    source = {"annotations": photos / "annotations" / "captions_train2017.json", "images": archive}
    run_plain(make_config(source, tmp_path / "out", held_out={"root": photos}))
    assert data_files(tmp_path / "out") == data_files(built)


def test_another_seed_gives_another_order(built, photos, make_config, tmp_path):
    run_plain(make_config(photos, tmp_path / "out", build={"seed": 1}))
    keys = [tuple(SplitReader(out, "train").keys()) for out in (tmp_path / "out", built)]
    assert keys[0] != keys[1]
    assert sorted(keys[0]) == sorted(keys[1])


def test_a_place_that_cannot_be_written_is_said_before_anything_starts(photos, make_config, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / ".build").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for out, message in (
        (tmp_path / "file" / "deep" / "out", "out is .*deep/out, but .*file is a file, expected a folder"),
        (tmp_path / "odd", "out/.build is .*.build, which is a file, expected a folder"),
        (Path("/proc/xctrain"), r"out is /proc/xctrain, where nothing can be written \(No such file or directory\)"),
        (tmp_path / "link", "out is .*link, which is a link to .*gone, which does not exist; choose another"),
    ):
        with pytest.raises(ConfigError, match=message):
            Build(make_config(photos, out))


def test_a_staging_folder_that_cannot_be_is_named_before_the_store_is_asked(photos, make_config):
    config = make_config(photos, "s3://nowhere/shards", build={"staging": "/proc/xctrain"})
    with pytest.raises(ConfigError, match=r"build.staging is /proc/xctrain, where nothing can be written"):
        Build(config)


def test_a_source_that_may_not_be_read_is_wrong_input(photos, make_config, tmp_path, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    source, out = copied(photos, tmp_path)
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(ConfigError, match=r"train2017: Permission denied; give this user the right to it"):
        Build(make_config(source, out))


def test_half_a_character_pair_anywhere_crashes_nothing(coco, make_config, pictures, rejects, tmp_path):
    names = [f"{i}.jpg" for i in range(4)]
    captions = {"0.jpg": ["a \ud83d dog"]}
    source = coco(tmp_path / "source", {n: pictures.encode(pictures.photo(i)) for i, n in enumerate(names)}, captions)
    path = source / "annotations" / "captions_train2017.json"
    path.write_text(path.read_text().replace("3.jpg", "\\ud83d.jpg"))
    run_plain(make_config(source, tmp_path / "out"))
    assert rejects(tmp_path / "out") == {"\ud83d.jpg": "missing_file"}
    assert "\\ud83d.jpg" in (tmp_path / "out" / "report.html").read_text()


def test_a_wrong_images_folder_is_refused_before_anything_is_written(photos, make_config, tmp_path):
    source = {"annotations": photos / "annotations" / "captions_train2017.json", "images": photos / "val2017"}
    with pytest.raises(ConfigError, match=r"not one image of .* \(24\) is in it, for example '000000000001.jpg'"):
        run_plain(make_config(source, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_two_builds_do_not_share_a_folder(photos, make_config, tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.folder_lock.PATIENCE_S", 0)
    config = make_config(photos, tmp_path / "out")
    with Build(config), pytest.raises(BuildError, match="another build is at work in this folder"), Build(config):
        pass


def test_a_file_that_changes_under_the_build_is_named(photos, make_config, pictures, tmp_path):
    source, out = copied(photos, tmp_path)
    with Build(make_config(source, out)) as job:
        names = job.plan()
        for path in (source / "train2017").iterdir():
            path.write_bytes(pictures.encode(pictures.photo(77)))
        with pytest.raises(BuildError, match=r"\d+.jpg: the file changed after the build had begun"):
            job.build_shard(names[0])


def test_a_full_disk_is_said_in_one_line(photos, command, tmp_path):
    import resource

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, 16_000))

    config = tmp_path / "build.yaml"
    config.write_text(json.dumps({"source": str(photos), "out": str(tmp_path / "out"), "build": {"processes": 1}}))
    process = command("build", config, "--plain", preexec_fn=small_files)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "train-000000.tar" in errors.splitlines()[-1]
    assert "File too large; free some space, or raise the limit on the size of files, and run it again" in errors
    assert "finished shards are kept" in errors
    assert "Traceback" not in errors
    assert not list((tmp_path / "out").glob("*.tar"))
    assert not list((tmp_path / "out").rglob(".*.tmp"))


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_stock_webdataset_and_tar_see_what_the_manifest_counts(coco, make_config, pictures, tmp_path):
    import webdataset

    names = ["a.b.c.jpg", "x y.JPG", "\u00fc.jpeg", "deep/er/d.jpg", f"{'n' * 251}.jpg", "\U0001f600.jpg"]
    source = coco(tmp_path / "source", {n: pictures.encode(pictures.photo(i)) for i, n in enumerate(names)})
    run_plain(make_config(source, tmp_path / "out"))
    path = tmp_path / "out" / "train-000000.tar"
    samples = list(webdataset.WebDataset(str(path), shardshuffle=False))
    assert [sorted(k for k in s if not k.startswith("__")) for s in samples] == [["jpg", "json"]] * 6
    assert {json.loads(s["json"])["file_name"] for s in samples} == set(names)
    with tarfile.open(path) as tar:
        assert len(tar.getnames()) == 12
    listed = subprocess.run(["tar", "-tf", path], capture_output=True, text=True, check=True).stdout.split()
    assert len(listed) == 12


def test_raw_captions_are_kept_where_they_differ(coco, make_config, pictures, tmp_path):
    captions = {"a.jpg": [" a  dog\n", None, "a dog"], "b.jpg": ["a cat"]}
    files = {name: pictures.encode(pictures.photo(i)) for i, name in enumerate(captions)}
    run_plain(make_config(coco(tmp_path / "source", files, captions), tmp_path / "out"))
    metas = {s.meta["file_name"]: s.meta for s in map(SplitReader(tmp_path / "out", "train").read, (0, 1))}
    assert metas["a.jpg"]["captions"] == ["a dog"]
    assert metas["a.jpg"]["captions_raw"] == [" a  dog\n", None, "a dog"]
    assert "captions_raw" not in metas["b.jpg"]


def test_build_processes_import_neither_torch_nor_prefect():
    code = "import pipelines.build, sys; print([m for m in ('torch', 'prefect', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
