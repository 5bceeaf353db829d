"""Commands as real processes: what they print, how they end, and what they leave behind."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import pytest
import runs
from small import audit_of, train_here

from xctrain.checkpoint import Checkpoints

COMMANDS = ["train", "launch", "evaluate", "plan", "audit", "batch", "caption", "report", "doctor"]
LOST = "lost another rank ("


def test_help_of_every_command_needs_no_torch() -> None:
    code = f"""
import io, sys
from contextlib import redirect_stdout
from xctrain.__main__ import main
import shards.__main__, pipelines.__main__
programs = [(main, []), (shards.__main__.main, []), (pipelines.__main__.main, [])]
programs += [(main, [name]) for name in {COMMANDS!r}]
for program, words in programs:
    out = io.StringIO()
    try:
        with redirect_stdout(out):
            program([*words, "--help"])
    except SystemExit as end:
        assert not end.code, (words, end.code)
    assert "usage:" in out.getvalue(), (words, out.getvalue())
heavy = [n for n in ("torch", "transformers", "accelerate", "prefect", "numpy", "pydantic") if n in sys.modules]
assert not heavy, heavy
"""
    runs.finish(runs.start([sys.executable, "-c", code]))


@pytest.mark.parametrize("package", ["shards", "pipelines", "xctrain"])
def test_version_is_that_of_the_project(package: str) -> None:
    done = subprocess.run([sys.executable, "-m", package, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"xctrain {version('xctrain')}\n"


def test_planning_auditing_and_launching_need_no_torch(drawn_shards: Path, tmp_path: Path) -> None:
    train_here(drawn_shards, tmp_path)
    code = f"""
import sys
from xctrain.__main__ import main
import xctrain.start, xctrain.resume, xctrain.session
assert main(["audit", {str(tmp_path)!r}]) == 0
assert main(["batch", {str(tmp_path)!r}, "--step", "3"]) == 0
assert "torch" not in sys.modules
"""
    assert "OK: every sample of the order exactly once" in runs.finish(runs.start([sys.executable, "-c", code]))


def test_config_that_cannot_work_exits_2_before_any_rank_starts(drawn_shards: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "xctrain", "launch", os.devnull, "--processes", "5"]
    text = runs.finish(runs.start([*command, *runs.settings(drawn_shards, tmp_path / "run")]), code=2)
    assert text.startswith("error: train.global_batch is 12, which is not processes (5) x train.micro_batch (2) x")
    assert not (tmp_path / "run").exists()


def test_fewer_processes_than_asked_for_are_refused(drawn_shards: Path, tmp_path: Path) -> None:
    arguments = [*runs.settings(drawn_shards, tmp_path / "run", train__micro_batch=1), "train.processes=4"]
    text = runs.finish(runs.start(runs.rank_command(arguments)), code=2)
    assert "error: 4 processes were asked for, the launcher started 1; start with `python -m xctrain launch" in text
    assert "Traceback" not in text
    assert not (tmp_path / "run").exists()


def test_accelerate_launch_that_falls_short_is_refused(drawn_shards: Path, tmp_path: Path) -> None:
    arguments = [*runs.settings(drawn_shards, tmp_path / "run", train__micro_batch=1), "train.processes=4"]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "4"]
    launcher += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    process = runs.start([*launcher, *runs.rank_command(arguments)[1:]])
    _, text = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "error: 4 processes were asked for, the launcher started 1;" in text


def test_full_disk_while_saving_keeps_the_older_checkpoint(drawn_shards: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_here(drawn_shards, run, stop_asked=lambda: runs.last_step(run) == 4, train__micro_batch=2)
    limit = (run / "checkpoints" / "step-00000005" / "optimizer.safetensors").stat().st_size - 1
    arguments = runs.settings(drawn_shards, run, train__num_steps=10)

    def limit_size() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    text = runs.finish(runs.start(runs.rank_command(arguments), preexec_fn=limit_size), code=1)
    [error] = [line for line in text.splitlines() if line.startswith("error: ")]
    assert error.startswith(f"error: {run}/checkpoints/step-00000010: cannot be written: ")
    assert "File too large" in error
    assert error.endswith("the newest whole checkpoint is step-00000005; make room, then start again to go on")
    assert "Traceback" not in text
    checkpoints = Checkpoints(run / "checkpoints", keep=2)
    assert checkpoints.newest_valid() == (checkpoints.path(5), [])
    assert [p.name for p in checkpoints.folder.iterdir()] == ["step-00000005"]


def test_not_finite_loss_on_one_rank_stops_both_before_the_update(drawn_shards: Path, tmp_path: Path) -> None:
    arguments = [*runs.settings(drawn_shards, tmp_path, data__workers=0), "train.processes=2"]
    script = str(runs.TESTS / "xctrain" / "small.py")
    text = runs.finish(launched([sys.executable, script, "75", *arguments], 2), code=1)

    [error] = [line for line in text.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: step 7: loss is nan, gradient norm is nan; nothing was updated; first of its micro")
    assert "Traceback" not in text
    folder = tmp_path / "not-finite" / "step-00000007-n72"
    losses = {row["loss"] for rank in (0, 1) for row in json.loads((folder / f"rank{rank}.json").read_text())}
    assert len(losses) == 6
    assert "nan" in losses
    assert runs.last_step(tmp_path) == 6
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]


def launched(command: list[str], processes: int) -> "subprocess.Popen[str]":
    code = f"import sys; from xctrain.launch import launch; sys.exit(launch({command!r}, {processes}))"
    return runs.start([sys.executable, "-c", code])


def endless(shards: Path, run: Path, processes: int = 1) -> "subprocess.Popen[str]":
    """A run that has made some steps and would go on for a long time."""
    arguments = runs.settings(shards, run, train__num_steps=10**6, train__save_every=10**6, train__log_keys=False)
    process = runs.launcher(arguments, processes)
    until = time.monotonic() + 120
    while runs.last_step(run) < 3:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.02)
    return process


def descendants(pid: int) -> list[int]:
    """Every process below one, by /proc."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it has ended
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


