import json
import os
import shutil
import subprocess
import sys
import tarfile
from itertools import pairwise
from pathlib import Path

import pytest

from pipelines.build import Build
from pipelines.errors import BuildError, RejectShareError
from pipelines.run import run_plain
from shards.errors import ConfigError
from shards.manifest import Manifest
from shards.reader import SplitReader
from shards.verify import verify


@pytest.fixture(scope="module")
def built(photos, make_config, tmp_path_factory):
    """The undisturbed build of the photos; do not change."""
    out = tmp_path_factory.mktemp("built") / "out"
    run_plain(make_config(photos, out))
    return out


def snapshot(out):
    return {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in out.rglob("*") if p.is_file()}


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


def test_a_finished_build_runs_again_without_writing(built, photos, make_config):
    before = snapshot(built)
    summary = run_plain(make_config(photos, built))
    assert summary.unchanged
    assert snapshot(built) == before


def copied(photos, tmp_path):
    """Source and build that a test may change."""
    return Path(shutil.copytree(photos, tmp_path / "source", copy_function=shutil.copy2)), tmp_path / "out"


def test_a_changed_picture_rebuilds_only_its_shard(photos, make_config, pictures, data_files, tmp_path):
    source, out = copied(photos, tmp_path)
    run_plain(make_config(source, out))
    before, files = snapshot(out), data_files(out)
    (source / "train2017" / f"{5:012d}.jpg").write_bytes(pictures.encode(pictures.photo(99)))
    assert not run_plain(make_config(source, out)).unchanged
    changed = {p.name for p, state in snapshot(out).items() if before.get(p) != state and p.parent == out}
    shards = {name for name in changed if name.endswith(".tar")}
    assert len(shards) == 1
    assert changed == {f"{shards.copy().pop()}{suffix}" for suffix in ("", ".idx")} | {
        f"{shards.pop().removesuffix('.tar')}.meta.jsonl",
        "manifest.json",
        "rejects.jsonl",
        "report.json",
        "report.html",
    }
    assert verify(out) == []
    run_plain(make_config(source, tmp_path / "afresh"))
    assert data_files(tmp_path / "afresh") == data_files(out) != files


def test_a_changed_caption_rebuilds_only_its_shard(photos, make_config, tmp_path):
    source, out = copied(photos, tmp_path)
    run_plain(make_config(source, out))
    tars = {p.name: p.stat().st_ino for p in out.glob("*.tar")}
    path = source / "annotations" / "captions_train2017.json"
    path.write_text(path.read_text().replace("picture 7 seen once", "a picture seen anew"))
    run_plain(make_config(source, out))
    assert sum(p.stat().st_ino != tars[p.name] for p in out.glob("*.tar")) == 1


def test_a_damaged_shard_is_built_again(photos, make_config, data_files, built, tmp_path):
    out = tmp_path / "out"
    run_plain(make_config(photos, out))
    path = out / "train-000001.tar"
    data, times = bytearray(path.read_bytes()), path.stat()
    data[1000] ^= 255
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    (out / "train-000002.tar.idx").unlink()
    run_plain(make_config(photos, out))
    assert data_files(out) == data_files(built)


def _edited(content, change):
    return json.dumps({**content, "value": {**content["value"], **change}})


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: "garbage",
        lambda content: "{}",
        lambda content: "[1]",
        lambda content: json.dumps(content["value"]),
        lambda content: _edited(content, {"entry": {"name": 3}}),
        lambda content: _edited(content, {"entry": None}),
        lambda content: _edited(content, {"rejects": [3]}),
        lambda content: _edited(content, {"stats": 7}),
        lambda content: _edited(content, {"stamps": []}),
        lambda content: "[" * 100_000,
    ],
)
def test_what_the_build_remembers_heals_itself(photos, make_config, data_files, built, tmp_path, damage):
    out = Path(shutil.copytree(built, tmp_path / "out"))
    path = out / ".build" / "results" / "train-000001.json"
    path.write_text(damage(json.loads(path.read_text())))
    run_plain(make_config(photos, out))
    assert data_files(out) == data_files(built)
    assert run_plain(make_config(photos, out)).unchanged


@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: data[:-1], lambda data: data[:-3] + b"abc", lambda data: data + b"abc"]
)
def test_remembered_hashes_that_are_damaged_are_found_anew(photos, make_config, data_files, built, tmp_path, damage):
    out = Path(shutil.copytree(built, tmp_path / "out"))
    path = out / ".build" / "files.bin"
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert run_plain(make_config(photos, out)).unchanged
    assert path.read_bytes() == whole
    assert data_files(out) == data_files(built)


