"""Splits, limits, repeated ids and leaks, over real builds."""

import json
from pathlib import Path

import pytest

from pipelines.addition import Addition
from pipelines.config import BuildConfig
from pipelines.errors import BuildError
from pipelines.run import run_plain
from shards.errors import ConfigError
from shards.manifest import Manifest
from shards.reader import SplitReader


@pytest.fixture(scope="module")
def drawn(tmp_path_factory, pictures):
    """A folder of 120 pictures; the last 20 are copies of the first 20."""
    folder = tmp_path_factory.mktemp("drawn")
    for i in range(120):
        (folder / f"{i}.jpg").write_bytes(pictures.encode(pictures.photo(i % 100, 32, 24)))
    return folder


def pairs(path: Path, numbers, **columns):
    rows = [{"image": f"{i}.jpg", "id": i, "caption": f"number {i}"} for i in numbers]
    rows = [{**row, **{name: value(row["id"]) for name, value in columns.items()}} for row in rows]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def source(path, images, **fields):
    return {"kind": "jsonl", "path": path, "images": images, "id_field": "id", **fields}


def ids_of(out):
    return {
        split: {SplitReader(out, split).read(i).meta["image_id"] for i in range(number)}
        for split, number in Manifest.load(out).splits.items()
    }


HASH = {"by": "hash", "fractions": {"train": 0.7, "val": 0.2, "test": 0.1}}
COPIES_KEPT = {"duplicates": False}


def test_splits_by_hash_have_their_shares_and_copies_land_together(tmp_path, drawn, make_config):
    path = pairs(tmp_path / "pairs.jsonl", range(120))
    run_plain(make_config(source(path, drawn), tmp_path / "out", split=HASH, filters=COPIES_KEPT))
    found = ids_of(tmp_path / "out")
    assert list(found) == ["train", "val", "test"]
    assert [len(ids) for ids in found.values()] == pytest.approx([84, 24, 12], abs=12)
    assert sum(map(len, found.values())) == 120
    for ids in found.values():
        assert all((i + 100 in ids) == (i in ids) for i in range(20))


@pytest.mark.parametrize("number", [1, 5])
def test_a_split_by_hash_that_comes_out_empty_is_said_with_numbers_and_ways_out(tmp_path, drawn, make_config, number):
    path = pairs(tmp_path / "pairs.jsonl", range(number))
    fractions = {"train": 0.98, "val": 0.02}
    message = (
        rf"split val is empty: split.fractions gives it 0.02 of {number} pictures?, {0.02 * number:g} on average, and none fell "
        r"into it; give it a larger fraction \('split.fractions={train: 0.8, val: 0.2}'\), give more pictures, .*held_out"
    )
    config = make_config(source(path, drawn), tmp_path / "out", split={"by": "hash", "fractions": fractions})
    with pytest.raises(ConfigError, match=message):
        run_plain(config)
    assert not list((tmp_path / "out").glob("*.tar"))


def test_an_addition_by_hash_need_not_be_in_every_split(tmp_path, drawn, make_config):
    run_plain(make_config(source(pairs(tmp_path / "a.jsonl", range(60)), drawn), tmp_path / "out", split=HASH))
    few = source(pairs(tmp_path / "b.jsonl", [70]), drawn)
    assert run_plain(make_config(few, tmp_path / "out", split=HASH), Addition).added == {"val": 1}


def test_splits_by_hash_stay_when_data_are_added(tmp_path, drawn, make_config):
    few = source(pairs(tmp_path / "few.jsonl", range(60)), drawn)
    more = source(pairs(tmp_path / "more.jsonl", reversed(range(100))), drawn)
    run_plain(make_config(few, tmp_path / "few", split=HASH))
    run_plain(make_config(more, tmp_path / "more", split=HASH, build={"seed": 9}))
    before, after = ids_of(tmp_path / "few"), ids_of(tmp_path / "more")
    assert all(before[split] <= after[split] for split in before)


def test_official_splits_come_from_a_column(tmp_path, drawn, make_config):
    names = ["train", "validation", "restval", "test", None]
    path = pairs(tmp_path / "pairs.jsonl", range(50), part=lambda i: names[i % 5])
    run_plain(make_config(source(path, drawn, split_field="part"), tmp_path / "out"))
    found = ids_of(tmp_path / "out")
    assert list(found) == ["train", "test", "val"]
    assert found["train"] == {i for i in range(50) if i % 5 in (0, 2)}
    assert found["val"] == {i for i in range(50) if i % 5 == 1}
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["splits"]["train"]["left_aside"] == {"records_without_split": 10}


