import os
import zipfile

import pytest

from pipelines.filters import Reason, Rejection
from pipelines.images import open_images
from shards.errors import ConfigError


@pytest.fixture
def folder(tmp_path):
    images = tmp_path / "images"
    (images / "sub").mkdir(parents=True)
    (images / "a.jpg").write_bytes(b"aaa")
    (images / "sub" / "b c.JPG").write_bytes(b"bb")
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    return images


@pytest.mark.parametrize("top", ["", "train2017/"])
def test_a_zip_reads_like_the_folder(folder, tmp_path, zipped, top):
    archive = open_images(zipped(folder, tmp_path / "images.zip", top))
    for name in ("a.jpg", "sub/b c.JPG"):
        assert archive.read(name) == open_images(folder).read(name)
        assert archive.stamp(name)[0] == open_images(folder).stamp(name)[0]
    assert archive.stamp("absent.jpg") == open_images(folder).stamp("absent.jpg")


@pytest.mark.parametrize(
    "name", ["../secret.jpg", "sub/../../secret.jpg", "/etc/passwd", "..\\secret.jpg", "a\0.jpg", "", None, 7, "\ud800"]
)
def test_no_name_leads_out_of_the_images(folder, tmp_path, zipped, name):
    for images in (open_images(folder), open_images(zipped(folder, tmp_path / "i.zip", ""))):
        found = images.stamp(name)
        assert isinstance(found, Rejection)
        assert found.reason is Reason.MISSING_FILE
        assert str(tmp_path) not in found.detail


@pytest.mark.parametrize("top", ["", "train2017/"])
@pytest.mark.parametrize(
    "name",
    ["./a.jpg", "sub//b c.JPG", "sub/./b c.JPG", "a.jpg/", "a.jpg/x", "sub", "sub/", ".", "A.jpg", "n" * 300, "a" + "/b" * 3000]
)  # fmt: skip
def test_odd_names_have_the_same_verdict_in_a_zip(folder, tmp_path, zipped, top, name):
    archive = open_images(zipped(folder, tmp_path / "images.zip", top))
    found, expected = archive.stamp(name), open_images(folder).stamp(name)
    assert type(found) is type(expected)
    if isinstance(expected, Rejection):
        assert found == expected
    else:
        assert archive.read(name) == open_images(folder).read(name)


def test_the_detail_names_the_sign_that_no_name_may_hold(folder):
    details = [open_images(folder).stamp(name).detail for name in ("a\\b.jpg", "a\0.jpg", "../a.jpg")]
    assert details == [
        "file_name holds a backslash, expected / between folders",
        "file_name holds a NUL, which no name of a file can",
        "file_name leads out of the images folder; it was not followed",
    ]


def test_what_is_no_file_is_unreadable_and_is_not_waited_for(folder):
    os.mkfifo(folder / "pipe.jpg")
    (folder / "dir.jpg").mkdir()
    for name in ("pipe.jpg", "dir.jpg"):
        assert open_images(folder).stamp(name) == Rejection(Reason.UNREADABLE_FILE, "is not a regular file")


def test_a_stamp_changes_with_the_file(folder):
    before = open_images(folder).stamp("a.jpg")
    times = (folder / "a.jpg").stat()
    (folder / "a.jpg").write_bytes(b"AAA")
    os.utime(folder / "a.jpg", ns=(times.st_atime_ns, times.st_mtime_ns))  # as if nothing had happened
    assert open_images(folder).stamp("a.jpg") != before


def test_a_damaged_member_is_unreadable(folder, tmp_path):
    path = tmp_path / "damaged.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.jpg", b"A" * 1000)
    path.write_bytes(path.read_bytes().replace(b"A" * 1000, b"A" * 999 + b"B"))
    found = open_images(path).read("a.jpg")
    assert isinstance(found, Rejection)
    assert found.reason is Reason.UNREADABLE_FILE
    assert "Bad CRC-32" in found.detail


def test_wrong_paths_are_refused(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    for path, message in (
        (tmp_path / "empty", "the folder of images is empty"),
        (tmp_path / "absent", "there is no such folder or zip of images"),
        (tmp_path / "secret.jpg", "is neither a folder nor a zip"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_images(path)


def test_a_file_that_several_places_have_is_not_chosen_from(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "both.jpg").write_bytes(name.encode())
        (tmp_path / name / f"{name}.jpg").write_bytes(name.encode())
    images = open_images({"kind": "several", "places": [str(tmp_path / "one"), str(tmp_path / "two")]})
    assert (images.read("one.jpg"), images.read("two.jpg")) == (b"one", b"two")
    assert images.stamp("both.jpg") == Rejection(
        Reason.MISSING_FILE, "2 of the places of images have it; say which is meant"
    )
    assert images.stamp("none.jpg") == open_images(tmp_path / "one").stamp("none.jpg")
