"""Checkpoints that are written while training goes on, and what may happen to a run meanwhile. Real processes."""

import json
import os
import random
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ballast
import owndisk
import pytest
import runs

from xctrain.checkpoint import Checkpoints

HEAVY = 4.0  # millions of parameters: files of 48 MB, whose writing takes some steps
STEPS = 20


def launcher(
    shards: Path,
    run: Path,
    processes: int,
    heavy: dict[str, float] | None = None,
    preexec_fn: Any = None,
    grace_s: float = 5.0,
    **changes: Any,
) -> "subprocess.Popen[str]":
    """Ranks of the heavy model under the project's launcher."""
    arguments = runs.settings(shards, run, **{"train__num_steps": STEPS, **changes})
    command = ballast.command([*arguments, f"train.processes={processes}"], **(heavy or {"millions": HEAVY}))
    code = (
        f"import sys; from xctrain import launch; launch._GRACE_S = {grace_s}; "
        f"sys.exit(launch.launch({command!r}, {processes}))"
    )
    return runs.start([sys.executable, "-c", code], preexec_fn=preexec_fn)


def wait_for(what: Callable[[], Any], process: "subprocess.Popen[str]") -> None:
    until = time.monotonic() + 120
    while not what() and process.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.001)


def under_way(run: Path) -> list[Path]:
    """Checkpoints that are being written."""
    return list((run / "checkpoints").glob(".step-*.tmp"))


def newest(run: Path) -> Path | None:
    return Checkpoints(run / "checkpoints", keep=2).newest_valid()[0]


def step_of(checkpoint: Path) -> str:
    return checkpoint.name.removeprefix(".")  # one that is whole but not renamed yet


def lines(run: Path) -> list[tuple[str, int]]:
    found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["event"], line["step"]) for line in found if line["event"] in ("step", "save")]


