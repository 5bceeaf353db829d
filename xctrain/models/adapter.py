"""LoRA and QLoRA on any module: class, ``generate`` and the names of the base's own parameters stay as they are.

Source: arXiv 2106.09685 (LoRA), 2305.14314 (QLoRA: nf4 and scales that are quantised again).
"""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import nn

from shards.errors import ConfigError
from xctrain.models.empty import put_empty_in_4_bits

if TYPE_CHECKING:
    from xctrain.modelconfig import AdapterConfig

# It says on every rank that it cannot download a faster kernel for captioning in 4 bits on a CPU.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

_ADAPTER = "default"  # peft's name of an adapter that has none
_BLOCKS = (64, 32)  # numbers that share a scale: the usual 64 where it fits
_KINDS_SHOWN = 12  # candidates in a refusal


def adapt(model: nn.Module, config: "AdapterConfig", language_layers: Sequence[str], seed: int) -> tuple[str, ...]:
    """Freeze ``model``, put its language model in 4 bits if asked, and add adapters; names of what trains now.

    Layers that were loaded in 4 bits stay as they are.

    ``language_layers`` are the names of the language model's linear layers; the others are those elsewhere.

    Raises:
        ConfigError: a pattern fits nothing, or would train what is held in 4 bits.
    """
    elsewhere = [name for name in linear_layers(model) if name not in set(language_layers)]
    targets = [
        *_matching(language_layers, config.targets, "adapter.targets", "linear layer of the language model"),
        *_matching(elsewhere, config.other_targets, "adapter.other_targets", "linear layer outside of it"),
    ]
    if not targets:
        raise ConfigError(
            f"adapter.targets and adapter.other_targets are empty, adapter.kind is {config.kind}; give at least one"
        )
    parameters = dict(model.named_parameters())
    also = _matching(list(parameters), config.train_also, "adapter.train_also", "parameter of the base")
    whole = [parameters[name] for name in also]
    if config.kind == "qlora":
        if in_4_bits := {f"{name}.weight" for name in language_layers} & set(also):
            raise ConfigError(
                f"adapter.train_also: fits {min(in_4_bits)}, which qlora holds in 4 bits, where it cannot train; "
                "choose other parameters, or adapter.kind=lora"
            )
        wide = [name for name in language_layers if type(model.get_submodule(name)) is nn.Linear]
        quantise(model, wide, getattr(torch, config.compute))
    return add_adapter(model, config, targets, whole, seed)


def add_adapter(
    model: nn.Module, config: "AdapterConfig", targets: Sequence[str], whole: Iterable[nn.Parameter], seed: int
) -> tuple[str, ...]:
    """Put an adapter beside each target and freeze all but these and the ``whole`` parameters; names of what trains.

    Adapters are held in float32, since small updates are lost in a shorter type. They begin as a function of ``seed``,
    and as nothing: one of their matrices is 0.
    """
    from peft import LoraConfig, inject_adapter_in_model

    settings = LoraConfig(
        r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, target_modules=list(targets), bias="none"
    )
    model.is_loaded_in_4bit = config.kind == "qlora"  # type: ignore[assignment]  # how peft knows, only while it looks
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, model, _ADAPTER)
    del model.is_loaded_in_4bit
    names = tuple(f"{name}.lora_{side}.{_ADAPTER}.weight" for name in targets for side in "AB")
    ids_of_whole = {id(parameter) for parameter in whole}
    trainable = []
    for name, parameter in model.named_parameters():
        is_adapter = name in names
        if is_adapter:
            parameter.data = parameter.data.float()
        parameter.requires_grad_(is_adapter or id(parameter) in ids_of_whole)
        if parameter.requires_grad:
            trainable.append(name)
    # peft matches the ends of names: none of another part of the model may have come along, and none be left out.
    assert {name for name, _ in model.named_parameters() if ".lora_" in name} == set(names)
    assert len(trainable) == len(names) + len(ids_of_whole)
    return tuple(trainable)


def quantise(model: nn.Module, names: Iterable[str], compute: torch.dtype) -> None:
    """Replace linear layers by frozen ones in 4 bits (nf4, scales quantised again) that multiply in ``compute``.

    One layer after another, each freed as its short form stands. Nothing of it is ever saved: an export takes the base
    from its own files again.

    Raises:
        ConfigError: a layer's width is not a multiple of 32.
    """
    for name in names:
        quantise_layer(model, name, model.get_submodule(name).get_parameter("weight").data, compute)


def quantise_layer(model: nn.Module, name: str, data: torch.Tensor, compute: torch.dtype) -> None:
    """As ``quantise``, for one layer whose weight is ``data``: the layer itself may have no memory yet."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    layer = model.get_submodule(name)
    assert type(layer) is nn.Linear
    width = layer.in_features
    # Numbers that share a scale must lie in one row: on CPUs with AVX-512, bitsandbytes 0.50 reads rows that are
    # not whole blocks with scales of other rows, and says nothing.
    block = next((size for size in _BLOCKS if width % size == 0), None)
    if block is None:
        raise ConfigError(
            f"adapter.kind is qlora, {name} is {width} wide, not a multiple of {_BLOCKS[-1]}; use adapter.kind=lora"
        )
    short = Linear4bit(width, layer.out_features, bias=False, compute_dtype=compute, device="meta")
    if data.is_meta:
        put_empty_in_4_bits(short, data, block)
    else:
        weight = Params4bit(data, blocksize=block, quant_type="nf4", compress_statistics=True, module=short)
        short.weight = weight.to(data.device)  # this is what quantises
    short.bias = layer.bias
    # Else captioning on a CPU re-packs the weights for good, in a form through which no gradient flows: training
    # would go on after an evaluation without the layers below.
    short.support_avx512bf16_for_cpu = False
    replace_layer(model, name, short)


def merge(model: nn.Module) -> int:
    """Add every adapter to its layer's weight and put the plain layer back; the number of layers.

    The weights must not be in 4 bits: adding to those, and rounding again, loses what was learned.
    """
    from peft.tuners.lora import LoraLayer

    adapted = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, LoraLayer)]
    for name, layer in adapted:
        plain = layer.get_base_layer()
        assert plain.weight.is_floating_point(), name
        layer.merge()
        replace_layer(model, name, plain)
    for module in model.modules():
        if hasattr(module, "peft_config"):
            del module.peft_config
    return len(adapted)


def replace_layer(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Put ``layer`` in the place of the submodule ``name``."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)


def linear_layers(model: nn.Module, inside: str = "") -> list[str]:
    """Names of plain linear layers of the submodule ``inside``, but for those that share their weight."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    start = f"{inside}." if inside else ""
    return [
        name
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear and name.startswith(start) and uses[id(layer.weight)] == 1
    ]


def _matching(names: Sequence[str], patterns: Sequence[str], field: str, what: str) -> list[str]:
    """Names that fit any pattern, in the order of ``names``; each pattern must fit one."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            candidates = ", ".join(_candidates(names))
            raise ConfigError(f"{field}: {pattern!r} fits no {what}; use patterns such as {candidates}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _candidates(names: Sequence[str]) -> list[str]:
    """Patterns that would fit: the first blocks and the last parts of names, without the layers' numbers."""
    blocks = dict.fromkeys(f"{'.'.join(name.split('.')[:2])}.*" for name in names if name.count(".") > 1)
    ends = dict.fromkeys(f"*.{name.rpartition('.')[2]}" for name in names if "." in name)
    return [*blocks, *ends][:_KINDS_SHOWN] or list(names)
