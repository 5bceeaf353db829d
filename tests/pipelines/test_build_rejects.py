"""What a build rejects before any picture is decoded, and when it publishes nothing for it."""

import json
import re
from pathlib import Path

import pytest
from builds import copied

from pipelines.errors import RejectShareError
from pipelines.filters import Reason
from pipelines.run import run_plain
from shards.manifest import Manifest
from shards.verify import verify


def test_the_reasons_are_those_of_the_shard_format():
    text = (Path(__file__).resolve().parents[2] / "docs" / "design.md").read_text(encoding="utf-8")
    [names] = re.findall(r"Rejection reasons, a fixed list: `([a-z_, ]+)`", text)
    assert set(names.split(", ")) == set(Reason)


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
