import json
from pathlib import Path

import pytest

from pipelines.config import BuildConfig, SourceConfig
from pipelines.sources import open_sources
from pipelines.sources.coco import open_all, read_records
from shards.errors import ConfigError


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


IMAGE = {"id": 7, "file_name": "a.jpg"}
CAPTION = {"id": 1, "image_id": 7, "caption": "a dog"}


def test_captions_stay_in_order_with_their_image(tmp_path):
    captions = [{"id": 9 - i, "image_id": 7, "caption": f"c{i}"} for i in range(7)]
    records, counts = read_records(write(tmp_path / "c.json", {"images": [IMAGE], "annotations": captions}))
    assert records[0].captions == tuple(f"c{i}" for i in range(7))
    assert counts == {}


def test_annotations_that_belong_nowhere_are_counted(tmp_path):
    content = {
        "images": [IMAGE, {**IMAGE, "file_name": "other.jpg"}],
        "annotations": [CAPTION, CAPTION, {"id": 2, "image_id": 8, "caption": "x"}],
    }
    records, counts = read_records(write(tmp_path / "c.json", content))
    assert [(r.file_name, r.captions) for r in records] == [("a.jpg", ("a dog",))]
    assert counts == {
        "images_listed_twice": 1,
        "annotation_ids_used_twice": 1,
        "annotations_of_unlisted_images": 1,
    }


def test_only_plain_values_about_origin_are_kept(tmp_path):
    image = {
        **IMAGE,
        "license": 3,
        "coco_url": "http://x",
        "flickr_url": None,
        "date_captured": float("nan"),
        "height": 4,
    }
    records, _ = read_records(write(tmp_path / "c.json", {"images": [image], "annotations": [CAPTION]}))
    assert records[0].about == {"license": 3, "coco_url": "http://x"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("just text", r"c.json: is not JSON .*; expected a COCO caption file"),
        ("[1, 2]", r"c.json: holds a list, expected a COCO caption file"),
        ({"images": [IMAGE]}, r"'annotations' is missing; expected a COCO caption file"),
        ({"images": 3, "annotations": []}, r"'images' is a int, not a list"),
        ({"images": [], "annotations": []}, r"lists no images"),
        ({"images": ["a"], "annotations": []}, r"images\[0\] is a str"),
        ({"images": [{"id": "7"}], "annotations": [CAPTION]}, r"images\[0\].id is '7', expected an integer"),
        ({"images": [{"id": True}], "annotations": [CAPTION]}, r"images\[0\].id is True, expected an integer"),
        (
            {"images": [{"id": -1}], "annotations": [CAPTION]},
            r"images\[0\].id is -1, expected an integer of at least 0",
        ),
        ({"images": [{}], "annotations": [CAPTION]}, r"images\[0\].id is missing, expected an integer"),
        ({"images": [IMAGE], "annotations": [{"image_id": 1.5, "caption": ""}]}, r"annotations\[0\].image_id is 1.5"),
        ({"images": [IMAGE], "annotations": [{"image_id": 7, "bbox": []}]}, r"none of its 1 annotations has a caption"),
        ("[" * 100_000, r"c.json: is not JSON"),
    ],
)
def test_what_is_no_caption_file_is_refused_in_one_paragraph(tmp_path, content, message):
    path = write(tmp_path / "c.json", content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_records(path)
    assert "\n" not in str(caught.value)


def test_binary_data_is_refused(tmp_path):
    path = tmp_path / "c.json"
    path.write_bytes(b"\xff\xd8\xff\xe0")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_records(path)


def test_a_root_is_enough_and_brings_its_held_out_split(photos):
    train, val = open_sources(BuildConfig(source=photos, out="o"))
    assert (train.split, len(list(train.source.records())), Path(train.source.images).name) == (
        "train",
        24,
        "train2017",
    )
    assert (val.split, len(list(val.source.records())), Path(val.source.images).name) == ("val", 5, "val2017")


def test_the_held_out_split_can_be_left_out(photos):
    assert len(open_sources(BuildConfig(source=photos, out="o", held_out="none"))) == 1


def test_images_may_be_a_zip_beside_the_annotations(tmp_path, photos, zipped):
    (tmp_path / "annotations").symlink_to(photos / "annotations")
    zipped(photos / "train2017", tmp_path / "train2017.zip", "train2017/")
    assert open_all(SourceConfig(root=tmp_path), False)[0].images == str(tmp_path / "train2017.zip")


def test_several_caption_files_are_not_chosen_from(tmp_path):
    for year in (2014, 2017):
        write(tmp_path / f"captions_train{year}.json", "{}")
    message = (
        r"expected one annotations/captions_train\*.json .* found captions_train2014.json, captions_train2017.json"
    )
    with pytest.raises(ConfigError, match=message):
        open_all(SourceConfig(root=tmp_path), False)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"root": "nowhere"}, r"nowhere: does not exist, expected a folder in the official COCO layout"),
        ({"root": "."}, r"expected one annotations/captions_train\*.json for split train, found none"),
        ({"annotations": "no.json", "images": "."}, r"no.json: there is no such file; check source.annotations"),
        ({"annotations": "no.json", "images": "absent"}, r"absent: there is no such folder or zip of images"),
    ],
)
def test_wrong_paths_are_named(tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        open_sources(BuildConfig(source=source, out="o"))
