"""New records to a published dataset: old shards keep their bytes, the manifest names its parent."""

import json
import shutil
import time
from pathlib import Path

import pytest

from pipelines.__main__ import main
from pipelines.addition import Addition
from pipelines.errors import RejectShareError
from pipelines.run import run_plain
from shards import cli
from shards.errors import ConfigError
from shards.manifest import Manifest
from shards.reader import SplitReader
from shards.verify import verify


@pytest.fixture
def dataset(built, tmp_path):
    return shutil.copytree(built, tmp_path / "dataset")


@pytest.fixture(scope="module")
def more(tmp_path_factory, coco, pictures):
    """12 new pictures, ids from 100; do not change."""
    return coco(tmp_path_factory.mktemp("more"), new_files(pictures), first_id=100)


def new_files(pictures, count=12):
    return {f"new {i}.jpg": pictures.encode(pictures.photo(i)) for i in range(100, 100 + count)}


def add(dataset, source, make_config, **sections):
    return run_plain(make_config(source, dataset, **sections), Addition)


def files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def test_dataset_named_from_where_one_stands_is_added_to_and_trained_on_from_the_next_epoch_on(
    dataset, more, make_config, tmp_path, monkeypatch
):
    from small import audit_of, train_here

    monkeypatch.chdir(dataset.parent)
    run, length = tmp_path / "run", {"train__resume_with": "train.num_steps"}
    train_here(dataset, run, train__num_steps=1)
    old = SplitReader(dataset, "train")
    assert add(Path(dataset.name), more, make_config).added
    new = SplitReader(dataset, "train")
    state = train_here(dataset, run, train__num_steps=6, **length)
    assert [(s.first_n, s.num_samples) for s in state.segments] == [(0, len(old)), (len(old), len(new))]
    assert [e.seen for e in audit_of(run).epochs][:2] == [len(old), len(new)]
    assert audit_of(run).ok


def test_old_shards_keep_their_bytes_and_the_manifest_names_its_parent(dataset, more, make_config):
    old, before = files(dataset), Manifest.load(dataset)
    summary = add(dataset, more, make_config)
    new, after = files(dataset), Manifest.load(dataset)
    assert {name: new[name] for name in old if name != "manifest.json"} == (
        {name: data for name, data in old.items() if name != "manifest.json"}
    )
    assert after.shards[: len(before.shards)] == before.shards
    assert [s.name for s in after.shards[len(before.shards) :]] == ["train-000003.tar", "train-000004.tar"]
    assert after.parent == before.manifest_id != after.manifest_id == summary.manifest_id
    assert after.splits == {"train": 36, "val": 5}
    assert after.settings == before.settings
    assert verify(dataset) == []
    assert sorted(new.keys() - old.keys() - {f for s in after.shards for f in (s.name, s.idx_name, s.meta_name)}) == (
        ["rejects-1.jsonl", "report-1.html", "report-1.json"]
    )
    assert "12 added (train 12) to now 41 (train 36, val 5), 0 rejected" in str(summary)
    reader = SplitReader(dataset, "train")
    assert {reader.read_json(i)["image_id"] for i in range(24, 36)} == set(range(100, 112))


def test_an_addition_of_what_is_there_changes_nothing(dataset, more, make_config):
    add(dataset, more, make_config)
    before = files(dataset)
    again = add(dataset, more, make_config)
    assert again.unchanged
    assert again.rejected == {"known_id": 12}
    assert files(dataset) == before
    assert not (dataset / ".build" / "adding").exists()


def test_an_addition_of_nothing_new_says_of_each_record_why(dataset, photos, make_config):
    path = dataset / ".build" / "rejects.jsonl"
    summary = add(dataset, photos, make_config)
    assert f"29 rejected (known_id 29), nothing has changed\nmanifest_id {summary.manifest_id}\nrejects     {path}" in (
        str(summary)
    )
    rows = list(map(json.loads, path.read_text().splitlines()))
    assert {(row["reason"], row["detail"]) for row in rows} == {("known_id", "its image id is in the dataset already")}
    assert len(rows) == 29
    facts = json.loads(Path(summary.report).with_suffix(".json").read_text())
    assert (facts["of"], facts["reasons"]) == ("unpublished", {"known_id": 29})
    assert facts["why"] == "all 29 records rejected (known_id 29), nothing was added"


