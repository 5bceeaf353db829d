"""The learning rate and the optimizer's groups."""

import shutil
from pathlib import Path

import pytest
import runs
import torch
from safetensors.torch import load_file
from small import config_of, train_here
from torch import nn

from xctrain.errors import ConfigError
from xctrain.optim import learning_rate, make_optimizer, set_learning_rate
from xctrain.ranks import join
from xctrain.trainconfig import OptimConfig


def test_warm_up_rises_linearly_to_the_peak() -> None:
    config = OptimConfig(lr=0.4, warmup_steps=4, schedule="constant")
    assert [learning_rate(step, 10, config) for step in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_warm_up_that_a_run_ends_within_is_said_at_its_start(
    drawn_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note = (
        "optim.warmup_steps is 20, the run has 5 steps: the learning rate only rises, to 0.1 of optim.lr=0.4; lower "
        "optim.warmup_steps unless that is meant"
    )
    changes = {"optim__lr": 0.4, "optim__warmup_steps": 20, "train__resume_with": "train.num_steps"}
    train_here(drawn_shards, tmp_path, train__num_steps=5, **changes)
    assert f"\n{note}\n" in capsys.readouterr().err
    assert [event["notes"] for event in runs.events(tmp_path, "start")] == [[note]]
    train_here(drawn_shards, tmp_path, train__num_steps=20, **changes)
    assert "the learning rate only rises" not in capsys.readouterr().err


def test_cosine_is_half_way_at_half_time_and_ends_at_its_minimum() -> None:
    config = OptimConfig(lr=1.0, warmup_steps=0, min_lr_ratio=0.2)
    assert learning_rate(50, 100, config) == pytest.approx(0.6)
    assert learning_rate(100, 100, config) == pytest.approx(0.2)


def test_linear_falls_evenly() -> None:
    config = OptimConfig(lr=1.0, warmup_steps=0, schedule="linear")
    assert [learning_rate(step, 4, config) for step in range(5)] == pytest.approx([1, 0.75, 0.5, 0.25, 0])


def test_steps_past_the_end_keep_the_last_rate() -> None:
    config = OptimConfig(lr=1.0, warmup_steps=5, min_lr_ratio=0.1)
    assert learning_rate(30, 20, config) == pytest.approx(0.1)
    assert learning_rate(7, 3, config) == pytest.approx(0.1)


def test_matrices_decay_and_vectors_do_not() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    optimizer = make_optimizer(model.parameters(), OptimConfig(weight_decay=0.3))
    decays = {p.ndim: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {2: 0.3, 1: 0.0}


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    [group] = make_optimizer(model.parameters(), OptimConfig()).param_groups
    assert group["params"] == [model.weight]


def test_set_learning_rate_reaches_every_group() -> None:
    optimizer = make_optimizer(nn.Linear(3, 2).parameters(), OptimConfig())
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_paged_optimizer_without_a_gpu_is_refused(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(
        ConfigError, match=r"optim.name is paged_adamw8bit, there is no GPU whose memory .*; use adamw8bit"
    ):
        join(config_of(tmp_path, tmp_path, optim__name="paged_adamw8bit"))


def test_means_in_blocks_cannot_be_cut_over_processes(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"parallel.mode is fsdp, optim.name is adamw8bit: its means in blocks cannot"
    ):
        config_of(tmp_path, tmp_path, optim__name="adamw8bit", parallel__mode="fsdp")


def test_run_with_means_in_8_bits_goes_on_bit_by_bit(drawn_shards: Path, tmp_path: Path) -> None:
    changes = {"optim__name": "adamw8bit", "train__num_steps": 10}
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    runs.train(drawn_shards, straight, 3, **changes)
    shutil.copytree(straight, stopped)
    shutil.rmtree(stopped / "checkpoints" / "step-00000010")
    runs.train(drawn_shards, stopped, 3, **changes)

    assert runs.trajectory(stopped) == runs.trajectory(straight)
    assert runs.weights(stopped, 10) == runs.weights(straight, 10)
    means = load_file(straight / "checkpoints" / "step-00000010" / "optimizer.safetensors")
    assert means["state1:embedding.weight"].dtype == torch.uint8
    assert means["state1:norm.weight"].dtype == torch.float32
    losses = [line["loss"] for line in runs.events(straight, "step")]
    assert losses[-1] < losses[0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["paged_adamw", "paged_adamw8bit"])
def test_run_with_paged_means_goes_on_bit_by_bit(drawn_shards: Path, tmp_path: Path, name: str) -> None:
    changes = {"optim__name": name, "train__num_steps": 10, "train__deterministic": True}
    runs.train(drawn_shards, tmp_path, 1, **changes)
    before, weights = runs.trajectory(tmp_path), runs.weights(tmp_path, 10)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000010")
    runs.train(drawn_shards, tmp_path, 1, **changes)
    assert (runs.trajectory(tmp_path), runs.weights(tmp_path, 10)) == (before, weights)
