"""Weights and optimizer state of a model as safetensors files, by parameter name.

A position in a list would mean nothing once a parameter is frozen or added.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from xctrain.errors import CheckpointError

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
OPTIMIZER_REST = "optimizer.json"
NAMES = (MODEL, OPTIMIZER, OPTIMIZER_REST)


def trainable(module: nn.Module) -> dict[str, torch.Tensor]:
    """The weights that train, by name."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def not_finite(module: nn.Module) -> list[str]:
    """Names of trainable weights that hold a value which is not finite."""
    return [name for name, weight in trainable(module).items() if not torch.isfinite(weight).all()]


def num_bytes(module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Size of what ``write`` writes, but for a few kB."""
    slots = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in (*trainable(module).values(), *slots))


def write(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the trainable weights and the optimizer's state.

    Raises:
        OSError: a file could not be written.
    """
    weights = {name: weight.cpu().contiguous() for name, weight in trainable(module).items()}
    tensors, rest = _optimizer_to_files(module, optimizer)
    save_tensors(weights, folder / MODEL)
    save_tensors(tensors, folder / OPTIMIZER)
    (folder / OPTIMIZER_REST).write_text(json.dumps(rest, indent=1), encoding="utf-8")


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


def load_weights(path: Path, module: nn.Module, *, every_trainable: bool) -> None:
    """Put a checkpoint's weights into ``module``; ``every_trainable``: to go on training, so none may be left as it was.

    Raises:
        CheckpointError: names or shapes differ from the module's.
    """
    saved = load_file(path / MODEL)
    parameters = dict(module.named_parameters())
    expected = {name for name, p in parameters.items() if p.requires_grad} if every_trainable else saved.keys()
    if odd := sorted((saved.keys() ^ expected) | (saved.keys() - parameters.keys())):
        raise CheckpointError(
            f"{path}: holds {len(saved)} trainable weights, the model has {len(expected)}; {len(odd)} names are on "
            f"one side only, first {odd[0]}; use the model.path, model.freeze and adapter that the run began with",
            path=path,
        )
    with torch.no_grad():
        for name, weight in saved.items():
            if parameters[name].shape != weight.shape:
                raise CheckpointError(
                    f"{path}: {name} is {tuple(weight.shape)}, the model has {tuple(parameters[name].shape)}; "
                    "use the model that the run began with",
                    path=path,
                )
            parameters[name].copy_(weight)


def load_optimizer(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put a checkpoint's optimizer state into ``optimizer``, which holds parameters of ``module``."""
    tensors = load_file(path / OPTIMIZER)
    rest = json.loads((path / OPTIMIZER_REST).read_text(encoding="utf-8"))
    state: dict[str, dict[str, Any]] = {name: dict(values) for name, values in rest["state"].items()}
    for key, tensor in tensors.items():
        slot, _, name = key.partition(":")
        state.setdefault(name, {})[slot] = tensor
    names = _names(module)
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    if unknown := sorted(state.keys() - set(order)):
        raise CheckpointError(
            f"{path}: optimizer state for {unknown[0]}, which does not train here; "
            "use the model.freeze that the run began with",
            path=path,
        )
    values = optimizer.state_dict()
    values["state"] = {i: state[name] for i, name in enumerate(order) if name in state}
    optimizer.load_state_dict(values)


def _optimizer_to_files(
    module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    names = _names(module)
    tensors: dict[str, torch.Tensor] = {}
    rest: dict[str, Any] = {"state": {}, "groups": []}
    for group in optimizer.param_groups:
        values = {key: value for key, value in group.items() if key != "params"}
        rest["groups"].append({**values, "params": [names[id(p)] for p in group["params"]]})
        for parameter in group["params"]:
            name = names[id(parameter)]
            for slot, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{slot}:{name}"] = value.detach().cpu().contiguous()
                else:
                    rest["state"].setdefault(name, {})[slot] = value
    return tensors, rest


def _names(module: nn.Module) -> dict[int, str]:
    return {id(p): name for name, p in module.named_parameters()}
