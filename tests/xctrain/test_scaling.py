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
from xctrain.scaling import Row, as_markdown, duration, last_error, merged, row_of, with_speed_up


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
    assert list(rows) == [1, 2, 5]
    assert rows[5]["note"].startswith("train.global_batch is 12, which is not processes (5) x train.micro_batch (2)")
    assert rows[5]["epoch_s"] is None
    for count in (1, 2):
        assert rows[count]["global_batch"] == 12
        assert rows[count]["epoch_s"] > 0
        assert rows[count]["memory_gb"] > 0.1
        assert rows[count]["bleu4"] is not None
    assert rows[1]["speed_up"] == 1
    assert (out / "scaling.md").read_text() in text

    kept = (out / "scaling.json").read_bytes()
    text = runs.finish(table(drawn_shards, tmp_path, *options, "train.micro_batch=6", "data.workers=0"), code=2)
    assert "its runs were made with data.workers=1, train.micro_batch=2, this table has data.workers=0" in text
    assert "choose another folder with --out" in text
    runs.finish(table(drawn_shards, tmp_path, "--gpus", "5", "--modes", "ddp"), code=1)
    assert (out / "scaling.json").read_bytes() == kept
    assert (out / "ddp-5.log").read_text().count("train.global_batch is 12, which is not") == 3  # of each start


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
    assert "stopped; start again to go on" in runs.finish(process, code=75)
    assert not (tmp_path / "run-scaling" / "ddp-2").exists()


@pytest.mark.parametrize(("number", "delay_s"), [(signal.SIGINT, 0.06), (signal.SIGTERM, 0.15)])
def test_signal_in_the_first_moment_of_a_row_stops_the_table(
    drawn_shards: Path, tmp_path: Path, number: signal.Signals, delay_s: float
) -> None:
    process = table(drawn_shards, tmp_path, "--gpus", "1", "2", "--modes", "ddp")
    assert process.stderr
    assert process.stderr.readline().startswith("ddp on 1:")
    time.sleep(delay_s)
    process.send_signal(number)
    text = runs.finish(process, code=75)
    assert "stopped; start again to go on" in text
    assert "ddp on 2" not in text
    assert not (tmp_path / "run-scaling" / "scaling.json").exists()


def test_failures_with_other_settings_leave_the_table(drawn_shards: Path, tmp_path: Path) -> None:
    runs.finish(table(drawn_shards, tmp_path, "--gpus", "5", "7", "--modes", "ddp"), code=1)
    runs.finish(table(drawn_shards, tmp_path, "--gpus", "5", "--modes", "ddp", "train.micro_batch=5"), code=1)
    rows = json.loads((tmp_path / "run-scaling" / "scaling.json").read_text())
    assert [(row["gpus"], row["micro_batch"]) for row in rows] == [(5, 5)]


def test_table_of_another_kind_is_refused(drawn_shards: Path, tmp_path: Path) -> None:
    values = tmp_path / "run-scaling" / "scaling.json"
    values.parent.mkdir()
    values.write_text('[{"mode": "ddp"}]')
    text = runs.finish(table(drawn_shards, tmp_path, "--gpus", "1"), code=1)
    assert f"{values}: is not a table that this version wrote; choose another folder with --out" in text


def test_counts_and_modes_that_cannot_be_are_refused(drawn_shards: Path, tmp_path: Path) -> None:
    assert "--gpus is 0, expected whole numbers from 1 on" in runs.finish(
        table(drawn_shards, tmp_path, "--gpus", "0"), code=2
    )
    text = runs.finish(table(drawn_shards, tmp_path, "--gpus", "1", "--modes", "dp"), code=2)
    assert "--modes is dp, expected some of ddp, fsdp, zero1, zero2, zero3" in text


def test_reason_of_a_failed_run_is_the_last_error_of_its_newest_start(tmp_path: Path) -> None:
    log = tmp_path / "ddp-2.log"
    log.write_text("\n--- now\nno GPU found: 2 CPU processes\nrank 1: error: a | b\nrank 1: more in logs/rank-1.log\n")
    config: Config = config_of(tmp_path, tmp_path)
    row = row_of(config, 2, "ddp", tmp_path / "ddp-2", failed=True)
    assert row.note == "a | b"
    assert as_markdown([row]).splitlines()[-1] == "| ddp | 2 | 12 | 4 | - | - | - | - | - | - | a \\| b |"
    with log.open("a") as file:
        file.write("\n--- later\nKilled\n")
    assert last_error(log) == "Killed"
    with log.open("a") as file:
        file.write("\n--- last\n")
    assert last_error(log) == "it printed nothing"
    log.write_text("\n--- now\nerror: step-00000012: saved with a=1; set it to 1, or choose another run.dir\n")
    assert last_error(log).endswith("set it to 1, or choose another folder with --out")


def test_rows_are_compared_with_the_first_that_ran() -> None:
    rows = [
        Row("ddp", 1, 8, 2, note="no memory"),
        Row("ddp", 2, 8, 2, epoch_s=60.0),
        Row("ddp", 4, 8, 2, epoch_s=40.0),
    ]
    assert [row.speed_up for row in with_speed_up(rows)] == [None, 1.0, 1.5]


def test_row_takes_its_place_but_a_failure_not_that_of_figures() -> None:
    rows = [Row("ddp", 2, 8, 2, epoch_s=60.0), Row("zero2", 2, 8, 2, note="no memory")]
    rows = merged(rows, Row("ddp", 1, 8, 2, epoch_s=90.0))
    rows = merged(rows, Row("zero2", 2, 8, 2, epoch_s=45.0))
    rows = merged(rows, Row("ddp", 2, 8, 2, note="no shards"))
    assert [(row.mode, row.gpus, row.speed_up) for row in rows] == [("ddp", 1, 1.0), ("ddp", 2, 1.5), ("zero2", 2, 2.0)]
    assert [row.note for row in rows] == ["", "measured before; now: no shards", ""]


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.26, "4.3 s"), (61, "1 min"), (3599, "1 h 00 min"), (7384, "2 h 03 min")]
)
def test_durations_are_said_as_people_do(seconds: float, text: str) -> None:
    assert duration(seconds) == text
