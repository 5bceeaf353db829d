"""The stream in real processes: workers, uneven ranks, ends of runs, other versions of Accelerate."""

import shlex
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import owndisk
import pytest
import runs
from conftest import write_dataset
from small import audit_of

from shards.reader import SplitReader

SHORT = Path(__file__).parents[1] / "xctrain" / "short.py"


def test_what_workers_read_ahead_is_neither_lost_nor_repeated_by_a_kill_with_other_workers_after(
    drawn_shards: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    changes = {"train__num_steps": 26, "data__prefetch": 8}
    for step, workers in ((8, 4), (17, 0)):
        arguments = runs.settings(drawn_shards, run, **changes, data__workers=workers)
        runs.kill_at(runs.launcher(arguments, 1), run, step, saved=True)
    runs.train(drawn_shards, run, data__workers=4, **changes)
    slots = [slot for step in runs.keys_by_step(run).values() for slot in step]
    assert [n for n, _ in slots] == list(range(26 * 12))
    keys = SplitReader(drawn_shards, "train").keys()
    assert [Counter(key for n, key in slots if n // 100 == epoch) for epoch in range(3)] == [Counter(keys)] * 3
    assert audit_of(run).ok


def test_rank_whose_batches_end_early_fails_the_run_within_the_timeout(drawn_shards: Path, tmp_path: Path) -> None:
    settings = runs.settings(drawn_shards, tmp_path / "run", train__timeout_s=15, train__num_steps=400)
    command = [sys.executable, str(SHORT), "36", *settings, "train.processes=2"]
    code = f"import sys; from xctrain.launch import launch; sys.exit(launch({command!r}, 2))"
    began = time.monotonic()
    process = runs.start([sys.executable, "-c", code])
    out, err = process.communicate(timeout=240)
    assert process.returncode == 1, out + err
    assert "start again to go on" in err
    assert time.monotonic() - began < 120


def test_container_whose_shared_memory_is_small_trains(drawn_shards: Path, tmp_path: Path) -> None:
    """A real one, of 256 kB in a name space of its own: what is read ahead would not fit into it."""
    run = tmp_path / "run"
    changes = {"data__workers": 2, "data__prefetch": 24, "train__micro_batch": 1}
    train = shlex.join(runs.rank_command(runs.settings(drawn_shards, run, **changes)))
    done = owndisk.run(Path("/dev/shm"), "256k", f"exec {train}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert audit_of(run).ok


@pytest.mark.slow
def test_more_ranks_and_workers_than_shards_take_the_same_steps(tmp_path: Path) -> None:
    write_dataset(tmp_path / "shards", {"train": [10, 10, 10]})
    runs.train(
        tmp_path / "shards",
        tmp_path / "run",
        4,
        data__workers=2,
        train__micro_batch=3,
        train__num_steps=None,
        train__epochs=4,
    )
    steps = [[line["step"] for line in runs.read_keys(path)] for path in sorted((tmp_path / "run").glob("keys-rank*"))]
    assert len(steps) == 4
    assert all({*taken} == set(range(1, 11)) for taken in steps)
    assert [(e.seen, e.repeated, e.skipped) for e in audit_of(tmp_path / "run").epochs] == [(30, 0, 0)] * 4


@pytest.mark.slow
def test_twenty_epochs_of_a_tiny_split_with_many_workers_never_hang(tmp_path: Path) -> None:
    write_dataset(tmp_path / "shards", {"train": [7, 6]})
    length = {"train__num_steps": None, "train__epochs": 20}
    runs.train(tmp_path / "shards", tmp_path / "run", 2, data__workers=4, **length)
    assert [(e.epoch, e.seen, e.repeated, e.skipped) for e in audit_of(tmp_path / "run").epochs] == [
        (epoch, 13, 0, 0) for epoch in range(20)
    ]


@pytest.mark.slow
def test_ten_short_runs_in_a_row_end_with_success(drawn_shards: Path, tmp_path: Path) -> None:
    for number in range(10):
        runs.train(drawn_shards, tmp_path / str(number), 2, train__num_steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["accelerate==1.12.0", "accelerate"])
def test_oldest_and_newest_accelerate_train_on_the_same_samples_with_the_same_numbers(
    drawn_shards: Path, tmp_path: Path, wanted: str
) -> None:
    other = tmp_path / "other"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(other), wanted]
    if (done := subprocess.run(install, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"{wanted} cannot be installed here: {done.stderr}")
    runs.train(drawn_shards, tmp_path / "locked", 2, train__num_steps=8)
    settings = runs.settings(drawn_shards, tmp_path / "run", train__num_steps=8)
    tiny = runs.rank_command(settings)
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(other)!r}); sys.argv = {tiny[1:]!r} + ['train.processes=2']; "
        f"import accelerate; assert accelerate.__file__.startswith({str(other)!r}); "
        f"runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    launcher = f"import sys; from xctrain.launch import launch; sys.exit(launch([sys.executable, '-c', {code!r}], 2))"
    runs.finish(runs.start([sys.executable, "-c", launcher]))
    assert runs.trajectory(tmp_path / "run") == runs.trajectory(tmp_path / "locked")
    assert runs.key_files(tmp_path / "run") == runs.key_files(tmp_path / "locked")