@pytest.fixture(scope="module")
def straight_run(drawn_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A run of so many processes that nothing ever happened to."""
    found: dict[int, Path] = {}

    def run_of(processes: int) -> Path:
        if processes not in found:
            run = tmp_path_factory.mktemp("straight") / "run"
            runs.finish(launcher(drawn_shards, run, processes, checkpoint__asynchronous=False))
            found[processes] = run
        return found[processes]

    return run_of


def same(run: Path, other: Path, step: int = STEPS) -> bool:
    return runs.trajectory(run) == runs.trajectory(other) and runs.weights(run, step) == runs.weights(other, step)


@pytest.mark.parametrize("processes", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3)), 2])
def test_kill_at_any_moment_of_a_save_loses_nothing_of_the_checkpoint_before(
    drawn_shards: Path, tmp_path: Path, straight_run: Callable[[int], Path], processes: int
) -> None:
    straight, killed = straight_run(processes), tmp_path / "killed"
    draws = random.Random(processes)
    inside = 0
    for _ in range(4):
        before = newest(killed)
        process = launcher(drawn_shards, killed, processes)
        wait_for(lambda: under_way(killed), process)
        time.sleep(draws.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        time.sleep(0.2)  # ranks end with their launcher
        inside += bool(under_way(killed))
        after = newest(killed)
        assert before is None or (after is not None and step_of(after) >= step_of(before))
    runs.finish(launcher(drawn_shards, killed, processes))
    assert inside > 1
    assert same(killed, straight)


def test_training_goes_on_while_a_checkpoint_is_written(
    drawn_shards: Path, tmp_path: Path, straight_run: Callable[[int], Path]
) -> None:
    runs.finish(launcher(drawn_shards, tmp_path, 2))
    found = lines(tmp_path)
    assert found.index(("save", 5)) > found.index(("step", 6))
    assert [line for line in found if line[0] == "save"] == [("save", n) for n in (5, 10, 15, 20)]
    for line in runs.events(tmp_path, "save"):
        assert 0 < line["blocked_s"] < line["save_s"]
    assert same(tmp_path, straight_run(2))
    # Written at once, each stands right behind its step.
    found = lines(straight_run(2))
    assert [found[i - 1] for i, line in enumerate(found) if line[0] == "save"] == [("step", n) for n in (5, 10, 15, 20)]


def test_rank_that_dies_during_a_save_leaves_it_time_to_end(drawn_shards: Path, tmp_path: Path) -> None:
    run, large = tmp_path / "run", {"millions": 25.0}  # 300 MB: takes longer than the moment that others are given
    process = launcher(drawn_shards, run, 2, large, grace_s=0.1)
    wait_for(lambda: under_way(run), process)
    [begun] = under_way(run)
    os.kill(rank_of(process, 1), signal.SIGKILL)
    before = runs.last_step(run)
    text = runs.finish(process, code=1)
    assert "rank 1 was ended by SIGKILL" in text
    saved = newest(run)
    assert saved is not None
    assert f".{saved.name}.tmp" == begun.name
    assert not under_way(run)
    assert runs.last_step(run) <= before + 1  # no rank went on meanwhile


def rank_of(process: "subprocess.Popen[str]", rank: int) -> int:
    """Process id of a launcher's rank."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    [pid] = [pid for pid in children if f"\0RANK={rank}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()]
    return int(pid)


def test_sigterm_during_a_save_waits_for_it_and_saves_what_came_after(
    drawn_shards: Path, tmp_path: Path, straight_run: Callable[[int], Path]
) -> None:
    process = launcher(drawn_shards, tmp_path, 2)
    wait_for(lambda: under_way(tmp_path), process)
    process.send_signal(signal.SIGTERM)
    runs.finish(process, code=75)
    saved = newest(tmp_path)
    assert saved is not None
    assert saved.name == f"step-{runs.last_step(tmp_path):08d}"
    assert not under_way(tmp_path)
    runs.finish(launcher(drawn_shards, tmp_path, 2))
    assert same(tmp_path, straight_run(2))


def test_sigterm_during_an_evaluation_ends_it_and_saves(drawn_shards: Path, tmp_path: Path) -> None:
    scored = {"eval__every": 3, "eval__num_images": 2, "eval__max_new_tokens": 1, "train__num_steps": 6}
    slow = {"caption_s": 0.5}
    process = launcher(drawn_shards, tmp_path / "stopped", 2, slow, **scored)
    wait_for(lambda: runs.last_step(tmp_path / "stopped") >= 3, process)  # right after its line it is evaluated
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    runs.finish(process, code=75)
    stopped = newest(tmp_path / "stopped")
    assert stopped is not None
    assert stopped.name in ("step-00000003", "step-00000004")
    runs.finish(launcher(drawn_shards, tmp_path / "stopped", 2, slow, **scored))
    runs.finish(launcher(drawn_shards, tmp_path / "straight", 2, {"caption_s": 0.0}, **scored))
    assert same(tmp_path / "stopped", tmp_path / "straight", 6)
    assert [line["step"] for line in runs.events(tmp_path / "stopped", "eval")] == [0, 3, 6]


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM])
def test_evaluation_that_is_cut_is_made_up_for_and_what_was_due_is_saved_before(
    drawn_shards: Path, tmp_path: Path, kill: signal.Signals
) -> None:
    scored = {"eval__every": 3, "eval__num_images": 6, "eval__max_new_tokens": 1, "train__num_steps": 6}
    scored |= {"train__save_every": 3, "checkpoint__best": "loss", "eval__micro_batch": 1}
    slow, run = {"caption_s": 1.0}, tmp_path / "cut"
    for step in (3, 6):
        process = launcher(drawn_shards, run, 2, slow, **scored)
        wait_for(lambda: newest(run) == run / "checkpoints" / f"step-{step:08d}", process)  # noqa: B023 - called here
        process.send_signal(kill)
        runs.finish(process, code=75 if kill == signal.SIGTERM else -9)
        assert step not in [line["step"] for line in runs.events(run, "eval")]
    text = runs.finish(launcher(drawn_shards, run, 2, {"caption_s": 0.0}, **scored))
    assert "done: step 6" in text
    runs.finish(launcher(drawn_shards, tmp_path / "straight", 2, {"caption_s": 0.0}, **scored))
    assert same(run, tmp_path / "straight", 6)
    for name in ("step", "loss"):
        found = [[line[name] for line in runs.events(each, "eval")] for each in (run, tmp_path / "straight")]
        assert found[0] == found[1]
    assert [line["step"] for line in runs.events(run, "eval")] == [0, 3, 6]


