"""The same job on several numbers of GPUs and in several parallel modes, as one table."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

from shards.atomic import write_file
from shards.parent import die_with_parent
from shards.places import require_folder
from shards.settings import load_settings
from xctrain import checkpoint, resume
from xctrain.compare import flatten
from xctrain.config import Config
from xctrain.errors import ConfigError, RunError
from xctrain.history import History
from xctrain.log import METRICS, read_lines
from xctrain.processes import EXIT_STOPPED

TABLE, VALUES, SETTINGS = "scaling.md", "scaling.json", "scaling.yaml"
_FREE = ("run.dir", "parallel.mode", "train.resume_with")  # not of the table's settings
_POLL_S = 0.05
_HEADS = (
    "mode | GPUs | global batch | micro-batch | time per epoch | samples/s | speed-up | memory per GPU | data wait | BLEU-4"
    " | note"
)


@dataclass(frozen=True)
class Row:
    """What one mode on one number of GPUs gave; of a run that failed, why."""

    mode: str
    gpus: int
    global_batch: int
    micro_batch: int
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
    row with its reason. The table is written after each row, and keeps the rows that earlier starts have measured. A signal
    ends the whole table; the run under way is no row then.

    Raises:
        ConfigError: the table in ``out`` is of other settings.
    """
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: asked.append(number))
    require_folder(out, "--out")
    out.mkdir(parents=True, exist_ok=True)
    rows = begin_table(config, out)
    failed = False
    for mode, count in product(modes, gpus):
        folder = out / folder_name(mode, count)
        print(f"{mode} on {count}: {folder}", file=sys.stderr, flush=True)
        code = run_one(config, arguments, count, mode, folder, asked)
        if asked or code == EXIT_STOPPED:
            log = folder.with_suffix(".log")
            print(f"stopped; start again to go on; {log} says how far this run came", file=sys.stderr)
            return EXIT_STOPPED
        failed |= code != 0
        rows = merged(rows, row_of(config, count, mode, folder, failed=code != 0))
        write_file(out / VALUES, json.dumps([asdict(row) for row in rows], indent=1).encode())
        write_file(out / TABLE, (as_markdown(rows) + "\n").encode())
    print(as_markdown(rows))
    return 1 if failed else 0


def begin_table(config: Config, out: Path) -> list[Row]:
    """The rows that are there already; none, and the settings written down, where nothing was measured with others.

    Raises:
        ConfigError: something was.
        RunError: the table is not one of this version.
    """
    path, values = out / SETTINGS, out / VALUES
    before = load_settings(Config, path) if path.exists() else config
    was, now = (dict(flatten(each.model_dump(mode="json"))) for each in (before, config))
    changed = [name for name in was | now if was.get(name) != now.get(name) and name not in _FREE]
    try:
        rows = [Row(**row) for row in json.loads(values.read_bytes())] if values.exists() else []
    except (ValueError, TypeError):
        raise RunError(
            f"{values}: is not a table that this version wrote; choose another folder with --out, or move this one away",
            path=values,
        ) from None
    if changed and (any(row.epoch_s for row in rows) or any(out.glob("*/checkpoints/step-*"))):
        found, here = (", ".join(f"{name}={each.get(name)}" for name in changed) for each in (was, now))
        raise ConfigError(
            f"{out}: its runs were made with {found}, this table has {here}; their rows cannot be compared: choose another "
            "folder with --out, or go on with the settings of before, or remove this folder to measure anew",
            path=out,
        )
    if changed:
        values.unlink(missing_ok=True)  # failures alone, of settings that are given up
    if changed or not path.exists():
        write_file(path, config.to_yaml().encode())
    return [] if changed else rows


def merged(rows: Sequence[Row], new: Row) -> list[Row]:
    """The rows with ``new`` in its place. What was measured once stays when that fails now, and the note says why."""
    found = {(row.mode, row.gpus): row for row in rows}
    before = found.get((new.mode, new.gpus))
    if before and before.epoch_s and not new.epoch_s:
        new = replace(before, note=f"measured before; now: {new.note}")
    found[new.mode, new.gpus] = new
    modes = list(dict.fromkeys(row.mode for row in found.values()))
    return with_speed_up(sorted(found.values(), key=lambda row: (modes.index(row.mode), row.gpus)))


def folder_name(mode: str, gpus: int) -> str:
    """Name of a run's folder in that of the table."""
    return f"{mode}-{gpus}"


def run_one(config: Config, arguments: Sequence[str], gpus: int, mode: str, folder: Path, asked: Sequence[int]) -> int:
    """Train, or go on; exit code. What the run prints goes to the end of a file beside its folder.

    Each signal that comes to stand in ``asked`` is passed on, also one that came before the run was there to receive it.
    """
    # Scored before the first and after the last step, unless more often; with zero3 no run can score.
    every = "null" if mode == "zero3" else config.eval.every or 10**9
    settings = [f"run.dir={folder}", f"parallel.mode={mode}", f"eval.every={every}"]
    command = ["-m", "xctrain", "launch", *arguments, *settings, "--processes", str(gpus)]
    with folder.with_suffix(".log").open("ab") as log:
        log.write(f"\n--- {time.strftime('%Y-%m-%d %H:%M:%S')} python {shlex.join(command)}\n".encode())
        log.flush()
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        passed_on = 0
        while (code := process.poll()) is None:
            for _ in asked[passed_on:]:
                process.terminate()  # for Ctrl-C too, which code that is being imported may swallow
                passed_on += 1
            time.sleep(_POLL_S)
    return code


def row_of(config: Config, gpus: int, mode: str, folder: Path, *, failed: bool) -> Row:
    """What the run's log says."""
    row = Row(mode, gpus, config.train.global_batch, config.train.micro_batch)
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
    """The error that a run printed last since its newest start, in one line, with the advice that holds for a table."""
    newest = log.read_text(errors="replace").rpartition("\n--- ")[2]
    lines = newest.splitlines()[1:] or ["it printed nothing"]
    errors = [found[1] for line in lines if (found := re.match(r"(?:rank \d+: )?error: (.*)", line))]
    return (errors or lines)[-1].replace("choose another run.dir", "choose another folder with --out")


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
            str(row.micro_batch),
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
