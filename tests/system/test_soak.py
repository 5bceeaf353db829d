"""Two hundred kills of one run, at any moment and on changing machines. Some half an hour."""

import random
import time
from pathlib import Path

import pytest
import runs
from small import audit_of

SEED = 20240301
KILLS = 200
STUCK = 8  # kills in a row without a step, after which one is granted


@pytest.mark.slow
def test_two_hundred_kills_leave_every_sample_trained_once(drawn_shards: Path, tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    began = time.monotonic()
    process = runs.launcher(runs.settings(drawn_shards, straight, train__num_steps=400, train__save_every=100), 3)
    while not runs.last_step(straight):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    longest_s = 1.5 * (time.monotonic() - began)  # kills fall anywhere in a start, its first steps and their saves
    runs.finish(process)
    rng = random.Random(SEED)
    stuck = 0
    for number in range(KILLS):
        ranks, before = rng.choice((1, 2, 3)), runs.last_step(killed)
        arguments = runs.settings(
            drawn_shards,
            killed,
            train__num_steps=400,
            train__save_every=rng.choice((1, 2, 5)),
            data__workers=rng.choice((0, 1, 2)),
        )
        process = runs.launcher(arguments, ranks)
        if stuck == STUCK:
            runs.kill_at(process, killed, before + 1, delay_s=rng.uniform(0, 0.2))
        else:
            runs.kill_after(process, rng.uniform(0, longest_s))
        stuck = 0 if runs.last_step(killed) > before else stuck + 1
        print(f"kill {number + 1} of {KILLS}: {ranks} ranks, step {runs.last_step(killed)}", flush=True)
    runs.train(drawn_shards, killed, 2, train__num_steps=400, train__save_every=100)

    assert runs.keys_by_step(killed) == runs.keys_by_step(straight)
    result = audit_of(killed)
    assert result.ok
    assert {(epoch.repeated, epoch.skipped, epoch.masked) for epoch in result.epochs} == {(0, 0, 0)}
    assert [path.name for path in sorted((killed / "checkpoints").iterdir())][-1] == "step-00000400"
