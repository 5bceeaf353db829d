"""Losses that stand out."""

import random
from pathlib import Path

import pytest
import runs
from small import train_here

from xctrain import spikes
from xctrain.spikes import SpikeWatch


def falling(count: int, seed: int = 0) -> list[float]:
    """Losses of a run that goes well: falling, and as noisy as those of small batches."""
    rng = random.Random(seed)
    return [5 * 0.995**i + rng.gauss(0, 0.2) for i in range(count)]


def test_run_that_goes_well_has_no_spike() -> None:
    watch = SpikeWatch()
    assert [watch.expected(loss) for loss in falling(400)] == [None] * 400


def test_loss_that_stands_out_is_said_with_what_was_expected() -> None:
    watch, losses = SpikeWatch(), falling(100)
    assert [watch.expected(loss) for loss in losses] == [None] * 100
    assert watch.expected(12.0) == pytest.approx(4, rel=0.3)
    assert watch.expected(losses[-1]) is None


def test_first_steps_are_only_watched() -> None:
    assert [SpikeWatch(falling(8)).expected(1e6)] == [None]


def test_spike_is_logged_with_how_to_look_at_it(
    drawn_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step size that breaks the model, in a window that short runs fill."""
    monkeypatch.setattr(spikes, "_LEAST", 4)
    train_here(drawn_shards, tmp_path, train__num_steps=8, optim__lr=1e-3)
    accepted = {"train__resume_with": "optim.lr,train.num_steps,optim.max_grad_norm", "optim__max_grad_norm": 1e9}
    train_here(drawn_shards, tmp_path, train__num_steps=16, optim__lr=30, optim__warmup_steps=5, **accepted)

    [first, *_] = runs.events(tmp_path, "spike")
    assert first["step"] > 8  # the losses before the resume are known
    assert first["loss"] > 1.25 * first["expected"]
    assert first["samples_consumed"] == 12 * first["step"]  # or the next start would cut its line off
    text = (
        f"step {first['step']}: loss {first['loss']:.3g}, the median of the steps before is {first['expected']:.3g}; "
    )
    assert text + f"look at its samples with `python -m xctrain batch {tmp_path} --step" in capsys.readouterr().err
