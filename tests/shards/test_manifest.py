import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shards.errors import ConfigError, FormatError
from shards.manifest import Addition, Manifest, ShardEntry

A = ShardEntry("train-000000.tar", "train", 10, 4096, "aa", "bb", "cc")
B = ShardEntry("val-000000.tar", "val", 3, 2048, "dd", "ee", "ff")


def test_saved_manifest_is_loaded_equal(tmp_path: Path) -> None:
    manifest = Manifest((A, B), {"filters": {"min_side_px": 32}})
    manifest.save(tmp_path)
    assert Manifest.load(tmp_path) == manifest
    assert manifest.splits == {"train": 10, "val": 3}
    assert manifest.of_split("val") == (B,)


def test_golden_dataset_of_format_1_is_read(golden: Path) -> None:
    manifest = Manifest.load(golden / "shards")
    assert manifest.manifest_id.startswith("7b2cb9a722bba9e5")
    assert manifest.splits == {"train": 3, "val": 1}


def test_id_depends_on_content_and_order_of_the_shards_only() -> None:
    whole = Manifest((A, B)).manifest_id
    assert Manifest((A, B), {"a": 1}).manifest_id == whole
    assert Manifest((B, A)).manifest_id != whole
    changed = ShardEntry(A.name, A.split, A.num_samples, A.num_bytes, "a0", "bb", "cc")
    assert Manifest((changed, B)).manifest_id != whole


def test_wids_fields_list_every_shard() -> None:
    content = json.loads(Manifest((A, B)).to_json())
    assert content["wids_version"] == 1
    assert [(s["url"], s["nsamples"]) for s in content["shardlist"]] == [
        ("train-000000.tar", 10),
        ("val-000000.tar", 3),
    ]


def test_unknown_split_names_those_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"split 'test' is not in the dataset; it has: train \(10 samples\), val \(3 samples\)"
    ):
        Manifest((A, B)).of_split("test")


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: None, "there is no such folder; build it"),
        (lambda folder: folder.write_bytes(b""), r"is a file, expected the folder that holds manifest\.json"),
        (lambda folder: folder.mkdir(), r"has no manifest\.json, so it is not a shard folder"),
        (
            lambda folder: (folder.mkdir(), (folder / "train-000000.tar").touch()),
            "its build did not end; run the build again",
        ),
        (lambda folder: (folder.mkdir(), (folder / ".train-000000.tar.tmp").touch()), "its build did not end"),
    ],
)
def test_a_folder_without_manifest_says_what_to_do(
    tmp_path: Path, prepare: Callable[[Path], Any], message: str
) -> None:
    prepare(tmp_path / "data")
    with pytest.raises(ConfigError, match=message):
        Manifest.load(tmp_path / "data")


def edited(change: Callable[[dict[str, Any]], Any]) -> bytes:
    content = json.loads(Manifest((A, B)).to_json())
    change(content)
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"{", r"manifest\.json: is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[]", "holds a list, expected an object; run the build again"),
        (b'{"wids_version": 1}', "its format is None, expected 'xctrain-shards'"),
        (edited(lambda c: c.update(format_version=2)), "has format version 2, this xctrain reads 1"),
        (edited(lambda c: c.pop("shards")), "'shards' is missing"),
        (edited(lambda c: c["shards"][1].pop("sha256")), "'sha256' is missing"),
        (edited(lambda c: c["shards"][0].update(num_samples="10")), "num_samples of shard 'train-000000.tar' is '10'"),
        (edited(lambda c: c["shards"][0].update(num_bytes=-1)), "num_bytes of shard 'train-000000.tar' is -1"),
        (edited(lambda c: c["shards"][0].update(name="../x.tar")), "shard name '../x.tar': expected SPLIT-NNNNNN.tar"),
        (edited(lambda c: c["shards"][0].update(num_samples=11)), "it was changed after the build"),
        (edited(lambda c: c["shards"].reverse()), "manifest_id is [0-9a-f]{64}, its shards give [0-9a-f]{64}"),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, raw: bytes, message: str) -> None:
    (tmp_path / "manifest.json").write_bytes(raw)
    with pytest.raises(FormatError, match=message):
        Manifest.load(tmp_path)


def test_an_addition_names_its_parent_and_keeps_its_shards_in_front(tmp_path: Path) -> None:
    first = Manifest((A,), {"seed": 1})
    second = Manifest((A, B), {"seed": 1}, (Addition(first.manifest_id, {"seed": 2}),))
    second.save(tmp_path)
    loaded = Manifest.load(tmp_path)
    assert loaded == second
    assert loaded.parent == first.manifest_id != loaded.manifest_id
    assert loaded.num_shards_of(first.manifest_id) == 1
    assert loaded.num_shards_of(loaded.manifest_id) == 2
    assert loaded.num_shards_of("0" * 64) is None
    assert "parent" not in json.loads(first.to_json())


def test_golden_manifest_of_an_addition(golden: Path, remake: ModuleType) -> None:
    """SHARD FORMAT: the fields that an addition adds; those of a dataset built in one go stay what they were."""
    added = remake.addition(Manifest.load(golden / "shards"))
    assert added.to_json() == (golden / "addition.json").read_bytes()
    assert Manifest.parse((golden / "addition.json").read_bytes(), "addition.json") == added


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parent": "0" * 64}, "parent is '0000.*, its additions give"),
        ({"additions": [{"parent": "x", "settings": {}}]}, "parent of an addition is 'x', expected a manifest_id"),
        ({"additions": [{"parent": "0" * 64}]}, "'settings' is missing"),
    ],
)
def test_a_changed_parent_is_refused(golden: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    content = {**json.loads((golden / "addition.json").read_bytes()), **change}
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(FormatError, match=message):
        Manifest.load(tmp_path)
