"""Logs that can be cut back."""

import json
import re
import resource
from pathlib import Path

import pytest

from shards.errors import UserError
from xctrain.log import METRICS, JsonLines, cut_back, keys_name, read_lines


def line_of(n: int) -> str:
    """A line that may stand in each of the logs."""
    return json.dumps({"event": "save", "step": 1, "samples_consumed": n, "n": [], "keys": []}) + "\n"


def write(path: Path, *positions: int, tail: str = "") -> None:
    path.write_text("".join(map(line_of, positions)) + tail)


def positions(path: Path) -> list[int]:
    return [line["samples_consumed"] for line in read_lines(path)]


def test_written_line_is_whole_for_a_reader_at_once(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / METRICS)
    log.write(event="note", step=1, text="größer")
    assert list(read_lines(tmp_path / METRICS)) == [{"event": "note", "step": 1, "text": "größer"}]
    log.close()


def test_cut_back_keeps_what_the_checkpoint_counts_on_in_every_log(tmp_path: Path) -> None:
    names = [METRICS, keys_name(0), keys_name(1), keys_name(11)]
    for name in names:
        write(tmp_path / name, 12, 24, 24, 36)
    cut_back(tmp_path, 24)
    assert [positions(tmp_path / name) for name in names] == [[12, 24, 24]] * 4


@pytest.mark.parametrize("tail", ['{"samples_consumed": 12', '{"samples_consumed": 12}', "\x00\x00\n", "5\n", "{}\n"])
def test_cut_back_drops_lines_that_are_torn_or_no_event(tmp_path: Path, tail: str) -> None:
    write(tmp_path / METRICS, 12, tail=tail)
    cut_back(tmp_path, 100)
    assert (tmp_path / METRICS).read_text() == line_of(12)


def test_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path / METRICS, 12, 24, tail='{"samples_con')
    assert positions(tmp_path / METRICS) == [12, 24]


DAMAGE = [
    (METRICS, '{"samples', "is not JSON"),
    (METRICS, "12", "is no JSON object"),
    (METRICS, '{"note": "mine"}', "has no event"),
    (METRICS, '{"event": null}', "has null as event, expected text"),
    (METRICS, '{"event": []}', r"has \[\] as event, expected text"),
    (METRICS, '{"event": "save"}', "has no step"),
    (METRICS, '{"event": "step", "step": 3}', "has no samples_consumed"),
    (METRICS, '{"event": "eval", "step": "3"}', 'has "3" as step, expected a whole number'),
    (keys_name(3), '{"step": 3, "samples_consumed": 24}', "has no n"),
    (keys_name(3), '{"step": 3, "samples_consumed": 24, "n": [1], "keys": []}', "has 1 position and 0 keys"),
]


@pytest.mark.parametrize(("name", "line", "found"), DAMAGE)
def test_damaged_line_in_the_middle_is_named(tmp_path: Path, name: str, line: str, found: str) -> None:
    path = tmp_path / name
    path.write_text(f"{line_of(1)}{line}\n{line_of(2)}")
    with pytest.raises(UserError, match=rf"{name}: line 2 {found}; put it back .* gone for the audit.*train.resume="):
        positions(path)
    damaged: list[str] = []
    assert [line["samples_consumed"] for line in read_lines(path, damaged)] == [1, 2]
    [text] = damaged
    assert re.fullmatch(rf"{path}: line 2 {found}", text)


def test_damaged_line_of_captions_may_be_removed(tmp_path: Path) -> None:
    captions = tmp_path / "step-00000001.jsonl"
    captions.write_text("{\n{}\n")
    with pytest.raises(UserError, match=r"line 1 is not JSON; remove that line"):
        list(read_lines(captions))


def test_full_disk_is_named_with_the_log(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / METRICS)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(UserError, match=r"metrics.jsonl: cannot be written: File too large; make room, then start"):
            log.write(event="note", text="longer than ten bytes")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.close()


def test_absent_log_has_no_lines(tmp_path: Path) -> None:
    assert positions(tmp_path / METRICS) == []
    cut_back(tmp_path, 5)
    assert not list(tmp_path.iterdir())
