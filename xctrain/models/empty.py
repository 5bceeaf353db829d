"""Models without memory for their weights, on the device `meta`: names, shapes and types alone."""

import math

import torch
from torch import Tensor, nn

_SCALES_TOGETHER = 256  # scales of 4-bit weights that share one of their own


def put_empty_in_4_bits(layer: nn.Module, weight: Tensor, block: int) -> None:
    """Give a bitsandbytes ``layer`` what quantising ``weight``, which has no memory, would give it if it had."""
    from bitsandbytes.functional import QuantState

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=weight.device)

    num_scales = math.ceil(weight.numel() / block)
    second = QuantState(
        absmax=empty(math.ceil(num_scales / _SCALES_TOGETHER)),
        code=empty(256),
        blocksize=_SCALES_TOGETHER,
        dtype=torch.float32,
    )
    short = nn.Parameter(empty(math.ceil(weight.numel() / 2), 1, dtype=torch.uint8), requires_grad=False)
    attributes = {
        "quant_state": QuantState(
            absmax=empty(num_scales, dtype=torch.uint8),
            shape=weight.shape,
            code=empty(16),
            blocksize=block,
            quant_type="nf4",
            dtype=weight.dtype,
            offset=empty(),
            state2=second,
        ),
        "compress_statistics": True,
        "quant_type": "nf4",
    }
    for name, value in attributes.items():
        setattr(short, name, value)
    layer.register_parameter("weight", short)
