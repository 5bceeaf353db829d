"""Which of the images the path in a row means, absolute and upward ones too."""

import pytest
from tables import KINDS, read, source_of

from pipelines.run import run_plain
from pipelines.sources.paths import Paths
from shards.errors import ConfigError


@pytest.fixture
def disk(tmp_path, pictures):
    """A folder with lists/ and images/ side by side, four pictures in images/."""
    (tmp_path / "lists").mkdir()
    (tmp_path / "images").mkdir()
    for i in range(4):
        (tmp_path / "images" / f"{i}.jpg").write_bytes(pictures.encode(pictures.photo(i)))
    return tmp_path


def listed(disk, kind, name_of):
    return source_of(kind, [{"image": name_of(i), "caption": f"picture {i}"} for i in range(4)], disk / "lists")


WAYS = {
    "below": (lambda disk, i: f"{i}.jpg", lambda disk: disk / "images"),
    "absolute": (lambda disk, i: str(disk / "images" / f"{i}.jpg"), lambda disk: disk / "images"),
    "up from the list": (lambda disk, i: f"../images/{i}.jpg", lambda disk: disk / "images"),
    "up and down again": (lambda disk, i: f"x/../{i}.jpg", lambda disk: disk / "images"),
    "one of two places": (lambda disk, i: str(disk / "images" / f"{i}.jpg"), lambda disk: [disk / "lists", disk / "images"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_write_a_path_into_the_images_names_the_same_record(disk, kind, way):
    name_of, images_of = WAYS[way]
    source = listed(disk, kind, lambda i: name_of(disk, i))
    found = [(r.image_id, r.file_name) for r in read({**source, "images": images_of(disk)})]
    assert found == [(f"{i}.jpg", f"{i}.jpg") for i in range(4)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_root_as_folder_of_images_lets_in_every_absolute_path(disk, make_config, kind):
    source = {**listed(disk, kind, lambda i: str(disk / "images" / f"{i}.jpg")), "images": "/"}
    assert next(r.image_id for r in read(source)) == f"{disk}/images/0.jpg".removeprefix("/")
    assert run_plain(make_config(source, disk / "out")).splits == {"train": 4}


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_all_of_whose_paths_lead_elsewhere_is_told_which_folder_to_name(disk, make_config, kind):
    source = listed(disk, kind, lambda i: str(disk / "images" / f"{i}.jpg"))
    message = rf"not one image of .* \(4\) is in it; .*/images/0.jpg' leads out of it, .*such as {disk}/images$"
    with pytest.raises(ConfigError, match=message):
        run_plain(make_config(source, disk / "out"))
    source = listed(disk, kind, lambda i: f"../images/{i}.jpg")
    with pytest.raises(
        ConfigError, match=r"'../images/0.jpg' leads out of it, .*source.images to a folder above all of"
    ):
        run_plain(make_config(source, disk / "out"))


def test_a_single_row_that_leads_elsewhere_is_rejected_with_what_to_set(disk, make_config, rejects):
    (disk / "images" / "secret.jpg").write_bytes((disk / "images" / "0.jpg").read_bytes())
    rows = [{"image": name, "caption": "x"} for name in ("1.jpg", "../images/../secret.jpg", "/etc/passwd")]
    (disk / "secret.jpg").write_bytes(b"x")
    source = {**source_of("jsonl", rows, disk / "lists"), "images": disk / "images"}
    run_plain(make_config(source, disk / "out", build={"max_reject_share": 1}))
    assert rejects(disk / "out") == dict.fromkeys(("../images/../secret.jpg", "/etc/passwd"), "missing_file")
    assert "source.images has to be a folder above it" in (disk / "out" / "rejects.jsonl").read_text()


def test_a_folder_whose_name_only_begins_alike_is_another_one():
    paths = Paths(["/data/images"])
    for name in ("/data/images2/a.jpg", "/data/images/../images2/a.jpg", "/data/images"):
        assert paths.place(name, ["/data/lists"]) == name
