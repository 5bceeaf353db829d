"""Builds whose out is an address, on an S3 server of this machine that can be killed."""

import json
import os
import shutil
import threading
import time

import objectstore
import pytest

from pipelines import upload
from pipelines.addition import Addition
from pipelines.run import run_plain
from shards.errors import ConfigError
from shards.mirror import RemoteShards
from shards.remote import Remote, RemoteError

# Not ours: botocore and s3fs leave sessions to the garbage collector.
pytestmark = [
    pytest.mark.usefixtures("quick_tries"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]


@pytest.fixture
def out(store, request):
    return f"s3://{objectstore.BUCKET}/{request.node.name.translate({91: '-', 93: None})}"


@pytest.fixture
def to_store(make_config, photos, out, tmp_path):
    """Build the pictures into the store; settings on top."""

    def build(source=photos, kind=None, staging="staging", **build):
        settings = {"staging": tmp_path / staging, **build}
        return run_plain(make_config(source, out, build=settings), *([kind] if kind else []))

    return build


def stored(out):
    target = Remote(out)
    return {name: target.read(name) for name in target.list()}


def data_of(files):
    return {name: data for name, data in files.items() if not name.startswith("report")}


@pytest.fixture(scope="module")
def reference(tmp_path_factory, make_config, photos, data_files):
    folder = tmp_path_factory.mktemp("reference") / "out"
    run_plain(make_config(photos, folder))
    return data_files(folder)


def test_a_build_to_a_store_holds_the_bytes_of_a_local_one(to_store, out, reference):
    summary = to_store()
    assert data_of(stored(out)) == reference
    assert {"report.json", "report.html"} < stored(out).keys()
    assert summary.num_sent == len(stored(out))
    assert str(summary).startswith(f"{out}: 29 kept (train 24, val 5)")
    assert RemoteShards(out).verify() == []


def test_a_rerun_sends_nothing_and_a_change_only_what_differs(to_store, out, photos, pictures, tmp_path):
    source = shutil.copytree(photos, tmp_path / "source")
    first = to_store(source)
    again = to_store(source)
    assert (again.num_sent, again.unchanged) == (0, True)
    picture = sorted((source / "train2017").iterdir())[3]
    picture.write_bytes(pictures.encode(pictures.photo(77)))
    before = stored(out)
    changed = to_store(source)
    assert changed.manifest_id != first.manifest_id
    after = stored(out)
    different = {name for name in after if after[name] != before.get(name)}
    assert changed.num_sent == len(different)
    assert {"manifest.json", "report.html", "report.json"} < different
    assert len({name.partition(".")[0] for name in different if name.startswith("train")}) == 1
    assert RemoteShards(out).verify() == []


def test_without_its_local_folder_a_rerun_compares_hashes(to_store, out, reference):
    to_store()
    summary = to_store(staging="another")
    assert summary.num_sent == 4  # the report has another time in it, rejects.jsonl is in no manifest
    assert data_of(stored(out)) == reference


def test_a_missing_or_changed_object_is_sent_again(to_store, out, reference, tmp_path):
    to_store()
    target = Remote(out)
    target.remove("train-000001.tar.idx")
    (tmp_path / "x").write_bytes(b"\0" * len(reference["train-000000.tar"]))
    target.put("train-000000.tar", tmp_path / "x")
    assert to_store().num_sent == 3
    assert data_of(stored(out)) == reference


def test_the_manifest_comes_last_and_a_store_that_dies_is_made_good(to_store, out, reference, monkeypatch):
    real, calls = Remote.put, []

    def put(self, name, path):
        calls.append(name)
        if len(calls) == 7:
            raise RemoteError(f"{self}/{name}: gone")
        real(self, name, path)

    monkeypatch.setattr(Remote, "put", put)
    with pytest.raises(RemoteError, match="gone"):
        to_store()
    assert "manifest.json" not in stored(out)
    sent = len(stored(out))
    monkeypatch.undo()
    monkeypatch.setattr(Remote, "put", lambda self, name, path: (calls.append(name), real(self, name, path)))
    calls.clear()
    to_store()
    assert data_of(stored(out)) == reference
    assert calls[-1] == "manifest.json"
    assert len(calls) == len(stored(out)) - sent  # those that had arrived were not sent again


def test_a_server_that_is_killed_while_it_is_sent_to(make_config, photos, reference, tmp_path, monkeypatch):
    """A real kill: what the store held is gone with it, and the same command ends with the same bytes."""
    address = f"s3://{objectstore.BUCKET}/dies"
    config = make_config(photos, address, build={"staging": tmp_path / "staging"})
    real = Remote.put
    with objectstore.running() as running:

        def put(self, name, path):
            if name == "train-000001.tar":
                running.kill()
            real(self, name, path)

        monkeypatch.setattr(Remote, "put", put)
        with pytest.raises(RemoteError, match=rf"{address}/.*tries in a row failed\); check the network") as caught:
            run_plain(config)
        assert "testing-secret" not in str(caught.value)
        monkeypatch.setattr(Remote, "put", real)
        running.start()
        run_plain(config)
        assert data_of(stored(address)) == reference


def test_a_store_that_is_down_is_said_before_anything_is_built(photos, tmp_path, command, monkeypatch):
    gone = objectstore.ObjectStore()
    for name, value in {**objectstore.ENVIRONMENT, "AWS_ENDPOINT_URL": gone.url}.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "build.yaml"
    build = {"staging": str(tmp_path / "staging")}
    path.write_text(json.dumps({"source": str(photos), "out": "s3://bucket/x", "build": build}))
    _, errors = command("build", path, "--plain").communicate(timeout=200)
    assert "error: s3://bucket/x: Could not connect to the endpoint URL" in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "staging").exists()


