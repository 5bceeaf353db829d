"""The learning rate and the optimizer's groups."""

import pytest
from torch import nn

from xctrain.config import OptimConfig
from xctrain.optim import learning_rate, make_optimizer, set_learning_rate


def test_warm_up_rises_linearly_to_the_peak() -> None:
    config = OptimConfig(lr=0.4, warmup_steps=4, schedule="constant")
    assert [learning_rate(step, 10, config) for step in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


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
