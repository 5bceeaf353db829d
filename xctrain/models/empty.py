"""Models without memory for their weights: names, shapes and types alone, on which real code can still be run."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

_SCALES_TOGETHER = 256  # scales that share a second one


@contextmanager
def empty_weights(enabled: bool = True) -> Iterator[None]:
    """Tensors that are made inside hold no numbers and take no memory."""
    if not enabled:
        yield
        return
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def is_empty(tensor: Tensor) -> bool:
    """Whether a tensor holds no numbers."""
    return isinstance(tensor, FakeTensor)


def put_empty_in_4_bits(layer: nn.Module, weight: Tensor, block: int) -> None:
    """Give a bitsandbytes ``layer`` what quantising ``weight`` would give it, without numbers."""
    from bitsandbytes.functional import QuantState

    num_scales = math.ceil(weight.numel() / block)
    wide = {"dtype": torch.float32, "device": weight.device}
    narrow = {"dtype": torch.uint8, "device": weight.device}
    second = QuantState(
        absmax=torch.empty(math.ceil(num_scales / _SCALES_TOGETHER), **wide),
        code=torch.empty(256, **wide),
        blocksize=_SCALES_TOGETHER,
        dtype=torch.float32,
    )
    short = nn.Parameter(torch.empty((math.ceil(weight.numel() / 2), 1), **narrow), requires_grad=False)
    attributes = {
        "quant_state": QuantState(
            absmax=torch.empty(num_scales, **narrow),
            shape=weight.shape,
            code=torch.empty(16, **wide),
            blocksize=block,
            quant_type="nf4",
            dtype=weight.dtype,
            offset=torch.empty((), **wide),
            state2=second,
        ),
        "compress_statistics": True,
        "quant_type": "nf4",
        "bnb_quantized": True,
    }
    for name, value in attributes.items():
        setattr(short, name, value)
    layer.weight = short


outside = unset_fake_temporarily  # a block inside of which tensors hold numbers again
