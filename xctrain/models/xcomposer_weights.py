"""Official checkpoints to the model and back: safetensors or `.bin` files, whole or in shards."""

import ctypes
import json
import re
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shards.errors import ConfigError
from xctrain.models.adapter import quantise_layer
from xctrain.models.xcomposer_config import XComposerConfig
from xctrain.models.xcomposer_decoder import DECODER_LINEARS
from xctrain.models.xcomposer_model import XComposer

# Adapters for web pages and for writing, which training and chat never use; CLIP's last norm, which XComposer leaves
# out; and the position numbers that old CLIP classes saved.
UNUSED = re.compile(r"\.lora_(sft|dpo|web)_[AB]\.|\.post_layernorm\.|\.embeddings\.position_ids$")
_SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
_WEIGHTS = re.compile(r"\.(safetensors|bin|pt|pth)(\.index\.json)?$")


def own_name(official: str) -> str:
    """Name in this model of an official tensor: PLoRA stands beside its linear here, in it there."""
    return re.sub(r"\.(Plora_[AB])\.", r"_plora.\1.", official)


def official_name(own: str) -> str:
    """Name in an official checkpoint of a parameter of this model."""
    return re.sub(r"_plora\.(Plora_[AB])\.", r".\1.", own)


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights.

    Raises:
        ConfigError: it has none, or a shard that its index names is not there.
    """
    for name in _SINGLE_FILES:
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            if missing := [shard for shard in shards if not (folder / shard).is_file()]:
                raise ConfigError(
                    f"model.path: {folder} lacks {len(missing)} of {len(shards)} weight files, {missing[0]} for "
                    "example; download the rest",
                    path=folder,
                )
            return [folder / shard for shard in shards]
        if (folder / name).is_file():
            return [folder / name]
    raise ConfigError(
        f"model.path: {folder} holds no weights ({', '.join(_SINGLE_FILES)}, or an index of shards); download them",
        path=folder,
    )


def has_weights(folder: Path) -> bool:
    """Whether a file of weights lies in a folder; one from which only the small files were fetched has none."""
    return any(_WEIGHTS.search(path.name) and not path.name.endswith(".json") for path in folder.iterdir())


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Official name and tensor of all weights that the model uses, one at a time.

    A tensor lies in its file until it is copied, and no longer than until the next one is asked for.

    Raises:
        ConfigError: a file is missing, damaged, or holds more than weights; nothing that lies in one is run.
    """
    for path in weight_files(folder):
        try:
            for name, tensor in _tensors_in(path):
                if not UNUSED.search(name):
                    yield name, tensor
        except (SafetensorError, UnpicklingError, RuntimeError, EOFError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"{path}: cannot be read as weights alone: {reason}; fetch it again", path=path
            ) from error


def _tensors_in(path: Path) -> Iterator[tuple[str, Tensor]]:
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)
    else:
        # Old files are no zip archives, and only those can stay on disk.
        yield from torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)).items()


def empty_model(config: XComposerConfig) -> XComposer:
    """The model without memory for its weights: shapes and names only."""
    with torch.device("meta"):
        return XComposer(config)


def decoder_linears(model: XComposer) -> list[str]:
    """Names of the decoder's linears without their PLoRA: what adapters wrap and 4 bits replace."""
    return [name for name, _ in model.named_modules() if name.rpartition(".")[2] in DECODER_LINEARS]


def load_model(
    config: XComposerConfig, folder: Path, dtype: torch.dtype, compute: torch.dtype | None = None
) -> XComposer:
    """The model with the weights of an official checkpoint, in ``dtype``. Never holds a weight twice.

    With ``compute``, the decoder's linears are held in 4 bits, each from the moment it is read, and multiply in that
    type.

    Raises:
        ConfigError: a weight is missing, not the model's, or of another shape; or a linear does not fit 4 bits.
    """
    model = empty_model(config)
    quantiser = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU needs minutes for the 7B model
    short = {f"{name}.weight" for name in decoder_linears(model)} if compute else set()
    for name, tensor in matched_tensors(model, folder):
        if compute and name in short:
            quantise_layer(model, name.removesuffix(".weight"), tensor.to(quantiser, dtype), compute)
            _give_back_freed_memory()
        else:
            place(model, name, nn.Parameter(tensor.to(dtype, copy=True)))
    return model


def matched_tensors(model: XComposer, folder: Path) -> Iterator[tuple[str, Tensor]]:
    """This model's name and the tensor of every weight in an official checkpoint, each once, in the file's order.

    Only names and shapes are read before a tensor is copied: to walk over them all checks a checkpoint in moments.

    Raises:
        ConfigError: a weight is missing, not the model's, or of another shape.
    """
    missing = dict(model.named_parameters())
    for official, tensor in read_tensors(folder):
        name = own_name(official)
        expected = missing.pop(name, None)
        if expected is None:
            raise ConfigError(
                f"model.path: {folder} holds {official}, which XComposer2.5 has not (or a second time); give a "
                "checkpoint of XComposer2.5-7B",
                path=folder,
            )
        if expected.shape != tensor.shape:
            raise ConfigError(
                f"model.path: {folder}: {official} is {tuple(tensor.shape)}, config.json makes it "
                f"{tuple(expected.shape)}; fetch both from one place",
                path=folder,
            )
        yield name, tensor
    if missing:
        raise ConfigError(
            f"model.path: {folder} lacks {len(missing)} weights of XComposer2.5, {official_name(min(missing))} for "
            "example; fetch it again",
            path=folder,
        )


def _give_back_freed_memory() -> None:
    """Tensors of some MB that come and go between others that stay leave gaps, which glibc would keep: half a model."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def place(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put a parameter where the model has one of that name."""
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, parameter)


def save_model(model: XComposer, folder: Path) -> None:
    """Write the weights under official names, in shards of at most 5 GB."""
    from huggingface_hub import save_torch_state_dict

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {official_name(name): parameter.detach() for name, parameter in model.named_parameters()}
    save_torch_state_dict(tensors, folder)


def copy_rest(base: Path, folder: Path) -> None:
    """Copy what a checkpoint holds besides weights: configuration, tokenizer, the published code, licence."""
    for path in base.iterdir():
        if path.is_file() and not _WEIGHTS.search(path.name) and not path.name.startswith("."):
            shutil.copyfile(path, folder / path.name)