def test_rejects_of_an_addition_lie_where_its_result_says(dataset, coco, pictures, make_config, tmp_path):
    source = coco(tmp_path / "both", new_files(pictures, 3) | {"no.jpg": b""}, first_id=24)
    summary = add(dataset, source, make_config)
    assert "2 added (train 2) to now 31 (train 26, val 5), 2 rejected (empty_file 1, known_id 1)" in str(summary)
    assert f"\nrejects     {dataset / 'rejects-1.jsonl'}" in str(summary)
    assert Path(summary.rejects).exists()
    assert Path(summary.report).exists()


def test_ids_and_files_that_the_dataset_holds_are_rejected(dataset, photos, coco, pictures, make_config, tmp_path):
    old = {path.name: path.read_bytes() for path in sorted((photos / "train2017").iterdir())}
    val = sorted((photos / "val2017").iterdir())
    source = coco(
        tmp_path / "mixed",
        {
            "same file.jpg": next(iter(old.values())),
            "held out.jpg": val[0].read_bytes(),
            **new_files(pictures, 3),
        },
        first_id=300,
    )
    path = source / "annotations" / "captions_train2017.json"
    content = json.loads(path.read_text())
    for entry, image_id in ((content["images"][2], 5), (content["images"][3], 501)):  # of train, and of val
        for annotation in content["annotations"]:
            if annotation["image_id"] == entry["id"]:
                annotation["image_id"] = image_id
        entry["id"] = image_id
    path.write_text(json.dumps(content))
    summary = add(dataset, source, make_config)
    assert summary.added == {"train": 1}
    rows = map(json.loads, (dataset / "rejects-1.jsonl").read_text().splitlines())
    assert {row["file_name"]: (row["reason"], row["detail"]) for row in rows} == {
        "same file.jpg": ("duplicate_image", "its file is in the dataset already"),
        "held out.jpg": ("split_leak", "its file is in split val of the dataset"),
        "new 100.jpg": ("known_id", "its image id, with another file, is in the dataset already"),
        "new 101.jpg": ("split_leak", "its image id, with another file, is in split val of the dataset"),
    }
    assert verify(dataset) == []


def test_additions_to_additions_and_to_new_splits_are_a_chain(dataset, more, coco, pictures, make_config, tmp_path):
    ids = [Manifest.load(dataset).manifest_id]
    add(dataset, more, make_config)
    ids.append(Manifest.load(dataset).manifest_id)
    third = {f"{i}.jpg": pictures.encode(pictures.photo(i)) for i in range(900, 903)}
    source = coco(tmp_path / "third", third, split="train", first_id=900)
    add(dataset, {"root": str(source), "split": "test"}, make_config)
    manifest = Manifest.load(dataset)
    assert [addition.parent for addition in manifest.additions] == ids
    assert manifest.splits == {"train": 36, "val": 5, "test": 3}
    assert verify(dataset) == []
    assert (dataset / "rejects-2.jsonl").exists()


def test_a_source_of_bad_pictures_adds_nothing(dataset, coco, make_config, tmp_path):
    before = files(dataset)
    source = coco(tmp_path / "bad", {f"{i}.jpg": b"" for i in range(700, 704)} | {"no.jpg": b"x"}, first_id=700)
    with pytest.raises(RejectShareError, match=r"5 of 5 records rejected \(empty_file 4, not_an_image 1\)"):
        add(dataset, source, make_config)
    assert files(dataset) == before
    assert verify(dataset) == []


def test_a_folder_that_is_no_dataset_cannot_be_added_to(more, make_config, tmp_path):
    with pytest.raises(ConfigError, match="there is no such folder"):
        add(tmp_path / "nothing", more, make_config)
    assert not (tmp_path / "nothing").exists()


