"""SIGKILL of real processes: a run goes on as if nothing had happened."""

import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
from conftest import add_shards, damage, write_dataset
from small import audit_of, train_here

from shards.__main__ import main as shards_main

SEED = 20240229


@pytest.fixture(scope="module")
def straight_run(drawn_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A run of so many processes that nothing ever happened to; trained on first use."""

    @cache
    def run_of(processes: int) -> Path:
        run = tmp_path_factory.mktemp("straight") / "run"
        runs.train(drawn_shards, run, processes)
        return run

    return run_of


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_run_killed_five_times_is_bit_identical(
    drawn_shards: Path, tmp_path: Path, straight_run: Callable[[int], Path], processes: int
) -> None:
    straight, killed = straight_run(processes), tmp_path / "killed"
    rng = random.Random(SEED + processes)
    arguments = runs.settings(drawn_shards, killed)
    for low in (3, 9, 16, 24, 32):
        process = runs.launcher(arguments, processes)
        # A step that saves, or the moment right after one, puts the kill inside the write of a checkpoint.
        step = 5 * -(-low // 5) if rng.random() < 0.5 else low + rng.randrange(5)
        runs.kill_at(process, killed, step, delay_s=rng.uniform(0, 0.02))
    runs.finish(runs.launcher(arguments, processes))

    assert runs.trajectory(killed) == runs.trajectory(straight)
    assert len(runs.trajectory(killed)) == 40
    assert runs.key_files(killed) == runs.key_files(straight)
    assert runs.weights(killed) == runs.weights(straight)
    assert any(line["previous_end"] == "killed" for line in runs.events(killed, "start"))


def test_other_ranks_and_workers_train_on_the_same_keys_in_the_same_steps(
    drawn_shards: Path, tmp_path: Path, straight_run: Callable[[int], Path]
) -> None:
    straight, moved = straight_run(1), tmp_path / "moved"
    for processes, workers, until in ((1, 0, 12), (3, 1, 26)):
        process = runs.launcher(runs.settings(drawn_shards, moved, data__workers=workers), processes)
        runs.kill_at(process, moved, until, saved=True)
    runs.train(drawn_shards, moved, 2, data__workers=4)

    assert runs.keys_by_step(moved) == runs.keys_by_step(straight)
    assert [row[1:4:2] for row in runs.trajectory(moved)] == [row[1:4:2] for row in runs.trajectory(straight)]
    per_epoch: dict[int, Counter[str]] = {}
    for step in runs.keys_by_step(moved).values():
        for n, key in step:
            per_epoch.setdefault(n // 100, Counter())[key] += 1
    assert [len(per_epoch[e]) for e in range(4)] == [100] * 4
    assert max(max(c.values()) for c in per_epoch.values()) == 1


@pytest.mark.parametrize("processes", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3])
def test_killed_run_whose_mixed_data_grow_and_lose_samples_is_bit_identical(
    drawn_shards: Path, tmp_path: Path, processes: int
) -> None:
    coco, own = Path(shutil.copytree(drawn_shards, tmp_path / "coco")), tmp_path / "own"
    write_dataset(own, {"train": [9, 5]}, first=2000)
    listed = tmp_path / "quarantine.json"
    killed, straight = tmp_path / "killed", tmp_path / "straight"
    changes: dict[str, Any] = {"train__num_steps": 26}
    mix = f"{{coco: {coco}, own: {{path: {own}, repeat: 2}}}}"
    runs.kill_at(runs.launcher(runs.settings(Path(mix), killed, **changes), processes), killed, 7, saved=True)

    damage(coco, 3, 44)
    assert shards_main(["verify", str(coco), "--quarantine", str(listed)]) == 1
    add_shards(own, [6])
    mix = f"{{coco: {{path: {coco}, quarantine: {listed}}}, own: {{path: {own}, repeat: 2}}}}"
    changes["train__resume_with"] = "data.quarantine"
    shutil.copytree(killed, straight)
    runs.train(Path(mix), straight, processes, **changes)
    arguments = runs.settings(Path(mix), killed, **changes)
    for step in (11, 10 + processes * 4):  # within the epoch that goes on, and in the one with the new data
        runs.kill_at(runs.launcher(arguments, processes), killed, step, saved=True)
    runs.finish(runs.launcher(arguments, processes))

    assert runs.trajectory(killed) == runs.trajectory(straight)
    assert runs.key_files(killed) == runs.key_files(straight)
    assert runs.weights(killed, 26) == runs.weights(straight, 26)
    result = audit_of(killed)
    assert result.ok
    assert [(s.first_n, s.num_samples) for s in result.segments] == [(0, 128), (128, 138)]
    rows = {(e.source, e.epoch, e.segment): (e.seen, e.masked) for e in result.epochs}
    assert rows["own", 0, 0] == rows["own", 1, 0] == (14, 0)
    assert sum(rows["coco", 0, 0]) == 100
    assert rows["coco", 1, 1] == (98, 0)
    assert rows["own", 2, 1] == rows["own", 3, 1] == (20, 0)


def test_gradient_of_a_step_does_not_depend_on_how_it_is_cut(drawn_shards: Path, tmp_path: Path) -> None:
    gradients = []
    rates = []
    for processes, micro_batch in ((1, 12), (1, 3), (2, 3), (3, 2)):
        run = tmp_path / f"{processes}x{micro_batch}"
        changes = {"model__prompt": "no dropout", "optim__max_grad_norm": 1e9, "train__num_steps": 3}
        changes |= {"train__micro_batch": micro_batch, "train__save_every": 1, "train__keep": 9}
        if processes == 1:
            train_here(drawn_shards, run, **changes)
        else:
            runs.train(drawn_shards, run, processes, **changes)
        gradients.append(runs.gradient(run, step=1, beta1=0.9))
        rates.append([line["lr"] for line in runs.events(run, "step")])

    norm = np.linalg.norm(gradients[0])
    assert norm > 0.1
    assert max(np.linalg.norm(g - gradients[0]) / norm for g in gradients) < 1e-6
    assert rates == [rates[0]] * 4


def test_sigterm_saves_and_exits_75_and_the_next_start_goes_on(
    drawn_shards: Path, tmp_path: Path, straight_run: Callable[[int], Path]
) -> None:
    straight, stopped = straight_run(2), tmp_path / "stopped"
    process = runs.launcher(runs.settings(drawn_shards, stopped, train__save_every=1000), 2)
    while runs.last_step(stopped) < 4:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    text = runs.finish(process, code=75)
    runs.train(drawn_shards, stopped, 2)

    assert "start again to go on" in text
    assert runs.trajectory(stopped) == runs.trajectory(straight)
    assert runs.weights(stopped) == runs.weights(straight)
    assert [line["previous_end"] for line in runs.events(stopped, "start")] == [None, "stopped"]


def test_half_written_newest_checkpoint_is_passed_over_with_a_reason(
    drawn_shards: Path, tmp_path: Path, straight_run: Callable[[int], Path]
) -> None:
    straight, run = straight_run(1), tmp_path / "run"
    shutil.copytree(straight, run)
    newest = run / "checkpoints" / "step-00000040" / "model.safetensors"
    size = newest.stat().st_size
    newest.write_bytes(newest.read_bytes()[:100])
    text = runs.train(drawn_shards, run)

    assert f"passed over {newest.parent}: model.safetensors has 100 bytes, files.json says {size}" in text
    assert "resumed at step 35" in text
    assert runs.weights(run) == runs.weights(straight)
    assert runs.trajectory(run) == runs.trajectory(straight)