def gone(pids: list[int]) -> bool:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if not any(state(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def state(pid: int) -> str | None:
    """Its state letter; None for a process that is no more."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None
    return None if letter in "ZX" else letter


def test_second_process_in_a_run_folder_is_refused_and_a_killed_launcher_leaves_nothing_behind(
    drawn_shards: Path, tmp_path: Path
) -> None:
    process = endless(drawn_shards, tmp_path)
    below = descendants(process.pid)
    assert len(below) >= 2, "a rank and its loader worker"
    text = runs.finish(runs.start(runs.rank_command(runs.settings(drawn_shards, tmp_path))), code=1)
    assert f"error: {tmp_path}: process {below[0]} is training in it; wait for it, end it, or choose another" in text
    assert "Traceback" not in text

    process.kill()
    process.communicate()
    assert gone(below)


@pytest.mark.parametrize("moment", range(3))
def test_killed_loader_worker_is_said_wherever_its_rank_is(drawn_shards: Path, tmp_path: Path, moment: int) -> None:
    process = endless(drawn_shards, tmp_path, processes=2)
    time.sleep(0.003 * moment)
    below = descendants(process.pid)
    os.kill(next(pid for pid in below if parent(pid) != process.pid), signal.SIGKILL)
    text = runs.finish(process, code=1)
    assert re.search(r"error: .*DataLoader worker \(pid(\(s\))? \d+\) (is killed by signal: Killed|exited)", text), text
    assert "memory" in text
    assert "start again to go on" in text
    assert "Traceback" not in text
    assert gone(below)


def test_killed_rank_ends_the_others_and_is_named(drawn_shards: Path, tmp_path: Path) -> None:
    process = endless(drawn_shards, tmp_path, processes=2)
    below = descendants(process.pid)
    ranks = [pid for pid in below if parent(pid) == process.pid]
    os.kill(ranks[1], signal.SIGKILL)
    text = runs.finish(process, code=1)
    assert text.endswith("rank 1 was ended by SIGKILL; start again to go on from the newest checkpoint\n")
    assert f"error: rank 0: {LOST}" in text
    assert "Traceback" not in text
    assert gone(below)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_ctrl_c_saves_and_exits_75(drawn_shards: Path, tmp_path: Path) -> None:
    process = endless(drawn_shards, tmp_path)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    text = runs.finish(process, code=75)
    step = runs.last_step(tmp_path)
    assert f"stopped after saving step {step}; start again to go on, {12 * step} samples" in text
    assert "Traceback" not in text
    assert audit_of(tmp_path).step == step


LAUNCHERS = {
    "torchrun": "torch.distributed.run --standalone --nproc_per_node 2",
    "accelerate": "accelerate.commands.launch --multi_gpu --num_processes 2 --main_process_port 0 --num_machines 1 "
    "--mixed_precision no --dynamo_backend no",
}


@pytest.mark.parametrize("name", sorted(LAUNCHERS))
def test_train_starts_under_other_launchers(drawn_shards: Path, tmp_path: Path, name: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("train: {num_steps: 3}\n")
    arguments = runs.settings(drawn_shards, tmp_path / "run", train__num_steps=3)
    command = [sys.executable, "-m", *LAUNCHERS[name].split(), "-m", "xctrain", "train", str(config), *arguments]
    runs.finish(runs.start([*command, "train.processes=2"]))
    result = audit_of(tmp_path / "run")
    assert (result.ok, result.step) == (True, 3)
    assert len(list((tmp_path / "run").glob("keys-rank*.jsonl"))) == 2
