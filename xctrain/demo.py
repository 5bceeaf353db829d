"""The main job end to end, as a person would type it: sample data, flow, training, a kill, resume, audit, report."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shards import cli
from shards.atomic import write_file
from xctrain.errors import RunError
from xctrain.log import METRICS, JsonLines, read_lines

SOURCE = Path("data/sample")
SHARDS = Path("data/sample-shards")
RUN = Path("runs/make-demo")
CONFIG = "configs/demo.yaml"
PROCESSES = 2
_KILL_AFTER_SHARE = 0.45  # of the run, and not right behind a save: some steps must be lost and done again


def main(_argv: Sequence[str]) -> int:
    """Run the demo; exit code."""
    began = time.monotonic()
    shutil.rmtree(RUN, ignore_errors=True)
    say("a sample dataset in COCO layout, and its shards through a Prefect flow")
    python("pipelines", "sample", "--out", SOURCE)
    python("pipelines", "build", "configs/build.yaml", f"source.root={SOURCE}", f"out={SHARDS}")
    python("shards", "verify", SHARDS)
    say(f"training on {PROCESSES} processes, to be killed on the way")
    killed_at = train_and_kill()
    say(f"every process was ended by SIGKILL at step {killed_at}; the same command goes on from the last checkpoint")
    python("xctrain", *train_arguments())
    say("proof: each sample of every epoch exactly once")
    python("xctrain", "audit", RUN)
    say("what the step that was under way at the kill held")
    python("xctrain", "batch", RUN, "--step", killed_at + 1, "--out", RUN / "killed-step.html")
    say("what the trained model says of blank pictures")
    blank = json.loads(python("xctrain", "evaluate", CONFIG, *settings(), "eval.blank=true", "--json", capture=True))
    bleu4 = {name: round(value, 4) for name, value in {**scores(), "blank": blank["bleu4"]}.items()}
    log_blank(blank)
    python("xctrain", "report", RUN)
    minutes = (time.monotonic() - began) / 60
    result = {"bleu4": bleu4, "killed_at_step": killed_at, "minutes": round(minutes, 1)}
    write_file(RUN / "demo.json", json.dumps(result, indent=1).encode())
    print(
        f"\nBLEU-4 on held-out pictures: {bleu4['untrained']:.3f} untrained, {bleu4['trained']:.3f} trained, "
        f"{bleu4['blank']:.3f} trained but blind\nlook at {RUN / 'report.html'} ({minutes:.1f} minutes)"
    )
    return 0


def settings() -> list[str]:
    """What the demo sets on top of the config."""
    return [f"run.dir={RUN}", f"data.shards={SHARDS}"]


def train_arguments() -> list[str]:
    """The command that starts the run and, after a kill, goes on with it."""
    return ["launch", CONFIG, "--processes", str(PROCESSES), *settings()]


def train_and_kill() -> int:
    """Start training, kill launcher and ranks by SIGKILL past the middle; the step that had been reached.

    Raises:
        RunError: training ended before it could be killed.
    """
    command = [sys.executable, "-m", "xctrain", *train_arguments()]
    show(command)
    process = subprocess.Popen(command, start_new_session=True)
    try:
        while process.poll() is None:
            step, saved = progress()
            if step >= kill_step() and step >= saved + 3:
                os.kill(process.pid, signal.SIGKILL)  # the ranks go with their launcher
                process.wait()
                return progress()[0]
            time.sleep(0.05)
    finally:
        if process.poll() is None:
            process.kill()
    raise RunError(
        f"{RUN}: training ended with exit code {process.returncode} before it was killed; see its output above"
    )


def kill_step() -> int:
    """First step at which the run may be killed."""
    from shards.settings import load_settings
    from xctrain.config import Config

    num_steps = load_settings(Config, Path(CONFIG)).train.num_steps
    assert num_steps is not None
    return int(num_steps * _KILL_AFTER_SHARE)


def progress() -> tuple[int, int]:
    """Last step that was logged, and last step that was saved."""
    step = saved = 0
    for line in read_lines(RUN / METRICS):
        step = max(step, line["step"]) if line["event"] == "step" else step
        saved = line["step"] if line["event"] == "save" else saved
    return step, saved


def scores() -> dict[str, float]:
    """BLEU-4 of the first and the last evaluation."""
    evaluations = [line for line in read_lines(RUN / METRICS) if line["event"] == "eval"]
    return {"untrained": evaluations[0]["bleu4"], "trained": evaluations[-1]["bleu4"]}


def log_blank(blank: dict[str, Any]) -> None:
    """Put the score of blank pictures in the run's log, for its report."""
    last = [line for line in read_lines(RUN / METRICS) if line["event"] == "step"][-1]
    log = JsonLines(RUN / METRICS)
    log.write(event="eval", step=last["step"], samples_consumed=last["samples_consumed"], **blank)
    log.close()


def python(module: str, *arguments: object, capture: bool = False) -> str:
    """Run a module of the project; its output if captured.

    Raises:
        RunError: it failed.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    show(command)
    done = subprocess.run(command, stdout=subprocess.PIPE if capture else None, text=True, check=False)
    if done.returncode:
        raise RunError(f"`{shlex.join(command[1:])}` ended with exit code {done.returncode}; see its output above")
    return done.stdout or ""


def show(command: Sequence[str]) -> None:
    """Print a command as one would type it."""
    print(f"$ python {shlex.join(command[1:])}", flush=True)


def say(text: str) -> None:
    """A heading."""
    print(f"\n=== {text}", flush=True)


if __name__ == "__main__":
    cli.run_and_exit(main)
