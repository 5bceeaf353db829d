import json

import pytest

from pipelines.config import BuildConfig
from pipelines.run import run_plain
from pipelines.sources import open_sources
from shards.errors import ConfigError
from shards.manifest import Manifest

COUNTS = {"train": 82_783, "restval": 30_504, "val": 5_000, "test": 5_000}


def split_file(folder, counts, dataset="coco", **fields):
    """A split file with that many images of each split."""
    images = [
        {"filename": f"{split}_{i}.jpg", "split": split, "sentences": [{"raw": f"number {i}"}], **fields}
        for split, count in counts.items()
        for i in range(count)
    ]
    (folder / "dataset_coco.json").write_text(json.dumps({"dataset": dataset, "images": images}))
    return {"kind": "karpathy", "root": folder}


def opened(source):
    return open_sources(BuildConfig.model_validate({"source": source, "out": "o"}))[0].source


def test_the_official_file_has_the_official_counts(tmp_path):
    assert len(list(opened(split_file(tmp_path, COUNTS)).records())) == 123_287


def test_a_file_without_restval_is_refused_with_what_it_holds(tmp_path):
    source = split_file(tmp_path, {**COUNTS, "restval": 0})
    message = (
        r"holds train 82,783, test 5,000, val 5,000, expected train 113,287, test 5,000, val 5,000 \(restval belongs to "
        r"train\); fetch the official file, or say what is right with source.expected_counts"
    )
    with pytest.raises(ConfigError, match=message):
        opened(source)
    opened({**source, "expected_counts": {"train": 82_783, "val": 5_000, "test": 5_000}})


@pytest.mark.parametrize(("dataset", "counts"), [("coco", {"train": 50, "val": 5}), ("flickr30k", COUNTS)])
def test_what_is_plainly_not_the_whole_of_coco_is_not_counted(tmp_path, dataset, counts):
    opened(split_file(tmp_path, counts, dataset))


def test_counts_that_are_asked_for_are_checked_of_any_file(tmp_path):
    source = {**split_file(tmp_path, {"train": 4, "val": 1}), "expected_counts": {"train": 5, "val": 1}}
    with pytest.raises(ConfigError, match=r"holds train 4, val 1, expected train 5, val 1"):
        opened(source)


@pytest.mark.parametrize("packed", [False, True])
def test_images_of_both_years_folders_are_found_and_dealt(tmp_path, make_config, pictures, zipped, packed):
    images = []
    for i in range(30):
        folder, split = ("train2014", "train") if i < 20 else ("val2014", ("restval", "val", "test")[i % 3])
        name = f"COCO_{folder}_{i:012d}.jpg"
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_bytes(pictures.encode(pictures.photo(i)))
        sentences = [{"raw": f"number {i}", "tokens": ["number", str(i)]}]
        images.append({"filepath": folder, "filename": name, "cocoid": i, "split": split, "sentences": sentences})
    if packed:
        for folder in ("train2014", "val2014"):
            zipped(tmp_path / folder, tmp_path / f"{folder}.zip", f"{folder}/")
            (tmp_path / folder).rename(tmp_path / f"unpacked-{folder}")
    (tmp_path / "dataset_coco.json").write_text(json.dumps({"dataset": "coco", "images": images}))
    run_plain(make_config({"kind": "karpathy", "root": tmp_path}, tmp_path / "out"))
    assert Manifest.load(tmp_path / "out").splits == {"train": 23, "test": 4, "val": 3}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", r"lists no images; expected a Karpathy split file"),
        ('{"images": [{"filename": "a.jpg", "sentences": []}]}', r"images\[0\] is .*expected a Karpathy split file"),
        ('{"images": [3]}', r"images\[0\] is 3"),
        ("nothing", r"is not JSON .*expected a Karpathy split file"),
    ],
)
def test_what_is_no_split_file_is_refused(tmp_path, content, message):
    (tmp_path / "dataset_coco.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        opened({"kind": "karpathy", "root": tmp_path})


def test_a_root_without_a_split_file_says_what_was_looked_for(tmp_path):
    with pytest.raises(ConfigError, match=r"expected one dataset_\*.json, found none; give source.annotations"):
        opened({"kind": "karpathy", "root": tmp_path})