def test_what_another_build_put_there_is_refused(to_store, out, coco, pictures, tmp_path):
    to_store()
    before = stored(out)
    other = coco(tmp_path / "other", {f"{i}.jpg": pictures.encode(pictures.photo(i)) for i in range(60, 64)})
    with pytest.raises(
        ConfigError, match=r"holds the dataset .{16}, which this build did not put there; choose another"
    ):
        to_store(other, staging="another")
    assert stored(out) == before
    to_store(other, staging="another", overwrite=True)
    assert RemoteShards(out).verify() == []
    assert "train-000002.tar" not in stored(out)


@pytest.mark.parametrize("last", [0, 7, 16, 18])
def test_an_overwriting_build_that_ends_while_it_sends_is_made_good_without_overwrite(
    to_store, out, photos, coco, pictures, reference, tmp_path, monkeypatch, last
):
    files = {f"{i}.jpg": pictures.encode(pictures.photo(i)) for i in range(60, 100)}
    to_store(coco(tmp_path / "other", files))
    to_store(coco(tmp_path / "more", {"0.jpg": pictures.encode(pictures.photo(9))}, first_id=90), kind=Addition)
    steps, puts, removes = 0, Remote.put, Remote.remove

    def step():
        nonlocal steps
        steps += 1
        if steps > last:
            raise RemoteError("gone")

    monkeypatch.setattr(upload, "AT_ONCE", 1)
    monkeypatch.setattr(Remote, "put", lambda self, name, path: (step(), puts(self, name, path)))
    monkeypatch.setattr(Remote, "remove", lambda self, name: (removes(self, name), step()))
    with pytest.raises(RemoteError, match="gone"):
        to_store(photos, staging="another", overwrite=True)
    monkeypatch.setattr(Remote, "put", puts)
    monkeypatch.setattr(Remote, "remove", removes)
    assert "manifest.json" not in stored(out) or RemoteShards(out).manifest.splits == {"train": 24, "val": 5}
    to_store(photos, staging="another")
    assert data_of(stored(out)) == reference
    assert {name for name in stored(out) if name.startswith("report")} == {"report.html", "report.json"}