def test_an_image_that_is_officially_in_two_splits_is_a_leak(tmp_path, drawn, make_config, rejects):
    train, val = (pairs(tmp_path / f"{n}.jsonl", ids) for n, ids in (("train", range(8)), ("val", [3, 8, 9])))
    path = [train, val]
    run_plain(make_config(source(path, drawn), tmp_path / "out", split={"by": "official"}))
    assert ids_of(tmp_path / "out") == {"train": {0, 1, 2, 4, 5, 6, 7}, "val": {3, 8, 9}}
    assert rejects(tmp_path / "out") == {"3.jpg": "split_leak"}


def test_official_splits_come_from_names_of_files(tmp_path, drawn, make_config):
    (tmp_path / "data").mkdir()
    pairs(tmp_path / "data" / "train-00000-of-00001.jsonl", range(20))
    pairs(tmp_path / "data" / "dev.jsonl", range(20, 30))
    run_plain(make_config(source(tmp_path / "data", drawn), tmp_path / "out", split={"by": "official"}))
    assert ids_of(tmp_path / "out") == {"train": set(range(20)), "val": set(range(20, 30))}


def test_official_coco_splits_are_all_files_of_a_root(photos, make_config, data_files, tmp_path):
    run_plain(make_config(photos, tmp_path / "official", split={"by": "official"}))
    run_plain(make_config(photos, tmp_path / "plain"))
    both = [data_files(tmp_path / name) for name in ("official", "plain")]
    for files in both:
        del files["manifest.json"]  # it says how the splits were made
    assert both[0] == both[1]


