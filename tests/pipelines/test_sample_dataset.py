import json

import pytest
from PIL import Image

from pipelines.run import run_plain
from pipelines.sample import Scene, Thing, choose_scenes, draw_dataset
from shards.errors import ConfigError
from shards.manifest import Manifest


def files(root):
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_the_same_seed_draws_the_same_bytes(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert draw_dataset(tmp_path / name, 15, seed) == {"train": 15, "val": 2}
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert files(tmp_path / "a") != files(tmp_path / "c")


def test_it_has_the_official_layout_and_all_of_it_is_kept(tmp_path, make_config):
    draw_dataset(tmp_path / "sample", 30, 0)
    assert {"captions_train2017.json", "captions_val2017.json"} == {
        p.name for p in (tmp_path / "sample" / "annotations").iterdir()
    }
    with Image.open(tmp_path / "sample" / "train2017" / "000000000001.jpg") as image:
        assert (image.size, image.mode) == ((320, 240), "RGB")
    run_plain(make_config(tmp_path / "sample", tmp_path / "out"))
    assert Manifest.load(tmp_path / "out").splits == {"train": 30, "val": 4}


def test_no_scene_occurs_twice_so_held_out_ones_are_new():
    scenes = choose_scenes(1700, 0)
    assert len(set(scenes)) == 1700
    assert 400 < sum(len(s.things) == 1 for s in scenes) < 700


def test_captions_say_only_what_the_picture_shows():
    big, small = Thing("large", "red", "circle"), Thing("small", "blue", "square")
    assert Scene("white", "left", (big,)).captions() == (
        "a large red circle at the left on white",
        "large red circle at the left",
        "on white a large red circle at the left",
        "white picture with a large red circle at the left",
        "at the left a large red circle on white",
    )
    assert Scene("gray", "left of", (big, small)).captions()[4] == (
        "a small blue square right of a large red circle on gray"
    )
    assert all(len(set(scene.captions())) == 5 for scene in choose_scenes(100, 3))


def test_drawing_again_changes_nothing_and_never_writes_over_something_else(tmp_path):
    draw_dataset(tmp_path / "a", 15, 0)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "a").rglob("*")}
    draw_dataset(tmp_path / "a", 15, 0)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "a").rglob("*")} == before
    with pytest.raises(ConfigError, match="is there already and is not this dataset; choose another folder"):
        draw_dataset(tmp_path / "a", 16, 0)


def test_more_scenes_than_there_are_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"1133333 pictures are asked for; there are \d+ different scenes"):
        draw_dataset(tmp_path / "a", 1_000_000, 0)


def test_annotation_ids_are_unique(tmp_path):
    draw_dataset(tmp_path / "a", 40, 0)
    content = json.loads((tmp_path / "a" / "annotations" / "captions_train2017.json").read_text())
    assert len({a["id"] for a in content["annotations"]}) == 5 * 40
