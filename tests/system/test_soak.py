"""Two hundred kills of one run, at any moment and on changing machines. Some half an hour."""

import random
import signal
import time
from pathlib import Path

import pytest
import runs
from small import audit_of

SEED = 20240301
KILLS = 200
STEPS = 6000  # more than are trained between so many kills
LONGEST_S = 1800  # of a run without a kill


@pytest.mark.slow
@pytest.mark.timeout(2 * 60 * 60)
def test_two_hundred_kills_leave_every_sample_trained_once(drawn_shards: Path, tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    began = time.monotonic()
    process = runs.launcher(runs.settings(drawn_shards, straight, train__num_steps=STEPS, train__save_every=1000), 3)
    while not runs.last_step(straight):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    start_s = time.monotonic() - began
    runs.finish(process, timeout_s=LONGEST_S)
    rng = random.Random(SEED)
    for number in range(KILLS):
        ranks = rng.choice((1, 2, 3))
        arguments = runs.settings(
            drawn_shards,
            killed,
            train__num_steps=STEPS,
            train__save_every=rng.choice((1, 2, 5)),
            data__workers=rng.choice((0, 1, 2)),
        )
        process = runs.launcher(arguments, ranks)
        if rng.random() < 0.5:  # while it starts, as a rule
            runs.kill_after(process, rng.uniform(0, start_s))
        else:  # in a step or a save
            runs.kill_at(process, killed, runs.last_step(killed) + rng.randrange(1, 8), delay_s=rng.uniform(0, 0.05))
        assert process.returncode == -signal.SIGKILL, "it came to its end before the kill"
        print(f"kill {number + 1} of {KILLS}: {ranks} ranks, step {runs.last_step(killed)}", flush=True)
    arguments = runs.settings(drawn_shards, killed, train__num_steps=STEPS, train__save_every=1000)
    runs.finish(runs.launcher(arguments, 2), timeout_s=LONGEST_S)

    assert runs.keys_by_step(killed) == runs.keys_by_step(straight)
    result = audit_of(killed)
    assert result.ok
    assert {(epoch.repeated, epoch.skipped, epoch.masked) for epoch in result.epochs} == {(0, 0, 0)}
    assert [path.name for path in sorted((killed / "checkpoints").iterdir())][-1] == f"step-{STEPS:08d}"
