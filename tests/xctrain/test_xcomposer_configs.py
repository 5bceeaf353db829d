"""The configs for XComposer2.5-7B: each loads, its batch divides on the machines it names, and trains what it says."""

from pathlib import Path

import pytest
import torch
from test_xcomposer_weights import PUBLISHED

from shards.settings import load_settings
from shards.stream import accumulation
from xctrain.config import Config
from xctrain.models.parameters import freeze
from xctrain.models.xcomposer_config import XComposerConfig
from xctrain.models.xcomposer_weights import decoder_linears, empty_model

CONFIGS = Path(__file__).parents[2] / "configs"
# Settings and number of GPUs, and the micro-batches a step that follow.
MACHINES = [
    ("xcomposer-qlora", [], 1, 128),
    ("xcomposer-qlora", [], 4, 32),
    ("xcomposer-qlora", ["train.micro_batch=4", "eval.micro_batch=32"], 8, 4),
    ("xcomposer-lora", [], 8, 4),
    ("xcomposer-lora", ["train.micro_batch=1", "eval.micro_batch=1", "model.hd_num=1"], 4, 32),
    ("xcomposer-lora", ["train.micro_batch=1", "eval.micro_batch=1", "model.hd_num=1"], 1, 128),
    ("xcomposer-full", [], 8, 4),
    ("xcomposer-full", [], 4, 8),
]


def load(name: str, *settings: str) -> Config:
    return load_settings(Config, CONFIGS / f"{name}.yaml", ["model.path=x", *settings])


@pytest.mark.parametrize(("name", "settings", "processes", "expected"), MACHINES)
def test_batch_divides_on_each_machine_that_the_comments_name(
    name: str, settings: list[str], processes: int, expected: int
) -> None:
    config = load(name, *settings)

    assert accumulation(config.train.global_batch, processes, config.train.micro_batch) == expected


@pytest.mark.parametrize("name", ["xcomposer-qlora", "xcomposer-lora", "xcomposer-full"])
def test_recipe_is_the_published_one(name: str) -> None:
    config = load(name)
    optim, kind = config.optim, name.partition("-")[2]

    assert config.adapter.kind == {"full": "none"}.get(kind, kind)
    assert (optim.schedule, optim.beta1, optim.beta2, optim.weight_decay) == ("cosine", 0.9, 0.95, 0.1)
    assert (optim.lr, optim.max_grad_norm) == (1e-5 if kind == "full" else 5e-5, 1.0)
    assert (config.train.global_batch, config.train.epochs, config.train.precision) == (128, 1, "bf16")
    assert (config.model.hd_num, config.model.gradient_checkpointing) == (18, True)
    if kind != "full":
        assert (config.adapter.rank, config.adapter.alpha, config.adapter.dropout) == (64, 64, 0.05)


def test_sizes_in_the_comments_are_those_of_the_published_model() -> None:
    model = empty_model(XComposerConfig.model_validate(PUBLISHED))
    layers = [model.get_submodule(name) for name in decoder_linears(model)]
    adapters = 64 * sum(
        layer.in_features + layer.out_features for layer in layers if isinstance(layer, torch.nn.Linear)
    )

    freeze(model, load("xcomposer-full").model.freeze)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}

    assert adapters == 150_994_944
    assert round((4 * sum(sizes.values()) + 12 * sum(trained.values())) / 1e9) == 135
    assert round(sum(trained.values()) / 1e8) == 84
    assert set(sizes) - set(trained) == {name for name in sizes if name.startswith("vit.")}