def test_no_split_at_all_is_an_error(tmp_path, drawn, make_config):
    path = pairs(tmp_path / "pairs.jsonl", range(5))
    with pytest.raises(ConfigError, match=r"split.by=official, but no record says its split; set source.split_field"):
        run_plain(make_config(source(path, drawn), tmp_path / "out", split={"by": "official"}))
    path = pairs(tmp_path / "pairs.jsonl", range(5), split=lambda i: f"Part {i}")
    with pytest.raises(ConfigError, match=r"image 0 has the split 'Part 0', expected a text of a-z 0-9 _ only"):
        run_plain(make_config(source(path, drawn, split_field="split"), tmp_path / "out"))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"split": {"by": "hash", "fractions": {"train": 0.9, "val": 0.2}}}, r"fractions add up to 1.1, expected 1"),
        ({"split": {"by": "hash", "fractions": {"Train": 0.5, "val": 0.5}}}, r"fractions"),
        (
            {"split": {"by": "hash"}, "held_out": {"root": "y"}},
            r"held_out is given, but split.by=hash makes the splits",
        ),
        (
            {"split": {"by": "source"}, "source": {"kind": "csv", "path": "a", "split_field": "s"}},
            r"split.by=source does not",
        ),
        ({"sources": [{"root": "y"}]}, r"give source or sources, one of them"),
        ({"source": None}, r"give source or sources, one of them"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(sections, message):
    with pytest.raises(ValueError, match=message):
        BuildConfig.model_validate({"source": "x", "out": "o", **sections})


def test_a_limit_takes_the_same_records_each_time_and_counts_the_others(tmp_path, drawn, make_config):
    path = pairs(tmp_path / "pairs.jsonl", range(100))
    run_plain(make_config(source(path, drawn, limit=30), tmp_path / "a"))
    chosen = ids_of(tmp_path / "a")["train"]
    assert len(chosen) == 30
    assert chosen != set(range(30))
    report = json.loads((tmp_path / "a" / "report.json").read_text())
    assert report["splits"]["train"]["left_aside"] == {"beyond_limit": 70}
    pairs(path, reversed(range(90)))
    run_plain(make_config(source(path, drawn, limit=30), tmp_path / "b", build={"seed": 3}))
    assert {i for i in chosen if i < 90} <= ids_of(tmp_path / "b")["train"]
    run_plain(make_config(source(path, drawn, limit=40), tmp_path / "c"))
    assert ids_of(tmp_path / "b")["train"] < ids_of(tmp_path / "c")["train"]


def test_several_sources_have_limits_and_counts_of_their_own(tmp_path, drawn, make_config):
    first = source(pairs(tmp_path / "a.jsonl", range(40)), drawn, limit=10, name="first")
    second = source(pairs(tmp_path / "b.jsonl", range(40, 70)), drawn, name="second")
    third = source(pairs(tmp_path / "c.jsonl", range(80, 90)), drawn, split="extra")
    run_plain(make_config(None, tmp_path / "out", sources=[first, second, third]))
    splits = ids_of(tmp_path / "out")
    assert splits["extra"] == set(range(80, 90))
    assert sum(i.startswith("first-") for i in splits["train"]) == 10
    assert {i for i in splits["train"] if i.startswith("second-")} == {f"second-{i}" for i in range(40, 70)}
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    counted = [(s["name"], s["kept"], s["left_aside"]) for s in report["sources"]]
    assert counted == [("first", 10, {"beyond_limit": 30}), ("second", 30, {}), (None, 10, {})]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<td>images beyond the limit of their source</td><td>30</td>" in page


def test_sources_that_number_their_images_alike_are_told_to_have_names(tmp_path, drawn, make_config, pictures):
    other = tmp_path / "other"
    other.mkdir()
    for i in range(5):
        (other / f"{i}.jpg").write_bytes(pictures.encode(pictures.photo(i + 500)))
    both = [source(pairs(tmp_path / f"{n}.jsonl", range(5)), images) for n, images in (("a", drawn), ("b", other))]
    with pytest.raises(
        ConfigError, match=r"b.jsonl: image id 0 is '0.jpg', in .*a.jsonl it is '0.jpg'; .*give them a name"
    ):
        run_plain(make_config(None, tmp_path / "out", sources=both))
    named = [{**s, "name": n} for s, n in zip(both, "ab", strict=True)]
    run_plain(make_config(None, tmp_path / "out", sources=named))
    assert len(ids_of(tmp_path / "out")["train"]) == 10


def test_an_id_that_stands_for_two_pictures_keeps_the_first_and_is_counted(tmp_path, drawn, make_config):
    rows = [{"image": f"{i}.jpg", "id": i % 4, "caption": f"number {i}"} for i in range(8)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run_plain(make_config(source(tmp_path / "pairs.jsonl", drawn), tmp_path / "out"))
    reader = SplitReader(tmp_path / "out", "train")
    assert {reader.read(i).meta["file_name"] for i in range(len(reader))} == {f"{i}.jpg" for i in range(4)}
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["splits"]["train"]["left_aside"] == {"ids_used_twice": 4}


def test_a_number_and_its_text_are_one_id(tmp_path, drawn, make_config):
    rows = [{"image": "1.jpg", "id": i, "caption": f"as {type(i).__name__}"} for i in (17, "17")]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run_plain(make_config(source(tmp_path / "pairs.jsonl", drawn), tmp_path / "out"))
    sample = SplitReader(tmp_path / "out", "train").read(0)
    assert (sample.key, sample.captions) == ("000000000017", ("as int", "as str"))


@pytest.mark.parametrize("by", ["id", "bytes"])
def test_a_leak_between_splits_fails_the_build_where_that_is_wanted(tmp_path, drawn, make_config, rejects, by):
    train = source(pairs(tmp_path / "train.jsonl", range(10)), drawn)
    val = source(pairs(tmp_path / "val.jsonl", [3, 50] if by == "id" else [103, 50]), drawn)
    out = tmp_path / "out"
    message = r"1 record of one split stand in another too, for example 3 of split train: .* split val.*leaks=reject"
    with pytest.raises(BuildError, match=message):
        run_plain(make_config(train, out, held_out=val, filters={"leaks": "fail"}))
    assert not (out / "manifest.json").exists()
    run_plain(make_config(train, out, held_out=val))
    assert rejects(out) == {"3.jpg": "split_leak"}
    assert ids_of(out)["train"] == set(range(10)) - {3}


def test_an_addition_deals_new_records_as_a_build_of_all_would(tmp_path, drawn, make_config):
    path = pairs(tmp_path / "pairs.jsonl", range(40))
    config = make_config(source(path, drawn), tmp_path / "out", split=HASH, build={"max_reject_share": 1})
    run_plain(config)
    pairs(path, range(90))
    run_plain(config, Addition)
    run_plain(make_config(source(path, drawn), tmp_path / "all", split=HASH))
    assert ids_of(tmp_path / "out") == ids_of(tmp_path / "all")
