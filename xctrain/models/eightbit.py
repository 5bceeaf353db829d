"""AdamW with its two means in 8 bits, or in memory that the GPU may lend out (bitsandbytes)."""

from collections.abc import Sequence
from typing import Any

import torch

from xctrain.trainconfig import OptimConfig

_CLASSES = {"adamw8bit": "AdamW8bit", "paged_adamw": "PagedAdamW32bit", "paged_adamw8bit": "PagedAdamW8bit"}


def make_eightbit(groups: Sequence[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer of these groups of parameters, its state there already: a checkpoint is read into it, where it lies.

    Source: arXiv 2110.02861 (8-bit), 2305.14314 (paged).
    """
    import bitsandbytes

    make = getattr(bitsandbytes.optim, _CLASSES[config.name])
    optimizer: Any = make(list(groups), lr=config.lr, betas=(config.beta1, config.beta2))
    optimizer.check_overrides()
    optimizer.initialized = True
    for i, group in enumerate(optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            optimizer.init_state(group, parameter, i, j)
    return optimizer
