"""One rule for every command: the same cause ends each of them with the same exit code, and one paragraph."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shards import cli
from shards.__main__ import main

COMMANDS: dict[str, list[str]] = {
    "ls": [],
    "show": ["000000000000"],
    "preview": ["--out", "PAGE"],
    "verify": [],
    "stats": [],
    "plan": ["--global-batch", "2"],
    "energon": [],
    "index": [],
}


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1024)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[600] ^= 1
    path.write_bytes(data)


# What was asked for is not there: 2. What is there is not what it should be: 1.
CAUSES: dict[str, tuple[int, Callable[[Path], Any]]] = {
    "no folder": (2, shutil.rmtree),
    "a file": (2, lambda d: (shutil.rmtree(d), d.write_text("x"))),
    "an empty folder": (2, lambda d: (shutil.rmtree(d), d.mkdir())),
    "a damaged manifest": (1, lambda d: (d / "manifest.json").write_text("{")),
    "a manifest of another tool": (1, lambda d: (d / "manifest.json").write_text("[]")),
    "a tar that is gone": (1, lambda d: (d / "train-000000.tar").unlink()),
    "a tar that is cut": (1, lambda d: cut(d / "train-000000.tar")),
    "an index that is gone": (1, lambda d: (d / "train-000000.tar.idx").unlink()),
    "an index that is cut": (1, lambda d: os.truncate(d / "train-000000.tar.idx", 8)),
    "a list that is gone": (1, lambda d: (d / "train-000000.meta.jsonl").unlink()),
    "a list that is cut": (1, lambda d: os.truncate(d / "train-000000.meta.jsonl", 9)),
}
READING_BYTES = ("show", "preview", "verify")  # the others look at names, sizes and lists
MAKES_THEM = ("index",)  # or says of its tars what is wrong with them: see test_indexing.py


def run(command: str, folder: Path, tmp_path: Path, *more: str) -> int:
    options = [str(tmp_path / "page.html") if o == "PAGE" else o for o in COMMANDS[command]]
    try:
        return cli.run(main, [command, str(folder), *options, *more])
    except SystemExit as caught:  # argparse's own
        return int(caught.code or 0)


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        (command, cause)
        for command in COMMANDS
        for cause in CAUSES
        if command not in MAKES_THEM or not cause.startswith(("a tar", "an index", "a list"))
    ],
)
def test_a_cause_has_one_exit_code_in_every_command(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, cause: str
) -> None:
    expected, harm = CAUSES[cause]
    harm(dataset)
    assert run(command, dataset, tmp_path) == expected
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert said.err.count("\n") <= 1
    assert str(dataset) in said.err or "train-000000" in said.out + said.err


@pytest.mark.parametrize("command", COMMANDS)
def test_changed_bytes_end_with_1_whoever_reads_them(dataset: Path, tmp_path: Path, command: str) -> None:
    flip(dataset / "train-000000.tar")
    expected = 2 if command in MAKES_THEM else 1 if command in READING_BYTES else 0
    assert run(command, dataset, tmp_path) == expected


BAD_ARGUMENTS = {
    "an unknown option": ("ls", ["--no-such-option"]),
    "an unknown key": ("show", ["nobody"]),
    "an unknown split, plan": ("plan", ["--split", "nobody"]),
    "an unknown split, preview": ("preview", ["--split", "nobody"]),
    "a number out of range, plan": ("plan", ["--gpus", "0"]),
    "a number out of range, preview": ("preview", ["--num", "0"]),
    "a number that is none": ("plan", ["--gpus", "many"]),
    "no such folder to write to, preview": ("preview", ["--out", "/nowhere/page.html"]),
    "no such folder to write to, show": ("show", ["000000000000", "--out", "/nowhere/a.jpg"]),
    "no such folder to write to, verify": ("verify", ["--quarantine", "/nowhere/q.json"]),
    "a split without a pattern": ("index", ["--split", "train"]),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_a_bad_argument_is_wrong_usage(dataset: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    command, arguments = BAD_ARGUMENTS[case]
    try:
        code: Any = cli.run(main, [command, str(dataset), *arguments])
    except SystemExit as caught:
        code = caught.code
    assert code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_ctrl_c_before_there_is_anything_to_go_on_with_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(_: Any) -> int:
        raise KeyboardInterrupt

    assert cli.run(stopped, []) == 130
    assert capsys.readouterr().err == "stopped by Ctrl-C\n"
