"""Where the base model lies, and what names it: the tiny one is built there on first use."""

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

from safetensors import SafetensorError, safe_open

from shards.errors import DamagedSampleError
from xctrain.config import Config
from xctrain.data import Data
from xctrain.errors import ConfigError, RunError

if TYPE_CHECKING:
    from xctrain.models import Family

_IDENTITY = ("*.safetensors", "*.bin", "*.json", "*.model", "*.jinja")
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16
_HUB_TIMEOUT_S = 10


def base_model(config: Config, *, weights: bool = True) -> Path | str:
    """Folder or hub name of the model that training begins from; without ``weights``, its small files will do."""
    if config.model.path is None:
        return config.run.dir / "base-model"
    if config.model.source != "folder":
        from xctrain.models.source import fetch

        return fetch(config.model, download=False, weights=weights)
    return config.model.path


def ensure_base_model(config: Config, data: Data, *, weights: bool = True) -> None:
    """Build the tiny model unless it is there, download what the config names a hub for; on one process.

    Any other one must be there already. Without ``weights`` only a hub model's small files are downloaded.
    """
    if config.model.source != "folder":
        from xctrain.models.source import fetch

        fetch(config.model, download=True, weights=weights)
        return
    base = Path(base_model(config))
    if config.model.family == "tiny":
        if not (base / "config.json").exists():
            from xctrain.models.tiny import build_tiny

            base.parent.mkdir(parents=True, exist_ok=True)
            try:
                build_tiny(base, _captions(data), config.train.seed)
            except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a full disk
                raise RunError(
                    f"{base}: the tiny model cannot be written: {error}; make room, then start again", path=base
                ) from error
    elif config.model.path and not base.exists():
        if config.model.family == "xcomposer":
            raise ConfigError(
                f"model.path: {base}: there is no such folder; give a model folder, or a hub name with "
                "model.source=huggingface or modelscope, and model.revision",
                path=base,
            )
        if config.model.path.startswith((".", "/", "~")) or config.model.path.count("/") != 1:
            raise ConfigError(
                f"model.path: {base}: there is no such folder; give a model folder or a hub name, as in owner/model",
                path=base,
            )
        _require_hub_model(config.model.path, config.model.revision)


def _require_hub_model(name: str, revision: str | None) -> None:
    """Ask the hub once, as loading would try every file for minutes; what is in its cache will do without a network."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    # The base of the first is what its HTTP client raises, which has changed before.
    errors = cast("tuple[type[Exception], ...]", (*HfHubHTTPError.__bases__, OSError, ValueError))
    try:
        HfApi().model_info(name, revision=revision, timeout=_HUB_TIMEOUT_S)
    except errors as error:
        why = str(error).strip().partition("\n")[0]
        if not isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            raise ConfigError(
                f"model.path: {name}: there is no such folder, and the hub does not have it or cannot be asked: {why}; "
                "give a model folder, or check the name and the network",
                path=name,
            ) from error
        print(
            f"model.path: {name}: the hub cannot be asked: {why}; HF_HUB_OFFLINE=1 takes it from the cache at once",
            file=sys.stderr,
        )


@contextmanager
def _damage_named(base: Path | str) -> Iterator[None]:
    """Say which of the weight files is damaged; the library's error does not."""
    try:
        yield
    except SafetensorError as error:
        damaged = next(filter(_is_damaged, sorted(Path(base).glob("*.safetensors"))), Path(base))
        raise ConfigError(
            f"{damaged}: cannot be read as weights: {error}; fetch it again, or give another model.path", path=damaged
        ) from error


def _is_damaged(path: Path) -> bool:
    try:
        with safe_open(path, framework="numpy"):
            return False
    except SafetensorError:
        return True


def open_family(config: Config, *, empty: bool = False) -> "Family":
    """The base model in its family, with adapters beside it if the config wants them; ``empty``: without its weights."""
    from xctrain import models

    base = base_model(config, weights=not empty)
    with _damage_named(base):
        return models.open_family(config.model, base, config.adapter, config.train.seed, empty=empty)


def _captions(data: Data) -> Iterator[str]:
    for index in data.kept:
        with suppress(DamagedSampleError):  # training masks it in its turn, and counts it
            yield from data.reader.read_json(index)["captions"]


def model_id(config: Config) -> str:
    """Names the base model independently of where it lies: a hash of its small files, and of samples of its large ones."""
    named = f"{config.model.path}@{config.model.revision or 'main'}"
    if config.model.source != "folder" or not (base := Path(base_model(config))).is_dir():
        return named
    digest = hashlib.sha256()
    for path in sorted({p for pattern in _IDENTITY for p in base.glob(pattern)}):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for i in range(_SAMPLES):  # spread over the file: a fine-tune of the same shape differs everywhere
                file.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
