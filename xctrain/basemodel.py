"""Where the base model lies, and what names it: the tiny one is built there on first use."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shards.reader import SplitReader
from xctrain.config import Config
from xctrain.errors import ConfigError

if TYPE_CHECKING:
    from xctrain.models import Family

_IDENTITY = ("*.safetensors", "*.bin", "*.json", "*.model", "*.jinja")
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16


def base_model(config: Config) -> Path | str:
    """Folder or hub name of the model that training begins from."""
    if config.model.path is None:
        return config.run.dir / "base-model"
    return config.model.path


def ensure_base_model(config: Config, reader: SplitReader) -> None:
    """Build the tiny model unless it is there; any other one must be there already. Called on one process."""
    base = Path(base_model(config))
    if config.model.family == "tiny":
        if not (base / "config.json").exists():
            from xctrain.models.tiny import build_tiny

            base.parent.mkdir(parents=True, exist_ok=True)
            build_tiny(base, _captions(reader), config.train.seed)
    elif config.model.path and not base.exists() and config.model.path.startswith((".", "/", "~")):
        raise ConfigError(f"model.path: {base}: there is no such folder; give a model folder or a hub name", path=base)


def open_family(config: Config) -> "Family":
    """The base model in its family, with adapters beside it if the config wants them."""
    from xctrain import models

    return models.open_family(config.model, base_model(config), config.adapter, config.train.seed)


def _captions(reader: SplitReader) -> Iterator[str]:
    for index in range(len(reader)):
        yield from reader.read_json(index)["captions"]


def model_id(config: Config) -> str:
    """Names the base model independently of where it lies: a hash of its small files, and of samples of its large ones."""
    base = Path(base_model(config))
    if not base.is_dir():
        return f"{config.model.path}@{config.model.revision or 'main'}"
    digest = hashlib.sha256()
    for path in sorted({p for pattern in _IDENTITY for p in base.glob(pattern)}):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for i in range(_SAMPLES):  # spread over the file: a fine-tune of the same shape differs everywhere
                file.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
