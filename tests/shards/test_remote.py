"""Shard folders on an S3 server and behind a web server, both on this machine."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import objectstore
import pytest
import webserver

from shards import cli
from shards.__main__ import main
from shards.errors import ConfigError
from shards.manifest import Manifest
from shards.remote import Remote, RemoteError, is_remote, retried, shown

# Not ours: botocore and s3fs leave sessions to the garbage collector.
pytestmark = [
    pytest.mark.usefixtures("quick_tries"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]


@pytest.fixture
def in_store(store, dataset, request):
    """The dataset of three shards in the store, and where."""
    address = f"s3://{objectstore.BUCKET}/{request.node.name}"
    target = Remote(address)
    for path in dataset.iterdir():
        target.put(path.name, path)
    return address


@pytest.fixture
def on_web(dataset):
    with webserver.running() as server:
        for path in dataset.iterdir():
            server.files[f"/shards/{path.name}"] = webserver.Resource(path.read_bytes())
        yield server


def run(capsys, *arguments):
    code = cli.run(main, [str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("kind", ["in_store", "on_web"])
def test_a_remote_folder_is_listed_checked_and_shown_like_a_local_one(request, kind, dataset, capsys, tmp_path):
    found = request.getfixturevalue(kind)
    address = found if isinstance(found, str) else f"{found.url}/shards"
    for command in (["ls"], ["verify"], ["plan", "--global-batch", "4"]):
        name, *options = command
        assert run(capsys, name, address, *options) == run(capsys, name, dataset, *options)
    code, out, _ = run(capsys, "show", address, "7", "--out", tmp_path / "a.jpg")
    assert code == 0
    local = json.loads(run(capsys, "show", dataset, "7", "--out", tmp_path / "b.jpg")[1])
    assert {**json.loads(out), "image": ""} == {**local, "image": ""}
    assert (tmp_path / "a.jpg").read_bytes() == (tmp_path / "b.jpg").read_bytes()


def test_verify_finds_in_the_store_what_it_finds_here(in_store, dataset, capsys):
    tar = dataset / "train-000001.tar"
    data = bytearray(tar.read_bytes())
    data[700] ^= 1
    tar.write_bytes(data)
    (dataset / "train-000009.tar").write_bytes(b"")
    target = Remote(in_store)
    target.put("train-000001.tar", tar)
    target.put("train-000009.tar", dataset / "train-000009.tar")
    target.remove("train-000002.tar")
    (dataset / "train-000002.tar").unlink()
    there, here = run(capsys, "verify", in_store), run(capsys, "verify", dataset)
    assert there == here
    assert there[0] == 1
    assert "train-000001.tar: sha256 is" in there[1]
    assert "train-000002.tar: is missing" in there[1]
    assert "train-000009.tar: is not in the manifest" in there[1]


def test_what_is_no_dataset_is_said(in_store, on_web, capsys):
    for address in (f"s3://{objectstore.BUCKET}/nothing", f"{on_web.url}/nothing"):
        code, _, errors = run(capsys, "ls", address)
        assert code == 2
        assert f"error: {address}: has no manifest.json, so it is no shard folder" in errors
    code, _, errors = run(capsys, "show", in_store, "nobody")
    assert code == 2
    assert "nobody is neither key nor image id of its 12 samples" in errors
    assert run(capsys, "stats", in_store)[0] == 2


@pytest.mark.parametrize("command", [["ls"], ["verify"], ["plan"], ["show", "1"]])
def test_a_bucket_that_is_not_there_is_said_by_every_command(store, capsys, command):
    name, *options = command
    code, _, errors = run(capsys, name, "s3://no-such-bucket/x", *options)
    assert (code, errors) == (
        2,
        "error: s3://no-such-bucket/x: there is no bucket no-such-bucket; make it, or check the address\n",
    )


@pytest.mark.parametrize("kind", ["in_store", "on_web"])
def test_a_damaged_folder_at_an_address_is_said_by_ls_and_plan(request, kind, capsys):
    found = request.getfixturevalue(kind)
    if kind == "on_web":
        address, files = f"{found.url}/shards", found.files
        files["/shards/train-000001.tar"].data = files["/shards/train-000001.tar"].data[:-512]
        del files["/shards/train-000002.meta.jsonl"]
    else:
        address = found
        Remote(address).remove("train-000001.tar")
        Remote(address).remove("train-000002.meta.jsonl")
    code, out, _ = run(capsys, "ls", address)
    assert code == 1
    assert re.search(r"train-000001.tar: (is missing, the manifest lists|has \d+ bytes, the manifest says)", out)
    assert "train-000002.meta.jsonl: is missing, the manifest lists its shard" in out
    assert "2 findings in 2 files, by names and sizes alone; `verify` reads all; run the build again" in out
    code, _, errors = run(capsys, "plan", address)
    assert code == 1
    assert "(2 findings in all, without reading any file); run the build again to restore it" in errors


def test_a_web_server_without_ranges_is_said_by_ls_and_refused_by_plan(on_web, capsys):
    for name in ("ls", "plan"):
        on_web.files["/shards/train-000000.tar"].tricks = ["ignore-range"] * 9
        code, out, _ = run(capsys, name, f"{on_web.url}/shards", *(["--global-batch", "4"] if name == "plan" else []))
        assert "the server sends whole files where ranges are asked for" in out
        assert code == (2 if name == "plan" else 0)
        assert ("refused: " if name == "plan" else "note: training cannot read it from there: ") in out


def test_a_web_server_that_fails_for_a_moment_is_asked_again(on_web, dataset, capsys):
    on_web.files["/shards/manifest.json"].tricks = ["status:503", "drop:10", "status:500"]
    assert run(capsys, "ls", f"{on_web.url}/shards")[0] == 0
    assert len(on_web.files["/shards/manifest.json"].requests) == 4


def test_a_refusal_is_said_at_once_and_without_secrets(on_web, capsys):
    on_web.files["/shards/manifest.json"].tricks = ["status:403"] * 9
    code, _, errors = run(capsys, "ls", on_web.url.replace("//", "//user:secret@") + "/shards")
    assert code == 1
    assert "access is denied (403" in errors
    assert "secret" not in errors
    assert len(on_web.files["/shards/manifest.json"].requests) == 1


def test_a_store_that_is_down_is_named_after_a_few_tries(dataset):
    gone = objectstore.ObjectStore()
    code = "from shards.remote import Remote\nfrom shards import remote\nremote.FIRST_WAIT_S = 0.01\nRemote('s3://b/x').read('a')"
    environment = {
        **objectstore.ENVIRONMENT,
        "AWS_ENDPOINT_URL": gone.url,
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "s3://b/x/a: Could not connect to the endpoint URL" in done.stderr
    assert "(5 tries in a row failed); check the network and the server" in done.stderr
    assert "testing-secret" not in done.stderr
    assert time.monotonic() - began < 30


def test_missing_credentials_are_named_at_once(store, tmp_path):
    code = "from shards.remote import Remote\nRemote('s3://b/x').read('a')"
    environment = {"AWS_ENDPOINT_URL": store.url, "AWS_EC2_METADATA_DISABLED": "true", "HOME": str(tmp_path),
                   "AWS_DEFAULT_REGION": "us-east-1", "PYTHONPATH": str(Path(__file__).parents[2])}  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "RemoteError: s3://b/x/a: there are no credentials for it" in done.stderr
    assert "AWS_ACCESS_KEY_ID" in done.stderr


def test_an_address_of_a_kind_that_nobody_knows_is_refused(monkeypatch):
    with pytest.raises(
        ConfigError, match="foo://a/b: Protocol not known: foo; expected s3://, gs://, https:// or a local"
    ):
        Remote("foo://a/b")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError, match=r"gs:// need the Python package gcsfs; pip install 'xctrain\[gs\]'"):
        Remote("gs://a/b")


def test_what_is_put_replaces_what_was_there_and_ranges_are_read(store, tmp_path):
    target = Remote(f"s3://{objectstore.BUCKET}/some folder/ü")
    (tmp_path / "a").write_bytes(bytes(range(100)))
    target.put("x", tmp_path / "a")
    before = target.find("x")
    assert target.read("x", 10, 20) == bytes(range(10, 20))
    (tmp_path / "a").write_bytes(b"new")
    target.put("x", tmp_path / "a")
    assert target.read("x") == b"new"
    assert target.list().keys() == {"x"}
    assert target.find("x") != before
    target.remove("x")
    target.remove("x")
    assert target.find("x") is None
    assert target.list() == {}
    with pytest.raises(FileNotFoundError):
        target.read("x")


def test_ranges_of_a_web_server_that_knows_none_are_cut_out(on_web, dataset):
    file = on_web.files["/shards/manifest.json"]
    file.tricks = ["ignore-range"]
    assert Remote(f"{on_web.url}/shards").read("manifest.json", 2, 12) == file.data[2:12]


def test_passing_errors_end_in_one_message_that_counts_the_tries():
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise OSError("Please reduce your request rate: https://host/a?X-Amz-Signature=abc")

    with pytest.raises(RemoteError, match=r"there: .*https://host/a \(5 tries in a row failed\)"):
        retried("there", fail)
    assert len(calls) == 5
    calls.clear()
    with pytest.raises(RemoteError, match="access is denied"):
        retried("there", lambda: _raise(PermissionError("Access Denied")))


def _raise(error: Exception) -> Any:
    raise error


def test_addresses_are_told_from_paths():
    assert [is_remote(x) for x in ("s3://a/b", "https://a", "a/b", "/a", "C:/a", "a:b", Path("s3://a"))] == (
        [True, True, False, False, False, False, False]
    )
    assert shown("https://u:p@host/a?token=1") == "https://host/a"
    assert shown("s3://bucket/a?b") == "s3://bucket/a?b"


def test_an_addition_whose_parent_is_not_in_front_is_found(golden, remake, dataset, capsys):
    built = Manifest.load(dataset)
    from shards.manifest import Addition

    Manifest(built.shards, built.settings, (Addition(Manifest(built.shards[:2]).manifest_id),)).save(dataset)
    code, out, _ = run(capsys, "verify", dataset)
    assert (code, out) == (0, "ok: 12 samples in 3 shards, every byte as the manifest says\n")
    assert "the first 2 of these shards" in run(capsys, "ls", dataset)[1]
    Manifest(built.shards, built.settings, (Addition("0" * 64),)).save(dataset)
    code, out, _ = run(capsys, "verify", dataset)
    assert code == 1
    assert f"its parent is {'0' * 64}, but no number of its first shards is that dataset" in out