def test_a_build_does_not_undo_an_addition(dataset, more, photos, make_config):
    add(dataset, more, make_config)
    with pytest.raises(
        ConfigError, match=r"holds a dataset that was added to .*add more with `python -m pipelines add`"
    ):
        run_plain(make_config(photos, dataset))
    run_plain(make_config(photos, dataset, build={"overwrite": True}))
    assert Manifest.load(dataset).parent is None
    assert verify(dataset) == []


def test_the_command_adds(dataset, more, tmp_path, capsys):
    path = tmp_path / "more.yaml"
    path.write_text(json.dumps({"source": str(more), "out": "not used", "build": {"processes": 1}}))
    assert cli.run(main, ["add", str(dataset), str(path), "--plain", "build.records_per_shard=8"]) == 0
    assert "12 added (train 12) to now 41" in capsys.readouterr().out
    assert cli.run(main, ["add", str(dataset), str(path), "--plain", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unchanged"] is True


@pytest.fixture(scope="module")
def slow_source(tmp_path_factory, coco, pictures):
    files = {f"{i}.png": pictures.encode(pictures.photo(i, 320, 240, "RGBA"), "PNG") for i in range(24)}
    return coco(tmp_path_factory.mktemp("slow"), files, first_id=2000)


SETTINGS = {"records_per_shard": 4, "processes": 2}


@pytest.fixture(scope="module")
def reference(tmp_path_factory, built, slow_source, make_config):
    """The data files of the dataset once it was added to undisturbed."""
    folder = shutil.copytree(built, tmp_path_factory.mktemp("reference") / "dataset")
    add(folder, slow_source, make_config, build=SETTINGS)
    return data_of(folder)


def data_of(folder):
    return {name: data for name, data in files(folder).items() if not name.startswith("report")}


def test_a_killed_addition_leaves_the_dataset_whole_and_goes_on(dataset, slow_source, reference, command, tmp_path):
    path = tmp_path / "add.yaml"
    path.write_text(json.dumps({"source": str(slow_source), "out": "x", "build": SETTINGS}))
    before = Manifest.load(dataset)
    for delay_s in (0.6, 1.0, 1.4):
        process = command("add", dataset, path, "--plain")
        began = time.monotonic()
        while time.monotonic() - began < delay_s and process.poll() is None:
            time.sleep(0.01)
        process.kill()
        process.communicate()
        assert verify(dataset) == []
        assert Manifest.load(dataset).shards[: len(before.shards)] == before.shards
    _, errors = command("add", dataset, path, "--plain").communicate(timeout=200)
    assert data_of(dataset) == reference, errors
    assert verify(dataset) == []


@pytest.mark.parametrize("number", [0, 4, 10, 21])
def test_a_kill_at_any_step_of_publishing_is_made_good(
    dataset, reference, number, monkeypatch, slow_source, make_config
):
    """As if the process had died at its n-th change of a name in the folder; verify passes in between."""
    import pipelines.addition as module
    from shards import atomic

    left = number
    real = atomic.publish

    def publish(temporary, path):
        nonlocal left
        if path.parent == dataset:
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
        real(temporary, path)

    monkeypatch.setattr(atomic, "publish", publish)
    monkeypatch.setattr(module, "publish", publish)
    with pytest.raises(KeyboardInterrupt):
        add(dataset, slow_source, make_config, build=SETTINGS)
    monkeypatch.undo()
    assert Manifest.load(dataset).parent is None
    assert verify(dataset) == []
    add(dataset, slow_source, make_config, build=SETTINGS)
    assert data_of(dataset) == reference
    assert verify(dataset) == []
    assert not (dataset / ".build" / "pending.json").exists()


def test_what_a_killed_addition_left_of_a_source_that_changed_is_removed(dataset, more, make_config):
    (dataset / ".build" / "pending.json").write_text(json.dumps({"shards": ["train-000003.tar", "train-000009.tar"]}))
    (dataset / "train-000009.tar").write_bytes(b"half an addition")
    (dataset / "train-000009.tar.idx").write_bytes(b"")
    assert verify(dataset) == []
    add(dataset, more, make_config)
    assert not list(dataset.glob("train-000009*"))
    assert verify(dataset) == []
