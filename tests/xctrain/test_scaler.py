"""The fp16 loss scale: its state is in the checkpoint, and an overflow runs the same batch again."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from accelerate.state import AcceleratorState
from small import audit_of, train_here
from tiny import TinyFamily, TinyModel
from torch import Tensor

from xctrain import ranks
from xctrain.collate import Batch
from xctrain.config import Config
from xctrain.ranks import Ranks

Join = Callable[[float], Callable[[Config], Ranks]]


@pytest.fixture
def join_fp16() -> Iterator[Join]:
    """In the place of ``join``: fp16 with a scaler, which Accelerate gives to GPUs alone, though CPUs can compute it."""

    def with_scale(scale: float) -> Callable[[Config], Ranks]:
        def join(config: Config) -> Ranks:
            AcceleratorState._reset_state()
            found = ranks.join(config)
            found.accelerator.state._mixed_precision = "fp16"
            found.accelerator.native_amp = True
            found.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=4)
            return found

        return join

    yield with_scale
    AcceleratorState._reset_state()


def scaler_of(run: Path, step: int) -> dict[str, Any]:
    return dict(json.loads((run / "checkpoints" / f"step-{step:08d}" / "scaler.json").read_text()))


def test_scale_goes_on_from_the_checkpoint_bit_by_bit(drawn_shards: Path, tmp_path: Path, join_fp16: Join) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    train_here(drawn_shards, straight, join=join_fp16(16.0))
    shutil.copytree(straight, stopped)
    shutil.rmtree(stopped / "checkpoints" / "step-00000010")
    train_here(drawn_shards, stopped, join=join_fp16(16.0))

    found = [(scaler_of(straight, step)["scale"], scaler_of(straight, step)["_growth_tracker"]) for step in (5, 10)]
    assert found == [(32.0, 1), (64.0, 2)]
    assert scaler_of(stopped, 10) == scaler_of(straight, 10)
    assert runs.trajectory(stopped) == runs.trajectory(straight)
    assert runs.weights(stopped, 10) == runs.weights(straight, 10)


class Steep(TinyModel):
    """Its gradient, scaled, does not fit in 16 bits at a scale of 65536."""

    def forward(self, batch: Batch) -> Tensor:
        return super().forward(batch) * 10


def test_overflow_runs_the_same_batch_again_at_a_lower_scale(
    drawn_shards: Path, tmp_path: Path, join_fp16: Join
) -> None:
    def open_steep(config: Config, *_: Any) -> tuple[TinyFamily, str]:
        torch.manual_seed(config.train.seed)
        return TinyFamily(Steep(dropout=0.0)), "tiny"

    state = train_here(drawn_shards, tmp_path, open_steep, join=join_fp16(2.0**30))

    steps = runs.events(tmp_path, "step")
    assert [line["step"] for line in steps] == list(range(1, 11))
    assert 0 < steps[0]["overflows"] < 20
    assert state.skips_in_a_row == 0
    assert scaler_of(tmp_path, 5)["scale"] <= 2.0 ** (30 - steps[0]["overflows"] + 1)
    assert audit_of(tmp_path).ok
