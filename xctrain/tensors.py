"""Weights and optimizer state of a model as safetensors files, by parameter name.

A position in a list would mean nothing once a parameter is frozen or added.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from xctrain.errors import CheckpointError

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
OPTIMIZER_REST = "optimizer.json"
NAMES = (MODEL, OPTIMIZER, OPTIMIZER_REST)


@dataclass(frozen=True)
class Snapshot:
    """Trainable weights and the optimizer's state, whole, in this process's memory."""

    weights: dict[str, torch.Tensor]  # by parameter name
    slots: dict[str, torch.Tensor]  # the optimizer's tensors, as "slot:parameter name"
    rest: dict[str, Any]  # its other values

    def not_finite(self) -> list[str]:
        """Names of weights that hold a value which is not finite."""
        return [name for name, weight in self.weights.items() if not torch.isfinite(weight).all()]

    def num_bytes(self) -> int:
        """Size of what ``write`` writes, but for a few kB."""
        return _num_bytes(self.weights) + _num_bytes(self.slots)

    def describe(self) -> str:
        """What takes how much of it."""
        return f"{_num_bytes(self.weights) / 1e6:.1f} MB of weights, {_num_bytes(self.slots) / 1e6:.1f} MB of optimizer"

    def write(self, folder: Path) -> None:
        """Write the files of it.

        Raises:
            OSError: a file could not be written.
        """
        save_tensors(self.weights, folder / MODEL)
        save_tensors(self.slots, folder / OPTIMIZER)
        (folder / OPTIMIZER_REST).write_text(json.dumps(self.rest, indent=1), encoding="utf-8")


def _num_bytes(named: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in named.values())


# A tensor of the state, with a name of its own, to one in this process's memory; or the tensor itself if it is there.
Copy = Callable[[str, torch.Tensor], torch.Tensor]


def in_memory(_name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in this process's memory, copied only if it is elsewhere."""
    return tensor.cpu().contiguous()


def shapes(module: nn.Module, means: Sequence[str]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The large tensors that a snapshot will hold; ``means``: the optimizer's slots that are as large as weights."""
    found: dict[str, tuple[torch.Size, torch.dtype]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            shape = torch.Size(getattr(parameter, "ds_shape", parameter.shape))  # DeepSpeed's name for the whole
            found |= dict.fromkeys((name, *(f"{mean}:{name}" for mean in means)), (shape, parameter.dtype))
    return found


def snapshot(
    module: nn.Module, optimizer: torch.optim.Optimizer, copy: Copy = in_memory, *, keep: bool = True
) -> Snapshot | None:
    """A model's state; parts that lie on several ranks are joined by all of them together, tensor by tensor.

    None without ``keep``: for the ranks that only hand over their parts.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    weights, slots = {}, {}
    rest: dict[str, Any] = {"state": {}, "groups": []}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            weights[name] = _whole(name, parameter.detach(), copy, keep)
    for group in optimizer.param_groups:
        values = {key: value for key, value in group.items() if key != "params"}
        rest["groups"].append({**values, "params": [names[id(p)] for p in group["params"]]})
        for parameter in group["params"]:
            name = names[id(parameter)]
            for slot, value in optimizer.state.get(parameter, {}).items():
                if slot.startswith("qmap"):
                    continue  # bitsandbytes' own table, the same for all
                if isinstance(value, torch.Tensor):
                    key = f"{slot}:{name}"
                    slots[key] = _whole(key, value.detach(), copy, keep)
                else:
                    rest["state"].setdefault(name, {})[slot] = value
    return Snapshot(weights, slots, rest) if keep else None


def _whole(name: str, tensor: torch.Tensor, copy: Copy, keep: bool) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return copy(name, tensor) if keep else tensor.new_empty(0)


def part_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor, cut as ``like`` is; without asking another rank."""
    if not isinstance(like, DTensor):
        return tensor
    tensor = tensor.to(like.device)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write one safetensors file; its library has an error of its own for a full disk."""
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        raise OSError(None, str(error), str(path)) from error


def names_in(path: Path) -> list[str]:
    """Names of the tensors in a safetensors file; only its header is read."""
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def load_weights(
    path: Path, module: nn.Module, *, every_trainable: bool, saved: dict[str, torch.Tensor] | None = None
) -> None:
    """Put a checkpoint's weights into ``module``; ``every_trainable``: to go on training, so none may be left as it was.

    ``saved``: the weights, if they were read already.

    Raises:
        CheckpointError: names or shapes differ from the module's.
    """
    parameters = dict(module.named_parameters())
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    with torch.no_grad():
        for name, weight in read_weights(path, module, shapes, every_trainable=every_trainable, saved=saved).items():
            parameters[name].copy_(part_of(weight, parameters[name]))


def read_weights(
    path: Path,
    module: nn.Module,
    shapes: Mapping[str, Sequence[int]],
    *,
    every_trainable: bool = True,
    saved: dict[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """A checkpoint's weights, whole, which must be the module's by name and shape.

    Raises:
        CheckpointError: they are not.
    """
    saved = read_saved(path) if saved is None else saved
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    expected = trained if every_trainable else saved.keys()
    if odd := sorted((saved.keys() ^ expected) | (saved.keys() - shapes.keys())):
        raise CheckpointError(
            f"{path}: holds {len(saved)} trainable weights, the model has {len(expected)}; {len(odd)} names are on "
            f"one side only, first {odd[0]}; use the model.path, model.freeze and adapter that the run began with",
            path=path,
        )
    for name, weight in saved.items():
        if tuple(shapes[name]) != tuple(weight.shape):
            raise CheckpointError(
                f"{path}: {name} is {tuple(weight.shape)}, the model has {tuple(shapes[name])}; "
                "use the model that the run began with",
                path=path,
            )
    return saved


def read_saved(path: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's weights by name, whatever model they are of."""
    return load_file(path / MODEL)


def read_slots(path: Path) -> dict[str, torch.Tensor]:
    """The optimizer's tensors in a checkpoint, as "slot:parameter name"."""
    return load_file(path / OPTIMIZER)


def load_optimizer(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put a checkpoint's optimizer state into ``optimizer``, which holds parameters of ``module``."""
    tensors = read_slots(path)
    rest = json.loads((path / OPTIMIZER_REST).read_text(encoding="utf-8"))
    state: dict[str, dict[str, Any]] = {name: dict(values) for name, values in rest["state"].items()}
    for key, tensor in tensors.items():
        slot, _, name = key.partition(":")
        state.setdefault(name, {})[slot] = tensor
    names = {id(p): name for name, p in module.named_parameters()}
    held = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    if unknown := sorted(state.keys() - held.keys()):
        raise CheckpointError(
            f"{path}: optimizer state for {unknown[0]}, which does not train here; "
            "use the model.freeze that the run began with",
            path=path,
        )
    for name, slots in state.items():
        parameter = held[name]
        there = optimizer.state[parameter]
        for slot, value in slots.items():
            if not isinstance(value, torch.Tensor):
                there[slot] = value
            elif isinstance(there.get(slot), torch.Tensor):  # where the optimizer has put it
                there[slot].copy_(value)
            else:
                part = part_of(value, parameter) if value.shape == parameter.shape else value
                there[slot] = part.to(parameter.device)