def test_sigterm_during_the_first_step_saves_after_it(drawn_shards: Path, tmp_path: Path) -> None:
    length = {"train__num_steps": 3}
    process = launcher(drawn_shards, tmp_path / "stopped", 2, {"forward_s": 0.3}, **length)
    wait_for(lambda: runs.events(tmp_path / "stopped", "start"), process)
    process.send_signal(signal.SIGTERM)
    text = runs.finish(process, code=75)
    assert "stopped after saving step 1; start again to go on" in text
    assert runs.last_step(tmp_path / "stopped") == 1
    runs.finish(launcher(drawn_shards, tmp_path / "stopped", 2, {"forward_s": 0.0}, **length))
    runs.finish(launcher(drawn_shards, tmp_path / "straight", 2, {"forward_s": 0.0}, **length))
    assert same(tmp_path / "stopped", tmp_path / "straight", 3)


def test_disk_that_is_full_meanwhile_ends_all_ranks_with_the_message_of_a_save(
    drawn_shards: Path, tmp_path: Path
) -> None:
    runs.finish(launcher(drawn_shards, tmp_path, 2, train__num_steps=5))
    limit = (tmp_path / "checkpoints" / "step-00000005" / "optimizer.safetensors").stat().st_size // 2

    def limit_size() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    longer = {"train__num_steps": 10**4, "train__resume_with": "train.num_steps", "train__log_keys": False}
    text = runs.finish(launcher(drawn_shards, tmp_path, 2, preexec_fn=limit_size, **longer), code=1)
    [error] = [line for line in text.splitlines() if line.startswith("error: ")]
    assert error.startswith(f"error: {tmp_path}/checkpoints/step-00000010: cannot be written: ")
    assert error.endswith("the newest whole checkpoint is step-00000005; make room, then start again to go on")
    assert "Traceback" not in text
    assert 10 < runs.last_step(tmp_path) < 100  # it went on meanwhile, and ended soon
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]


def test_disk_that_becomes_too_small_is_said_before_anything_is_written(drawn_shards: Path, tmp_path: Path) -> None:
    """A real one: a file system in memory of a name space of its own, first small, then larger."""
    disk, result = tmp_path / "disk", tmp_path / "result"
    for folder in (disk, result):
        folder.mkdir()
    # 64 MB stay free for logs. A checkpoint has 24 MB: there is room for one, and later for another beside it.
    arguments = runs.settings(drawn_shards, disk / "run", train__num_steps=10, checkpoint__asynchronous=True)
    train = shlex.join(ballast.command(arguments, millions=2.0))
    script = (
        f"{train} 2> {result}/errors; echo $? > {result}/code\n"
        f"ls -a {disk}/run/checkpoints > {result}/names\n"
        f"{owndisk.resize(disk, '400m')}\n"
        f"{train} && cp -r {disk}/run {result}\n"
    )
    done = owndisk.run(disk, "100m", script)
    assert done.returncode == 0, done.stderr
    [error] = [line for line in (result / "errors").read_text().splitlines() if line.startswith("error: ")]
    assert error.startswith(f"error: {disk}/run/checkpoints/step-00000010: needs 91 MB of disk (")
    assert error.endswith("the newest whole checkpoint is step-00000005; make room, then start again to go on")
    assert (result / "code").read_text().strip() == "1"
    assert (result / "names").read_text().split() == [".", "..", "step-00000005"]
    assert [line["previous_end"] for line in runs.events(result / "run", "start")] == [None, "killed"]
    assert runs.last_step(result / "run") == 10
