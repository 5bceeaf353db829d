"""The optimizer, and the learning rate as a pure function of the step."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from shards.errors import counted
from xctrain.trainconfig import OptimConfig


def learning_rate(step: int, num_steps: int, config: OptimConfig) -> float:
    """Learning rate of the update that follows ``step`` updates. World size and accumulation do not enter.

    Source: linear warm-up (Goyal et al. 2017), cosine decay without restarts (Loshchilov and Hutter 2017).
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = min(1.0, (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps))
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


def warmup_notes(num_steps: int, config: OptimConfig) -> list[str]:
    """What to say of a run that ends within its warm-up, which is allowed and seldom meant."""
    if config.warmup_steps <= num_steps:
        return []
    highest = learning_rate(num_steps - 1, num_steps, config)
    return [
        f"optim.warmup_steps is {config.warmup_steps}, the run has {counted(num_steps, 'step')}: the learning rate only rises, "
        f"to {highest:.3g} of optim.lr={config.lr:g}; lower optim.warmup_steps unless that is meant"
    ]


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters, as ``optim.name`` says; weight decay on matrices only."""
    trainable = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name != "adamw":
        from xctrain.models.eightbit import make_eightbit

        return make_eightbit(groups, config)
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use ``lr`` in the next update."""
    for group in optimizer.param_groups:
        group["lr"] = lr
