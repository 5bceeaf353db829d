"""Real runs whose checkpoints go to an S3 store of this machine, and machines that are lost. Real processes."""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import objectstore
import pytest
import runs
from small import audit_of

from shards.remote import Remote
from xctrain.pushed import whole_steps

ADDRESS = f"s3://{objectstore.BUCKET}/run"


def test_machine_that_is_lost_is_replaced_by_one_that_starts_the_same_command(
    drawn_shards: Path, tmp_path: Path
) -> None:
    run, straight = tmp_path / "run", tmp_path / "straight"
    length = {"train__num_steps": 20}
    with objectstore.running():
        arguments = runs.settings(drawn_shards, run, **length, checkpoint__push=ADDRESS)
        process = runs.launcher(arguments, 2)
        until = time.monotonic() + 120
        while not whole_steps(Remote(ADDRESS).list()):
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        time.sleep(0.5)  # ranks end with their launcher
        shutil.rmtree(run)
        text = runs.finish(runs.launcher(arguments, 2))
        assert f"brought from {ADDRESS}: step-" in text
        assert whole_steps(Remote(ADDRESS).list()) == [20, 15]
    runs.train(drawn_shards, straight, 2, **length)
    assert runs.trajectory(run) == runs.trajectory(straight)
    assert runs.weights(run, 20) == runs.weights(straight, 20)
    assert runs.keys_by_step(run) == runs.keys_by_step(straight)
    assert audit_of(run).ok


@pytest.mark.slow
def test_finished_run_that_could_not_send_its_checkpoint_fails_and_sends_it_when_started_again(
    drawn_shards: Path, tmp_path: Path
) -> None:
    with objectstore.running() as store:
        runs.train(drawn_shards, tmp_path, train__num_steps=3, checkpoint__push=ADDRESS)
        store.kill()  # which forgets all
        changes = {"train__num_steps": 5, "train__resume_with": "train.num_steps", "checkpoint__push": ADDRESS}
        arguments = runs.settings(drawn_shards, tmp_path, **changes)
        text = runs.finish(runs.launcher(arguments, 2), code=1)
        assert "done: step 5, 60 samples" in text
        [error] = [line for line in text.splitlines() if line.startswith("error: ")]
        assert error.startswith(
            f"error: {tmp_path}: training is done, but its newest checkpoint is not at {ADDRESS}: {ADDRESS}: "
        )
        assert error.endswith("; start again to send it")
        assert "Traceback" not in text
        assert runs.last_step(tmp_path) == 5
        store.start()
        again = [sys.executable, "-m", "xctrain", "launch", os.devnull, *arguments, "--processes", "2"]
        assert "is complete: step 5" in runs.finish(runs.start(again))
        assert whole_steps(Remote(ADDRESS).list()) == [5, 3]


@pytest.mark.slow
def test_stop_sends_what_it_saved(drawn_shards: Path, tmp_path: Path) -> None:
    with objectstore.running():
        arguments = runs.settings(
            drawn_shards, tmp_path, train__num_steps=1000, train__save_every=1000, checkpoint__push=ADDRESS
        )
        process = runs.launcher(arguments, 2)
        while runs.last_step(tmp_path) < 3:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        runs.finish(process, code=75)
        assert whole_steps(Remote(ADDRESS).list()) == [runs.last_step(tmp_path)]