def test_a_bucket_that_is_not_there_is_said_before_anything_is_built(store, make_config, photos, tmp_path):
    with pytest.raises(ConfigError, match="s3://no-such-bucket/x: there is no bucket no-such-bucket; make it"):
        run_plain(make_config(photos, "s3://no-such-bucket/x", build={"staging": tmp_path / "staging"}))
    assert not (tmp_path / "staging").exists()
    (tmp_path / "a").write_text("a")
    with pytest.raises(ConfigError, match="s3://no-such-bucket/x: there is no bucket no-such-bucket"):
        Remote("s3://no-such-bucket/x").put("a", tmp_path / "a")


def test_files_of_somebody_else_are_refused(to_store, out, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    Remote(out).put("notes.txt", tmp_path / "notes.txt")
    with pytest.raises(ConfigError, match="is not empty and was not written by this build"):
        to_store()
    assert stored(out).keys() == {"notes.txt"}


def test_while_shards_are_replaced_there_is_no_manifest(to_store, out, photos, pictures, tmp_path, monkeypatch):
    source = shutil.copytree(photos, tmp_path / "source")
    to_store(source)
    sorted((source / "train2017").iterdir())[3].write_bytes(pictures.encode(pictures.photo(78)))
    seen = []
    real = Remote.put
    monkeypatch.setattr(
        Remote, "put", lambda self, name, path: (seen.append("manifest.json" in self.list()), real(self, name, path))
    )
    to_store(source)
    assert seen
    assert not any(seen)


def test_an_addition_sends_only_what_is_new_and_never_takes_the_manifest_away(
    to_store, out, coco, pictures, tmp_path, monkeypatch
):
    parent = to_store().manifest_id
    before = stored(out)
    more = coco(tmp_path / "more", {f"{i}.jpg": pictures.encode(pictures.photo(i)) for i in range(80, 84)}, first_id=80)
    seen = []
    real = Remote.put
    monkeypatch.setattr(
        Remote, "put", lambda self, name, path: (seen.append("manifest.json" in self.list()), real(self, name, path))
    )
    summary = to_store(more, kind=Addition)
    after = stored(out)
    assert all(seen)
    assert {name: after[name] for name in before if name != "manifest.json"} == (
        {name: data for name, data in before.items() if name != "manifest.json"}
    )
    assert summary.num_sent == 3 + 3 + 1  # a shard, its report and rejects, the manifest
    shards = RemoteShards(out)
    assert shards.manifest.parent == parent
    assert shards.verify() == []


def test_a_dataset_whose_local_folder_is_gone_is_fetched_before_it_is_added_to(to_store, out, coco, pictures, tmp_path):
    to_store()
    shutil.rmtree(tmp_path / "staging")
    more = coco(tmp_path / "more", {f"{i}.jpg": pictures.encode(pictures.photo(i)) for i in range(80, 84)}, first_id=80)
    summary = to_store(more, kind=Addition)
    assert summary.added == {"train": 4}
    assert RemoteShards(out).verify() == []
    assert to_store(more, kind=Addition).unchanged


def test_objects_are_sent_side_by_side(to_store, monkeypatch):
    at_once, most = 0, 0
    mutex = threading.Lock()
    real = Remote.put

    def put(self, name, path):
        nonlocal at_once, most
        with mutex:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.02)
        real(self, name, path)
        with mutex:
            at_once -= 1

    monkeypatch.setattr(Remote, "put", put)
    to_store()
    assert 1 < most <= upload.AT_ONCE


def test_a_web_server_is_no_place_to_build_to(make_config, photos):
    with pytest.raises(ValueError, match="a web server cannot be written to; give s3://, gs:// or a folder"):
        make_config(photos, "https://host/shards")


def test_each_address_has_its_own_folder_here(make_config, photos):
    folders = [make_config(photos, out).folder for out in ("s3://a/shards", "s3://b/shards", "s3://a/shards/")]
    assert folders[0] != folders[1]
    assert folders[0] == folders[2]
    assert str(folders[0]).startswith(f"data{os.sep}staging{os.sep}shards-")
