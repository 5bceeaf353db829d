"""Which parameters train."""

import re

import pytest
import torch
from torch import nn

from shards.errors import ConfigError
from xctrain.models.parameters import freeze, parameter_table, parameters_without_gradient


@pytest.fixture
def model() -> nn.Module:
    tower = nn.ModuleDict({"first": nn.Linear(2, 3), "second": nn.Linear(3, 3)})
    return nn.ModuleDict({"model": nn.ModuleDict({"vision_tower": tower}), "lm_head": nn.Linear(3, 1000, bias=False)})


def test_freeze_stops_the_parameters_that_fit_and_no_others(model: nn.Module) -> None:
    freeze(model, ["*.vision_tower.first.*", "*.second.bias"])

    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == ["model.vision_tower.second.weight", "lm_head.weight"]


def test_a_pattern_that_fits_nothing_is_refused_with_those_that_would(model: nn.Module) -> None:
    message = "model.freeze: 'vision.*' fits no parameter; use patterns such as model.vision_tower.*, lm_head.*"

    with pytest.raises(ConfigError, match=re.escape(message)):
        freeze(model, ["vision.*"])


def test_freezing_everything_is_refused(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"model\.freeze: model\.\*, lm_\* freeze every parameter; leave at least"):
        freeze(model, ["model.*", "lm_*"])


def test_table_shows_each_block_and_the_sum(model: nn.Module) -> None:
    freeze(model, ["*.first.*"])

    lines = [line.split() for line in parameter_table(model).splitlines()]

    assert lines == [
        ["parameters", "trainable", "frozen"],
        ["model.vision_tower", "12", "9"],
        ["lm_head", "3,000", "0"],
        ["total", "3,012", "9"],
    ]


def test_parameters_that_the_loss_does_not_reach_are_named_without_a_backward_pass(model: nn.Module) -> None:
    tower = model.get_submodule("model.vision_tower")
    freeze(model, ["*.first.weight"])

    loss = tower["first"](torch.ones(1, 2)).sum() * 0

    unreached = ("model.vision_tower.second.weight", "model.vision_tower.second.bias", "lm_head.weight")
    assert parameters_without_gradient(loss, model) == unreached
    assert all(parameter.grad is None for parameter in model.parameters())