def test_a_place_that_cannot_be_written_is_said_before_anything_starts(photos, make_config, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / ".build").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for out, message in (
        (tmp_path / "file" / "deep" / "out", "file: is a file, expected a folder to write shards to"),
        (tmp_path / "odd", ".build: is a file, expected a folder"),
        (tmp_path / "link", "link: is a link to .*gone, which does not exist; change out"),
    ):
        with pytest.raises(ConfigError, match=message):
            Build(make_config(photos, out))
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(ConfigError, match=f"{tmp_path}: this user may not write there; change out"):
        Build(make_config(photos, tmp_path / "new" / "out"))


def test_a_source_that_may_not_be_read_is_wrong_input(photos, make_config, tmp_path, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    source, out = copied(photos, tmp_path)
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(ConfigError, match=r"train2017: Permission denied; give this user the right to it"):
        Build(make_config(source, out))


def test_a_copied_folder_is_recognised_by_its_hashes(built, photos, make_config, tmp_path):
    shutil.copytree(built, tmp_path / "out")
    assert run_plain(make_config(photos, tmp_path / "out")).unchanged


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"filters": {"min_side_px": 20}}, r"filters.min_side_px was 16, now 20; set them back"),
        ({"build": {"records_per_shard": 9}}, r"build.records_per_shard was 8, now 9"),
        ({"build": {"seed": 3}}, r"build.seed was 0, now 3"),
        ({"held_out": "none"}, r'sources.val was ".*captions_val2017.json", now null'),
    ],
)
def test_changed_settings_are_refused_and_named(built, photos, make_config, sections, message):
    before = snapshot(built)
    with pytest.raises(ConfigError, match=message):
        run_plain(make_config(photos, built, **sections))
    assert snapshot(built) == before


def test_overwriting_replaces_the_old_build_and_removes_only_its_shards(photos, make_config, data_files, tmp_path):
    out = tmp_path / "out"
    run_plain(make_config(photos, out, build={"records_per_shard": 4}))
    (out / "notes-000000.tar").write_bytes(b"somebody's own")
    run_plain(make_config(photos, out, build={"records_per_shard": 12, "overwrite": True}))
    run_plain(make_config(photos, tmp_path / "afresh", build={"records_per_shard": 12}))
    (out / "notes-000000.tar").unlink()
    assert data_files(out) == data_files(tmp_path / "afresh")


def test_shards_that_fall_away_are_left_and_named_until_overwritten(photos, make_config, tmp_path):
    source, out = copied(photos, tmp_path)
    run_plain(make_config(source, out))
    path = source / "annotations" / "captions_train2017.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "images": content["images"][:16]}))
    summary = run_plain(make_config(source, out))
    assert "no longer part of it: train-000002; build.overwrite=true removes them" in str(summary)
    assert (out / "train-000002.tar").exists()
    assert run_plain(make_config(source, out, build={"overwrite": True})).stale == ()
    assert not (out / "train-000002.tar").exists()
    assert verify(out) == []


def test_what_was_published_keeps_its_settings_until_the_new_is_published(photos, make_config, data_files, tmp_path):
    out = tmp_path / "out"
    run_plain(make_config(photos, out))
    before = data_files(out)
    stricter = {"filters": {"min_side_px": 1000}, "build": {"overwrite": True}}
    with pytest.raises(RejectShareError):
        run_plain(make_config(photos, out, **stricter))
    assert run_plain(make_config(photos, out)).unchanged
    with Build(make_config(photos, out, build={"records_per_shard": 4, "overwrite": True})) as job:  # ends unpublished
        job.build_shard(job.plan()[0])
    assert run_plain(make_config(photos, out)).unchanged
    assert data_files(out) == before


@pytest.mark.parametrize("name", ["report.html", "train-000001.tar", "rejects.jsonl"])
def test_a_folder_in_the_way_takes_nothing_away(photos, make_config, pictures, tmp_path, name):
    source, out = copied(photos, tmp_path)
    run_plain(make_config(source, out))
    (out / name).unlink()
    (out / name).mkdir()
    manifest = (out / "manifest.json").read_bytes()
    for path in (source / "train2017").iterdir():
        path.write_bytes(pictures.encode(pictures.photo(int(path.stem) + 50)))
    with pytest.raises(BuildError, match=f"{name}: is a folder where the build writes a file; nothing was replaced"):
        run_plain(make_config(source, out))
    assert (out / "manifest.json").read_bytes() == manifest
    (out / name).rmdir()
    run_plain(make_config(source, out))
    assert verify(out) == []


