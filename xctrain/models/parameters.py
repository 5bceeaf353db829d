"""Which parameters train. Names are those of the base model's own files."""

import math
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

from shards.errors import ConfigError
from xctrain.flops import Part


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Stop the gradient of every parameter whose name fits one of the shell-style patterns.

    Raises:
        ConfigError: a pattern fits nothing, or nothing is left to train.
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        names = [name for name in parameters if fnmatchcase(name, pattern)]
        if not names:
            candidates = ", ".join(f"{block}.*" for block in _sizes_by_block(model))
            raise ConfigError(f"model.freeze: {pattern!r} fits no parameter; use patterns such as {candidates}")
        for name in names:
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(f"model.freeze: {', '.join(patterns)} freeze every parameter; leave at least one to train")


def parameter_table(module: nn.Module) -> str:
    """Text: trainable and frozen parameters of each block, one line a block, and their sum.

    ``module`` is a model, or one that holds it as ``model`` alone.
    """
    held = dict(module.named_children())
    rows = [(block, *sizes) for block, sizes in _sizes_by_block(held["model"] if len(held) == 1 else module).items()]
    rows.append(("total", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    width = max(len(row[0]) for row in rows)
    lines = [f"{'parameters':<{width}} {'trainable':>15} {'frozen':>15}"]
    return "\n".join(lines + [f"{block:<{width}} {trained:>15,} {frozen:>15,}" for block, trained, frozen in rows])


def matrices_of(module: nn.Module, without: Sequence[nn.Module] = ()) -> Part:
    """Numbers in the matrices that a module multiplies with, and how many of them train; ``without`` some inside it."""
    left_out = {id(part) for outer in without for part in outer.modules()}
    total = trained = 0
    for part in module.modules():
        if id(part) in left_out or isinstance(part, nn.Embedding):
            continue
        for parameter in part.parameters(recurse=False):
            size = _size(parameter) if len(_shape(parameter)) > 1 else 0
            total += size
            trained += size if parameter.requires_grad else 0
    return Part(total, trained)


def types_and_attention(module: nn.Module) -> str:
    """Text: the types that weights are held in, and how attention is computed, where the model says it."""
    types = sorted({str(p.dtype).removeprefix("torch.") for p in module.parameters()})
    configs = [getattr(part, "config", None) for part in module.modules()]
    ways = sorted({way for c in configs if (way := getattr(c, "_attn_implementation", None))})
    return f"weights in {' and '.join(types)}{f', attention {chr(32).join(ways)}' if ways else ''}"


def parameters_without_gradient(loss: Tensor, model: nn.Module) -> tuple[str, ...]:
    """Names of trainable parameters that ``loss`` does not depend on. No backward pass runs.

    DistributedDataParallel waits for these for ever, or fails in its second step: freeze them, or tell it to look.
    """
    reached, seen, stack = set(), set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        reached.add(id(getattr(node, "variable", None)))
        stack.extend(following for following, _ in node.next_functions)
    return tuple(name for name, p in model.named_parameters() if p.requires_grad and id(p) not in reached)


def _sizes_by_block(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Trainable and frozen numbers of each block, in the model's order: `model.vision_tower`, `lm_head` ..."""
    trained: Counter[str] = Counter()
    frozen: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        block = ".".join(parts[: 2 if len(parts) > 2 else 1])
        size = _size(parameter)
        trained[block] += size if parameter.requires_grad else 0
        frozen[block] += 0 if parameter.requires_grad else size
    return {block: (trained[block], frozen[block]) for block in trained}


def _shape(parameter: nn.Parameter) -> Sequence[int]:
    """The whole shape: two weights in 4 bits share a byte of uint8, and DeepSpeed leaves a part of a weight."""
    whole = getattr(parameter, "quant_state", None)
    shape: Sequence[int] = getattr(whole, "shape", getattr(parameter, "ds_shape", parameter.shape))
    return shape


def _size(parameter: nn.Parameter) -> int:
    return math.prod(_shape(parameter))
