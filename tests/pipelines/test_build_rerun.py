"""A build into a folder that holds one already: what is redone, kept, replaced and refused."""

import json
import os
import shutil
from pathlib import Path

import pytest
from builds import copied, snapshot

from pipelines.build import Build
from pipelines.errors import BuildError, RejectShareError
from pipelines.run import run_plain
from shards.errors import ConfigError
from shards.manifest import Manifest
from shards.verify import verify


def test_a_finished_build_runs_again_without_writing(built, photos, make_config):
    before = snapshot(built)
    summary = run_plain(make_config(photos, built))
    assert summary.unchanged
    assert snapshot(built) == before


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
