"""Save, restore, list and prune. The old checkpoint goes only after the new one is whole and read back.

    checkpoints/step-00000010/
        model.safetensors      trainable weights by parameter name
        optimizer.safetensors  its tensors as ``slot:parameter name``; optimizer.json: the rest
        rng.json               generators of every rank
        scaler.json            fp16 loss scale, {} without one
        position.json          TrainState and the world it was saved in
        config.yaml            resolved config
        files.json             sizes and sha256 of the files above, written last

Only tensors and JSON: loading never unpickles.
"""

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shards.atomic import ASIDE, publish, sync_folder
from xctrain.errors import CheckpointError
from xctrain.state import TrainState

FILES = "files.json"
POSITION = "position.json"
CONFIG = "config.yaml"
_SPARE_BYTES = 64 * 2**20  # disk space left free beside a checkpoint, for logs


@dataclass(frozen=True)
class Content:
    """Everything a checkpoint is made of, gathered on rank 0."""

    state: TrainState
    module: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Mapping[str, Any]
    rng: Sequence[Mapping[str, Any]]  # one entry a rank, from rng.capture
    config_yaml: str
    world: Mapping[str, Any]  # world_size, threads, precision, versions: where it was saved
    model_id: str


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def path(self, step: int) -> Path:
        """Where the checkpoint of ``step`` stands."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps that have a folder, whole or not, newest first, in numeric order."""
        names = (p.name.removeprefix("step-") for p in self.folder.glob("step-*") if p.is_dir())
        return sorted((int(name) for name in names if name.isdigit()), reverse=True)

    def newest_valid(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint that is whole, and why newer ones were passed over."""
        passed_over = []
        for step in self.steps():
            try:
                check(self.path(step))
            except CheckpointError as error:
                passed_over.append(f"passed over {error}")
            else:
                return self.path(step), passed_over
        return None, passed_over

    def save(self, content: Content) -> Path:
        """Write a checkpoint aside, rename it into place, read it back, and only then remove older ones.

        Raises:
            CheckpointError: weights that are not finite, a full disk, or a file that reads back differently. Older
                checkpoints stand as they were.
        """
        path = self.path(content.state.step)
        _require_finite_weights(content, path)
        self._require_space(content, path)
        temporary = path.with_name(f".{path.name}{ASIDE}")
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            _write(temporary, content)
            if path.exists():  # damaged, or of a state that this one replaces
                shutil.rmtree(path)
            publish(temporary, path)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"{path}: cannot be written: {error.strerror}; {self._newest_text()}; "
                "make room, then start again to go on",
                path=path,
                step=content.state.step,
            ) from error
        check(path)
        self._prune(content.state.step)
        return path

    def _newest_text(self) -> str:
        newest, _ = self.newest_valid()
        return f"the newest whole checkpoint is {newest.name}" if newest else "there is no older checkpoint"

    def _require_space(self, content: Content, path: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        needed = _SPARE_BYTES + sum(t.numel() * t.element_size() for t in _tensors(content))
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise CheckpointError(
                f"{path}: needs {needed / 1e6:.0f} MB of disk, {free / 1e6:.0f} MB are free; {self._newest_text()}; "
                "make room, then start again to go on",
                path=path,
            )

    def _prune(self, saved: int) -> None:
        """Keep the newest ``keep`` up to the step just saved; higher steps are of a past that was gone back on."""
        steps = self.steps()
        kept = [step for step in steps if step <= saved][: self.keep]
        for step in steps:
            if step not in kept:
                shutil.rmtree(self.path(step))
        for leftover in self.folder.glob(f".step-*{ASIDE}"):
            shutil.rmtree(leftover)


def _tensors(content: Content) -> list[torch.Tensor]:
    slots = [value for state in content.optimizer.state.values() for value in state.values()]
    return [*_trainable(content.module).values(), *(s for s in slots if isinstance(s, torch.Tensor))]


def _trainable(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def _require_finite_weights(content: Content, path: Path) -> None:
    bad = [name for name, weight in _trainable(content.module).items() if not torch.isfinite(weight).all()]
    if bad:
        raise CheckpointError(
            f"{path}: not saved: {len(bad)} weights hold values that are not finite, first {bad[0]}; "
            "go on from the newest checkpoint with a lower optim.lr",
            path=path,
            step=content.state.step,
        )


def _write(folder: Path, content: Content) -> None:
    weights = {name: weight.cpu().contiguous() for name, weight in _trainable(content.module).items()}
    save_file(weights, folder / "model.safetensors")
    tensors, rest = _optimizer_to_files(content.module, content.optimizer)
    save_file(tensors, folder / "optimizer.safetensors")
    _write_json(folder / "optimizer.json", rest)
    _write_json(folder / "rng.json", {"ranks": list(content.rng)})
    _write_json(folder / "scaler.json", dict(content.scaler))
    _write_json(folder / POSITION, _position(content))
    (folder / CONFIG).write_text(content.config_yaml, encoding="utf-8")
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(folder.iterdir())}
    _write_json(folder / FILES, files)
    for path in folder.iterdir():
        _sync(path)
    sync_folder(folder)


def _position(content: Content) -> dict[str, Any]:
    state = content.state
    segment = state.segments[-1]
    order = {"version": segment.order_version, "seed": segment.seed}
    order |= {"fragment": segment.fragment, "window": segment.window, "lanes": segment.lanes}
    return {
        **state.to_json(),
        "epoch": state.epoch,
        "order": order,
        "masked_counts": dict(Counter(entry.reason for entry in state.masked)),
        "world": dict(content.world),
        "model_id": content.model_id,
    }


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=1, ensure_ascii=False), encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def check(path: Path) -> None:
    """Require that every file of a checkpoint is there with the size and hash it was written with.

    Raises:
        CheckpointError: what is missing or differs.
    """
    try:
        files = json.loads((path / FILES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise CheckpointError(f"{path}: {FILES} is missing or damaged, so the save did not end", path=path) from None
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path}: {name} is missing", path=path)
        if file.stat().st_size != expected["bytes"]:
            raise CheckpointError(
                f"{path}: {name} has {file.stat().st_size} bytes, {FILES} says {expected['bytes']}", path=path
            )
        found = _sha256(file)
        if found != expected["sha256"]:
            raise CheckpointError(
                f"{path}: {name} has sha256 {found[:12]}..., {FILES} says {expected['sha256'][:12]}...", path=path
            )


def read_position(path: Path) -> tuple[TrainState, dict[str, Any]]:
    """The state in a checkpoint, and all of position.json."""
    values = json.loads((path / POSITION).read_text(encoding="utf-8"))
    return TrainState.from_json(values), values


def read_json(path: Path, name: str) -> dict[str, Any]:
    """One of the JSON files of a checkpoint."""
    values = json.loads((path / name).read_text(encoding="utf-8"))
    assert isinstance(values, dict)
    return values


def load_weights(path: Path, module: nn.Module, *, every_trainable: bool) -> None:
    """Put a checkpoint's weights into ``module``; ``every_trainable``: to go on training, so none may be left as it was.

    Raises:
        CheckpointError: names or shapes differ from the module's.
    """
    saved = load_file(path / "model.safetensors")
    parameters = dict(module.named_parameters())
    expected = {name for name, p in parameters.items() if p.requires_grad} if every_trainable else saved.keys()
    if odd := sorted((saved.keys() ^ expected) | (saved.keys() - parameters.keys())):
        raise CheckpointError(
            f"{path}: holds {len(saved)} trainable weights, the model has {len(expected)}; {len(odd)} names are on "
            f"one side only, first {odd[0]}; use the model.path and model.freeze that the run began with",
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


def _names(module: nn.Module) -> dict[int, str]:
    return {id(p): name for name, p in module.named_parameters()}


def _optimizer_to_files(
    module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """State by parameter name, since positions in a list mean nothing once a parameter is frozen or added."""
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


def load_optimizer(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put a checkpoint's optimizer state into ``optimizer``, which holds parameters of ``module``."""
    tensors = load_file(path / "optimizer.safetensors")
    rest = read_json(path, "optimizer.json")
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
