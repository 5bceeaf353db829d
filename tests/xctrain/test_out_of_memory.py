"""A rank without memory for a micro-batch: all ranks take smaller ones, and nothing else changes."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
from small import audit_of, open_hungry, train_here

from xctrain.errors import TrainError


def ranks_of_small(model: str, shards: Path, run: Path, processes: int, code: int = 0, **changes: Any) -> str:
    """Real processes of a model of ``small.py``; what they printed."""
    command = [sys.executable, str(runs.TESTS / "xctrain" / "small.py"), model]
    command += [*runs.settings(shards, run, **changes), f"train.processes={processes}"]
    script = f"import sys; from xctrain.launch import launch; sys.exit(launch({command!r}, {processes}))"
    return runs.finish(runs.start([sys.executable, "-c", script]), code)


def test_one_rank_out_of_memory_halves_the_micro_batches_of_all(drawn_shards: Path, tmp_path: Path) -> None:
    changes = {"train__num_steps": 8, "train__micro_batch": 4, "optim__max_grad_norm": 1e9, "data__workers": 0}
    # Position 50 belongs to step 5. There must be room for one sample only, of four.
    text = ranks_of_small("50/1", drawn_shards, tmp_path / "hungry", 3, **changes)
    ranks_of_small("50/4", drawn_shards, tmp_path / "fed", 3, **changes)

    found = runs.events(tmp_path / "hungry", "out_of_memory")
    assert [(line["step"], line["samples_consumed"], line["micro_batch"]) for line in found] == [(5, 48, 2), (5, 48, 1)]
    keys = dict(slot for step in runs.keys_by_step(tmp_path / "fed").values() for slot in step)
    assert {line["key"] for line in found} <= {keys[n] for n in range(48, 60)}
    for line, (before, after) in zip(found, ((4, 2), (2, 1)), strict=True):
        assert (
            f"step 5: out of memory on rank {line['rank']}; the largest sample there is {line['key']}, "
            f"{line['tokens']} tokens; the same batch runs again in micro-batches of {after}, not {before}"
        ) in text

    assert runs.keys_by_step(tmp_path / "hungry") == runs.keys_by_step(tmp_path / "fed")
    losses = [[line["loss"] for line in runs.events(tmp_path / run, "step")] for run in ("hungry", "fed")]
    assert losses[0][:4] == losses[1][:4]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert len(losses[0]) == 8
    assert audit_of(tmp_path / "hungry").ok


def test_single_sample_without_memory_ends_the_run_by_its_name(drawn_shards: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainError) as error:
        train_here(drawn_shards, tmp_path, open_hungry(50, 0), train__micro_batch=4)
    assert f"step 5: out of memory on rank 0; the largest sample there is {error.value.key}, " in str(error.value)
    assert "alone in its micro-batch; set model.gradient_checkpointing=true" in str(error.value)
    assert [line["micro_batch"] for line in runs.events(tmp_path, "out_of_memory")] == [2, 1]
    assert runs.last_step(tmp_path) == 4


@pytest.mark.slow
def test_with_fsdp_the_run_ends_and_goes_on_with_smaller_micro_batches(drawn_shards: Path, tmp_path: Path) -> None:
    changes = {"train__num_steps": 6, "train__save_every": 2, "data__workers": 0, "parallel__mode": "fsdp"}
    text = ranks_of_small("50/2", drawn_shards, tmp_path, 2, code=1, **changes, train__micro_batch=6)
    assert "with parallel.mode=fsdp the ranks cannot go on from there together: lower train.micro_batch (6) and" in text
    ranks_of_small("50/2", drawn_shards, tmp_path, 2, **changes, train__micro_batch=2)
    assert [line["step"] for line in runs.events(tmp_path, "step")] == [1, 2, 3, 4, 5, 6]
    assert audit_of(tmp_path).ok