def test_a_report_that_cannot_be_made_takes_nothing_away(photos, make_config, data_files, tmp_path, monkeypatch):
    source, out = copied(photos, tmp_path)
    run_plain(make_config(source, out))
    before = data_files(out)
    path = source / "annotations" / "captions_train2017.json"
    path.write_text(path.read_text().replace("seen once", "seen at last"))
    with monkeypatch.context() as patch:
        patch.setattr("pipelines.report_page.render", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_plain(make_config(source, out))
    assert data_files(out) == before
    assert not run_plain(make_config(source, out)).unchanged


def test_half_a_character_pair_anywhere_crashes_nothing(coco, make_config, pictures, rejects, tmp_path):
    names = [f"{i}.jpg" for i in range(4)]
    captions = {"0.jpg": ["a \ud83d dog"]}
    source = coco(tmp_path / "source", {n: pictures.encode(pictures.photo(i)) for i, n in enumerate(names)}, captions)
    path = source / "annotations" / "captions_train2017.json"
    path.write_text(path.read_text().replace("3.jpg", "\\ud83d.jpg"))
    run_plain(make_config(source, tmp_path / "out"))
    assert rejects(tmp_path / "out") == {"\ud83d.jpg": "missing_file"}
    assert "\\ud83d.jpg" in (tmp_path / "out" / "report.html").read_text()


def test_a_dataset_that_lost_its_build_folder_can_be_replaced(photos, make_config, data_files, built, tmp_path):
    out = Path(shutil.copytree(built, tmp_path / "out", ignore=shutil.ignore_patterns(".build")))
    manifest_id = Manifest.load(out).manifest_id
    with pytest.raises(ConfigError, match=f"holds the dataset {manifest_id[:16]} without its .build, .*overwrite=true"):
        run_plain(make_config(photos, out))
    run_plain(make_config(photos, out, build={"records_per_shard": 12, "overwrite": True}))
    assert sorted(p.name for p in out.glob("*.tar")) == ["train-000000.tar", "train-000001.tar", "val-000000.tar"]
    assert verify(out) == []


def test_a_folder_of_somebody_else_is_refused(photos, make_config, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(
            ConfigError, match=r"is not empty and was not written by this build \(it holds thesis.txt\)"
        ):
            run_plain(make_config(photos, tmp_path, build={"overwrite": overwrite}))
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_wrong_images_folder_is_refused_before_anything_is_written(photos, make_config, tmp_path):
    source = {"annotations": photos / "annotations" / "captions_train2017.json", "images": photos / "val2017"}
    with pytest.raises(ConfigError, match=r"not one image of .* \(24\) is in it, for example '000000000001.jpg'"):
        run_plain(make_config(source, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_what_is_rejected_at_planning(coco, make_config, rejects, pictures, tmp_path):
    twin, other = pictures.encode(pictures.photo(1)), pictures.encode(pictures.photo(2))
    files = {
        "silent_twin.jpg": twin,  # the lowest id, but without a caption it cannot stand for its twins
        "twin_a.jpg": twin,
        "twin_b.jpg": twin,
        "absent.jpg": None,
        "empty.jpg": b"",
        "../outside.jpg": None,
        "other.jpg": other,
    }
    source = coco(tmp_path / "source", files, {"silent_twin.jpg": ["...", None, 3]})
    run_plain(make_config(source, tmp_path / "out", build={"max_reject_share": 1}))
    assert rejects(tmp_path / "out") == {
        "silent_twin.jpg": "no_caption",
        "twin_b.jpg": "duplicate_image",
        "absent.jpg": "missing_file",
        "empty.jpg": "empty_file",
        "../outside.jpg": "missing_file",
    }
    details = {
        r["file_name"]: r["detail"] for r in map(json.loads, (tmp_path / "out/rejects.jsonl").read_text().splitlines())
    }
    assert details["silent_twin.jpg"] == "no caption is left of 3: 1 empty, 2 not_text"
    assert details["twin_b.jpg"] == "same bytes as image 2"


def test_duplicates_can_be_kept(coco, make_config, pictures, tmp_path):
    data = pictures.encode(pictures.photo(1))
    source = coco(tmp_path / "source", {"a.jpg": data, "b.jpg": data})
    run_plain(make_config(source, tmp_path / "out", filters={"duplicates": False}))
    assert Manifest.load(tmp_path / "out").splits == {"train": 2}


def test_what_training_shares_with_the_held_out_split_training_loses(coco, make_config, rejects, pictures, tmp_path):
    shared = pictures.encode(pictures.photo(3))
    train = {f"{i}.jpg": pictures.encode(pictures.photo(i)) for i in range(4, 8)}
    source = coco(tmp_path / "source", {"copy.jpg": shared, **train})
    coco(source, {"held.jpg": shared, "id.jpg": pictures.encode(pictures.photo(9))}, split="val", first_id=4)
    run_plain(make_config(source, tmp_path / "out"))
    # ids of val are 4 and 5; those of train 1 to 5
    assert rejects(tmp_path / "out") == {"copy.jpg": "split_leak", "6.jpg": "split_leak", "7.jpg": "split_leak"}
    assert Manifest.load(tmp_path / "out").splits == {"train": 2, "val": 2}


def test_a_shard_without_any_sample_is_left_out(coco, make_config, pictures, tmp_path):
    files = {f"{i}.jpg": pictures.encode(pictures.photo(i)) if i < 4 else b"no picture" * i for i in range(8)}
    source = coco(tmp_path / "source", files)
    run_plain(make_config(source, tmp_path / "out", build={"records_per_shard": 1}))
    assert len(Manifest.load(tmp_path / "out").shards) == len(list((tmp_path / "out").glob("*.tar"))) == 4
    assert run_plain(make_config(source, tmp_path / "out", build={"records_per_shard": 1})).unchanged
    (source / "train2017" / "3.jpg").write_bytes(b"spoilt since")
    (source / "train2017" / "2.jpg").unlink()
    config = make_config(source, tmp_path / "out", build={"records_per_shard": 1, "max_reject_share": 1})
    run_plain(config)
    assert len(list((tmp_path / "out").glob("*.tar"))) == 2
    assert verify(tmp_path / "out") == []


def test_too_many_rejections_publish_nothing(coco, make_config, pictures, tmp_path):
    files = {f"{i}.jpg": pictures.encode(pictures.photo(i)) if i < 7 else b"" for i in range(10)}
    source, out = coco(tmp_path / "source", files), tmp_path / "out"
    message = r"3 of 10 records rejected \(empty_file 3\), build.max_reject_share=0.2 allows 2; nothing was published"
    with pytest.raises(RejectShareError, match=message):
        run_plain(make_config(source, out, build={"max_reject_share": 0.2}))
    assert not (out / "manifest.json").exists()
    assert len((out / ".build" / "rejects.jsonl").read_text().splitlines()) == 3
    assert run_plain(make_config(source, out, build={"max_reject_share": 0.3})).splits == {"train": 7}


def test_the_old_dataset_stays_while_the_new_one_is_too_bad(photos, make_config, data_files, tmp_path):
    source, out = copied(photos, tmp_path)
    run_plain(make_config(source, out))
    before = data_files(out)
    for path in list((source / "train2017").iterdir())[:20]:
        path.write_bytes(b"spoilt " + path.name.encode())
    with pytest.raises(RejectShareError):
        run_plain(make_config(source, out))
    assert data_files(out) == before
    assert verify(out) == []


def test_a_split_that_is_all_rejected_is_an_error(coco, make_config, tmp_path):
    source = coco(tmp_path / "source", {"a.jpg": b"x", "b.jpg": b"y"})
    with pytest.raises(RejectShareError, match=r"2 of 2 records rejected .*, all 2 of split train among them"):
        run_plain(make_config(source, tmp_path / "out", build={"max_reject_share": 1}))


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


def test_every_failing_write_of_publishing_leaves_a_folder_that_goes_on(
    photos, make_config, data_files, tmp_path, monkeypatch
):
    """Rename after rename is made to fail, as on a full disk; each time the next run ends with the right bytes."""
    source, out = copied(photos, tmp_path)
    run_plain(make_config(source, out))
    path = source / "annotations" / "captions_train2017.json"
    path.write_text(path.read_text().replace("seen once", "seen at last"))
    with Build(make_config(source, out)) as job:
        for name in job.plan():
            job.build_shard(name)
    run_plain(make_config(source, tmp_path / "afresh"))
    expected = data_files(tmp_path / "afresh")
    replace, real = Path.replace, 0
    for failing in range(100):
        attempt = Path(shutil.copytree(out, tmp_path / f"attempt-{failing}", copy_function=shutil.copy2))
        calls = 0

        def fail(self, target, failing=failing):
            nonlocal calls
            calls += 1
            if calls == failing + 1:
                raise OSError(28, "No space left on device", str(target))
            return replace(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", fail)
            try:
                run_plain(make_config(source, attempt))
            except OSError:
                real += 1
        if calls <= failing:
            break
        assert not (attempt / "manifest.json").exists() or verify(attempt) == []
        assert run_plain(make_config(source, attempt)).splits == {"train": 24, "val": 5}
        assert data_files(attempt) == expected
        shutil.rmtree(attempt)
    assert real > 10


def test_a_full_disk_is_said_in_one_line(photos, command, tmp_path):
    import resource

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, 16_000))

    config = tmp_path / "build.yaml"
    config.write_text(json.dumps({"source": str(photos), "out": str(tmp_path / "out"), "build": {"processes": 1}}))
    process = command("build", config, "--plain", preexec_fn=small_files)
    _, errors = process.communicate(timeout=60)
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
