"""The same job on several numbers of GPUs and in several parallel modes, as one table."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from types import FrameType
from typing import Any

from shards.atomic import write_file
from xctrain import checkpoint, resume
from xctrain.config import Config
from xctrain.errors import RunError
from xctrain.history import History
from xctrain.log import METRICS, read_lines
from xctrain.processes import EXIT_STOPPED, die_with_parent

TABLE, VALUES = "scaling.md", "scaling.json"
_HEADS = (
    "mode | GPUs | global batch | time per epoch | samples/s | speed-up | memory per GPU | data wait | BLEU-4 | note"
)


@dataclass(frozen=True)
class Row:
    """What one mode on one number of GPUs gave; of a run that failed, why."""

    mode: str
    gpus: int
    global_batch: int
    epoch_s: float | None = None  # samples of an epoch, at the median time of a step
    samples_per_s: float | None = None
    speed_up: float | None = None  # over the table's first row that ran
    memory_gb: float | None = None  # most that rank 0's GPU held, or its process where there is none
    data_wait: float | None = None  # mean wait for data, as a share of a step
    bleu4: float | None = None  # after the last step
    note: str = ""  # why it failed, or what is odd about it


def measure(config: Config, arguments: Sequence[str], gpus: Sequence[int], modes: Sequence[str], out: Path) -> int:
    """Run the job of ``config``, which ``arguments`` give on a command line, in each way; exit code.

    A run in ``out`` that is complete already is not run again; one that was stopped or killed goes on. One that fails is a
    row with its reason. The table is written after each row.
    """
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for mode in modes:
        for count in gpus:
            print(f"{mode} on {count}: {out / folder_name(mode, count)}", file=sys.stderr, flush=True)
            code = run_one(config, arguments, count, mode, out)
            if code == EXIT_STOPPED:
                print("stopped after saving; start again to go on", file=sys.stderr)
                return EXIT_STOPPED
            rows.append(row_of(config, count, mode, out, failed=code != 0))
            rows = with_speed_up(rows)
            write_file(out / VALUES, json.dumps([asdict(row) for row in rows], indent=1).encode())
            write_file(out / TABLE, (as_markdown(rows) + "\n").encode())
    print(as_markdown(rows))
    return 1 if any(row.epoch_s is None for row in rows) else 0


def folder_name(mode: str, gpus: int) -> str:
    """Name of a run's folder in that of the table."""
    return f"{mode}-{gpus}"


def run_one(config: Config, arguments: Sequence[str], gpus: int, mode: str, out: Path) -> int:
    """Train, or go on; exit code. What the run prints goes to a file beside its folder."""
    folder = out / folder_name(mode, gpus)
    # Scored before the first and after the last step, unless more often; with zero3 no run can score.
    every = "null" if mode == "zero3" else config.eval.every or 10**9
    settings = [f"run.dir={folder}", f"parallel.mode={mode}", f"eval.every={every}"]
    command = [sys.executable, "-m", "xctrain", "launch", *arguments, *settings, "--processes", str(gpus)]
    with folder.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True, preexec_fn=partial(die_with_parent, os.getpid())
        )

        def forward(number: int, _frame: FrameType | None) -> None:
            process.send_signal(number)

        before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            return process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def row_of(config: Config, gpus: int, mode: str, out: Path, *, failed: bool) -> Row:
    """What the run's log says."""
    folder = out / folder_name(mode, gpus)
    row = Row(mode, gpus, config.train.global_batch)
    if failed:
        return replace(row, note=last_error(folder.with_suffix(".log")))
    history = History.read(folder)
    steps: list[Any] = list(history.steps)
    newest = resume.newest_checkpoint(folder)
    if not steps or newest is None:
        raise RunError(
            f"{folder}: is complete, but holds no step or no checkpoint; remove it and start again", path=folder
        )
    state, _ = checkpoint.read_position(newest)
    step_s = median(step["step_s"] for step in steps)  # evaluations and saves lie in a few steps, which it leaves out
    samples_per_s = config.train.global_batch / step_s
    scores = [event["bleu4"] for event in history.evals if event["step"] == state.step]
    halved = [e["micro_batch"] for e in read_lines(folder / METRICS) if e["event"] == "out_of_memory"]
    return replace(
        row,
        epoch_s=state.segments[-1].num_samples / samples_per_s,
        samples_per_s=samples_per_s,
        memory_gb=max(step["max_memory_gb"] for step in steps),
        data_wait=mean(step["data_wait_s"] for step in steps) / step_s,
        bleu4=scores[-1] if scores else None,
        note=f"out of memory: went on with train.micro_batch={halved[-1]}" if halved else "",
    )


def last_error(log: Path) -> str:
    """The error that a run printed last, in one line."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if re.match(r"(rank \d+: )?error: ", line)]
    return (errors or lines or ["it printed nothing"])[-1].partition("error: ")[2] or (lines or ["it printed nothing"])[
        -1
    ]


def with_speed_up(rows: Sequence[Row]) -> list[Row]:
    """The rows, each compared with the first that ran."""
    first = next((row.epoch_s for row in rows if row.epoch_s), None)
    return [replace(row, speed_up=first / row.epoch_s) if first and row.epoch_s else row for row in rows]


def as_markdown(rows: Sequence[Row]) -> str:
    """The table; what is not known is a dash."""
    lines = [_HEADS, " | ".join(["---"] * len(_HEADS.split("|")))]
    for row in rows:
        cells = [
            row.mode,
            str(row.gpus),
            str(row.global_batch),
            "-" if row.epoch_s is None else duration(row.epoch_s),
            "-" if row.samples_per_s is None else f"{row.samples_per_s:.4g}",
            "-" if row.speed_up is None else f"{row.speed_up:.2f}",
            "-" if row.memory_gb is None else f"{row.memory_gb:.2f} GB",
            "-" if row.data_wait is None else f"{row.data_wait:.1%}",
            "-" if row.bleu4 is None else f"{row.bleu4:.3f}",
            row.note.replace("|", "\\|"),
        ]
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def duration(seconds: float) -> str:
    """As people say it."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
