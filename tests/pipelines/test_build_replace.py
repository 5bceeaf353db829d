"""A build that takes another one's place, ended at any moment: a rerun ends with the folder of an undisturbed one."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.addition import Addition
from pipelines.build import Build
from pipelines.run import run_plain
from shards.errors import ConfigError
from shards.verify import verify

NEW = {"records_per_shard": 12}


def published(photos, make_config, out):
    run_plain(make_config(photos, out, build={"records_per_shard": 3}))


def without_its_build_folder(photos, make_config, out):
    published(photos, make_config, out)
    shutil.rmtree(out / ".build")


def added_to(photos, make_config, out):
    run_plain(make_config(photos, out, held_out="none", build={"records_per_shard": 5}))
    more = {"root": photos, "split": "val", "name": "more"}
    run_plain(make_config(more, out, held_out="none"), Addition)


def addition_that_was_killed(photos, make_config, out):
    added_to(photos, make_config, out)
    more = {"root": photos, "split": "val", "name": "again"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipelines.addition.Manifest.save", lambda *_: 1 / 0)
        filters = {"duplicates": False}
        with pytest.raises(ZeroDivisionError):
            run_plain(make_config(more, out, held_out="none", filters=filters), Addition)


def unpublished(photos, make_config, out):
    with Build(make_config(photos, out, build={"records_per_shard": 3})) as job:
        for name in job.plan():
            job.build_shard(name)


SLOW = [published, without_its_build_folder, added_to, unpublished]
OLD = [addition_that_was_killed, *(pytest.param(old, marks=pytest.mark.slow) for old in SLOW)]


def content(out):
    """Every file of the folder but reports, which hold times, with its bytes; what .build holds is no reader's business."""
    found = {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()}
    assert {"report.json", "report.html"} <= found.keys()
    return {name: b"" if name.startswith("report.") else data for name, data in found.items()}


@pytest.fixture(scope="module")
def undisturbed(photos, make_config, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    run_plain(make_config(photos, out, build=NEW))
    return content(out)


def ready(photos, make_config, out, old):
    """The folder when all shards of the overwriting build are finished and nothing of it is published."""
    old(photos, make_config, out)
    with Build(make_config(photos, out, build={**NEW, "overwrite": True})) as job:
        for name in job.plan():
            job.build_shard(name)


def end_of_rerun(photos, make_config, out):
    """Content after a rerun without overwrite, or with it where the old dataset is still there and guarded."""
    try:
        run_plain(make_config(photos, out, build=NEW))
    except ConfigError:
        assert [f for f in verify(out) if not f.stranger and "settings" not in f.problem] == []
        run_plain(make_config(photos, out, build={**NEW, "overwrite": True}))
    assert verify(out) == []
    return content(out)


@pytest.mark.parametrize("old", OLD)
def test_a_rerun_after_any_failing_step_of_an_overwriting_build_ends_with_the_undisturbed_folder(
    photos, make_config, undisturbed, tmp_path, monkeypatch, old
):
    ready(photos, make_config, out := tmp_path / "out", old)
    replace, unlink, real = Path.replace, Path.unlink, 0
    for failing in range(200):
        attempt = Path(shutil.copytree(out, tmp_path / "attempt", copy_function=shutil.copy2))
        calls = 0

        def count(failing=failing):
            nonlocal calls
            calls += 1
            if calls == failing + 1:
                raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", lambda self, target: (count(), replace(self, target))[1])
            patch.setattr(Path, "unlink", lambda self, missing_ok=False: (count(), unlink(self, missing_ok))[1])
            try:
                run_plain(make_config(photos, attempt, build={**NEW, "overwrite": True}))
            except OSError:
                real += 1
        if calls <= failing:
            break
        assert end_of_rerun(photos, make_config, attempt) == undisturbed, failing
        shutil.rmtree(attempt)
    assert real > 10


KILLED = """
import os, signal, sys
from pathlib import Path
from pipelines.config import BuildConfig
from pipelines.run import run_plain
unlink = Path.unlink
def killed(self, missing_ok=False):
    unlink(self, missing_ok)
    if self.name == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)
Path.unlink = killed
build = {"records_per_shard": 12, "overwrite": True}
run_plain(BuildConfig.model_validate({"source": sys.argv[1], "out": sys.argv[2], "build": build}))
"""


@pytest.mark.parametrize("name", ["manifest.json", "train-000005.tar"])
def test_a_rerun_after_a_sigkill_without_a_manifest_removes_what_was_being_replaced(
    photos, make_config, undisturbed, tmp_path, name
):
    out = tmp_path / "out"
    without_its_build_folder(photos, make_config, out)
    done = subprocess.run([sys.executable, "-c", KILLED, photos, out, name], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (out / "manifest.json").exists()
    assert len(list(out.glob("*.tar"))) > 3
    assert run_plain(make_config(photos, out, build=NEW)).stale == ()
    assert content(out) == undisturbed


def test_what_a_killed_build_was_never_to_publish_is_gone_after_a_rerun_of_less(
    photos, make_config, undisturbed, tmp_path
):
    with Build(make_config(photos, tmp_path / "out", build={"records_per_shard": 3})) as job:
        job.build_shard(job.plan()[-3])
    with Build(make_config(photos, tmp_path / "out", build={**NEW, "overwrite": True})):
        pass  # ended before it built anything
    run_plain(make_config(photos, tmp_path / "out", build=NEW))
    assert content(tmp_path / "out") == undisturbed


def test_what_is_left_until_overwritten_is_left_by_a_killed_rerun_too(photos, make_config, tmp_path, monkeypatch):
    out, less = tmp_path / "out", Path(shutil.copytree(photos, tmp_path / "source"))
    run_plain(make_config(less, out))
    path = less / "annotations" / "captions_train2017.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, "images": whole["images"][:8]}))
    with monkeypatch.context() as patch:
        patch.setattr("pipelines.state.State.remove_older", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_plain(make_config(less, out))
    assert not (out / "manifest.json").exists()
    assert run_plain(make_config(less, out)).stale == ("train-000001", "train-000002")
    assert (out / "train-000002.tar").exists()
    run_plain(make_config(less, out, build={"overwrite": True}))
    assert verify(out) == []


def test_tars_of_another_tool_are_never_overwritten(photos, make_config, tmp_path):
    from shards.indexing import index_folder

    run_plain(make_config(photos, tmp_path / "out"))
    folder = tmp_path / "theirs"
    folder.mkdir()
    for tar in (tmp_path / "out").glob("train-*.tar"):
        shutil.copy(tar, folder)
    index_folder(folder)
    with pytest.raises(
        ConfigError, match=r"holds tars that another tool wrote .* which a build would take away; choose"
    ):
        run_plain(make_config(photos, folder, build={"overwrite": True}))
