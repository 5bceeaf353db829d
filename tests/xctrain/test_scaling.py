"""The scaling table: the same job on each number of processes, failures as rows, finished rows kept."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import runs
from small import config_of

from xctrain.config import Config
from xctrain.scaling import Row, as_markdown, duration, last_error, row_of, with_speed_up


def table(shards: Path, folder: Path, *more: str) -> "runs.subprocess.Popen[str]":
    """The command, on the tiny LLaVA."""
    settings = runs.settings(
        shards, folder / "run", train__num_steps=12, train__save_every=2, eval__num_images=4, eval__max_new_tokens=3
    )
    return runs.start([sys.executable, "-m", "xctrain", "scaling", os.devnull, *settings, *more])


def test_killed_table_goes_on_and_a_failed_count_is_a_row(drawn_shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "run-scaling"
    options = ["--gpus", "1", "5", "2", "--modes", "ddp"]
    process = table(drawn_shards, tmp_path, *options)
    until = time.monotonic() + 200
    while runs.last_step(out / "ddp-2") < 5:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    text = runs.finish(table(drawn_shards, tmp_path, *options), code=1)

    starts = [[line["resumed_from"] for line in runs.events(out / f"ddp-{n}", "start")] for n in (1, 2)]
    assert starts[0] == [None]  # what was finished is not run again
    assert starts[1][0] is None
    assert starts[1][1] >= 2
    rows = {row["gpus"]: row for row in json.loads((out / "scaling.json").read_text())}
    assert list(rows) == [1, 5, 2]
    assert rows[5]["note"].startswith("train.global_batch is 12, which is not processes (5) x train.micro_batch (2)")
    assert rows[5]["epoch_s"] is None
    for count in (1, 2):
        assert rows[count]["global_batch"] == 12
        assert rows[count]["epoch_s"] > 0
        assert rows[count]["memory_gb"] > 0.1
        assert rows[count]["bleu4"] is not None
    assert rows[1]["speed_up"] == 1
    assert (out / "scaling.md").read_text() in text


@pytest.mark.slow
def test_zero2_is_measured_as_ddp_is(drawn_shards: Path, tmp_path: Path) -> None:
    runs.finish(table(drawn_shards, tmp_path, "--gpus", "1", "2"), timeout_s=900)
    rows = json.loads((tmp_path / "run-scaling" / "scaling.json").read_text())
    assert [(row["mode"], row["gpus"]) for row in rows] == [("ddp", 1), ("ddp", 2), ("zero2", 1), ("zero2", 2)]
    assert all(row["epoch_s"] and row["bleu4"] is not None for row in rows)


def test_stopped_table_says_so(drawn_shards: Path, tmp_path: Path) -> None:
    process = table(drawn_shards, tmp_path, "--gpus", "1", "2", "--modes", "ddp", "train.num_steps=5000")
    until = time.monotonic() + 200
    while not runs.last_step(tmp_path / "run-scaling" / "ddp-1"):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert "stopped after saving; start again to go on" in runs.finish(process, code=75)
    assert not (tmp_path / "run-scaling" / "ddp-2").exists()


def test_counts_and_modes_that_cannot_be_are_refused(drawn_shards: Path, tmp_path: Path) -> None:
    assert "--gpus is 0, expected whole numbers from 1 on" in runs.finish(
        table(drawn_shards, tmp_path, "--gpus", "0"), code=2
    )
    text = runs.finish(table(drawn_shards, tmp_path, "--gpus", "1", "--modes", "dp"), code=2)
    assert "--modes is dp, expected some of ddp, fsdp, zero1, zero2, zero3" in text


def test_reason_of_a_failed_run_is_its_last_error(tmp_path: Path) -> None:
    log = tmp_path / "ddp-2.log"
    log.write_text("no GPU found: 2 CPU processes\nrank 1: error: a | b\nrank 1: more in logs/rank-1.log\n")
    config: Config = config_of(tmp_path, tmp_path)
    row = row_of(config, 2, "ddp", tmp_path, failed=True)
    assert row.note == "a | b"
    assert as_markdown([row]).splitlines()[-1] == "| ddp | 2 | 12 | - | - | - | - | - | - | a \\| b |"
    log.write_text("Killed\n")
    assert last_error(log) == "Killed"
    log.write_text("")
    assert last_error(log) == "it printed nothing"


def test_rows_are_compared_with_the_first_that_ran() -> None:
    rows = [Row("ddp", 1, 8, note="no memory"), Row("ddp", 2, 8, epoch_s=60.0), Row("ddp", 4, 8, epoch_s=40.0)]
    assert [row.speed_up for row in with_speed_up(rows)] == [None, 1.0, 1.5]


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.26, "4.3 s"), (61, "1 min"), (3599, "1 h 00 min"), (7384, "2 h 03 min")]
)
def test_durations_are_said_as_people_do(seconds: float, text: str) -> None:
    assert duration(seconds) == text
