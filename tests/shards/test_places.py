"""Places to write that cannot be one: said before any work, with the setting that names them."""

import os
from pathlib import Path

import pytest

from shards.errors import ConfigError
from shards.places import require_file, require_folder


@pytest.fixture
def places(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    os.mkfifo(tmp_path / "pipe")  # as /dev/null, no file to be replaced, and nobody's but ours
    return tmp_path


LONG = "x" * 300


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file", r"out is .*file, which is a file, expected a folder; choose another$"),
        ("file/below/it", r"out is .*it, but .*file is a file, expected a folder; choose another$"),
        ("pipe", r"out is .*pipe, which is a file, expected a folder"),
        ("gone", r"out is .*gone, which is a link to .*nothing, which does not exist; choose another$"),
        ("circle", r"out is .*circle, which is a link to .*circle, which does not exist"),
        ("circle/below", r"out is .*below, where nothing can be written \(Too many levels of symbolic links\)"),
        (LONG, r"out is .*, where nothing can be written \(File name too long\); choose another$"),
        ("/proc/xctrain", r"out is /proc/xctrain, where nothing can be written \(No such file or directory\); choose"),
        ("/sys/xctrain", r"out is /sys/xctrain, where nothing can be written \(.*\); choose another"),
    ],
)
def test_a_folder_that_cannot_be_made_is_named_with_its_setting(places: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        require_folder(places / name, "out")
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", r"--page is .*, that is a folder; give a file in a folder that is there$"),
        ("no/page.html", r"--page is .*page.html, there is no folder .*no; give a file in a folder that is there$"),
        ("file/page.html", r"--page is .*page.html, there is no folder .*file; give"),
        ("circle", r"--page is .*circle, where nothing can be written \(Too many levels of symbolic links\); give"),
        (LONG, r"--page is .*, where nothing can be written \(File name too long\); give"),
        ("/proc/page.html", r"--page is /proc/page.html, where nothing can be written \(No such file or directory\)"),
        ("/sys/page.html", r"--page is /sys/page.html, where nothing can be written"),
    ],
)
def test_a_file_that_cannot_be_written_is_named_with_its_setting(places: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        require_file(places / name, "--page")
    assert error.value.exit_code == 2


def test_looking_at_a_place_leaves_nothing(places: Path) -> None:
    before = sorted(places.rglob("*"))
    require_folder(places / "new" / "out", "out")
    require_folder(places, "out")
    require_file(places / "new.html", "--page")
    require_file(places / "new" / "page.html", "--page", parents=True)
    require_file(places / "file", "--page")
    assert sorted(places.rglob("*")) == before
    assert (places / "file").read_text() == "mine"


def test_a_device_or_a_pipe_can_be_written_to(places: Path) -> None:
    require_file(places / "pipe", "--page")
    require_file(Path("/dev/null"), "--page")
