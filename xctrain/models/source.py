"""Model folders from a hub, at one pinned revision: downloaded when the config asks for it by name, and never else."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shards.errors import ConfigError

if TYPE_CHECKING:
    from xctrain.modelconfig import ModelConfig

_WEIGHTS = ["*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt"]
_UNUSED = ["*.msgpack", "*.h5", "*.onnx", "*.gguf", "*.ot"]  # the same weights for other libraries


def fetch(config: "ModelConfig", *, download: bool, weights: bool = True) -> Path:
    """The folder of the model that ``model.source`` has under ``model.path``, in that hub's own cache.

    Without ``download`` the network is not asked. Files that are there already are not downloaded again. Without
    ``weights`` only the small files are: configuration and tokenizer.

    Raises:
        ConfigError: it is not there, cannot be had, or the library that downloads is not installed.
    """
    snapshot_download, errors = _library(config.source)
    assert config.path
    try:
        folder = snapshot_download(
            config.path,
            revision=config.revision,
            local_files_only=not download,
            ignore_patterns=_UNUSED if weights else _UNUSED + _WEIGHTS,
        )
    except errors as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        what = "cannot be downloaded" if download else "is not in the cache of this machine"
        raise ConfigError(
            f"model.path: {config.path} at {config.revision} {what} (model.source={config.source}): {reason}; check name, "
            "revision and network, or copy the model here and give its folder with model.source=folder",
            path=config.path,
        ) from error
    return Path(folder)


def _library(source: str) -> tuple[Any, tuple[type[Exception], ...]]:
    """What downloads from a source, and what it raises when it cannot."""
    if source == "huggingface":
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError

        # The base of the first is what its HTTP client raises, which has changed before.
        return huggingface_hub.snapshot_download, (*HfHubHTTPError.__bases__, OSError, ValueError, RuntimeError)
    try:
        import modelscope
    except ImportError as error:
        raise ConfigError(
            "model.source is modelscope, its library is not installed; pip install 'xctrain[modelscope]', or give a folder "
            "with model.source=folder"
        ) from error
    return modelscope.snapshot_download, (Exception,)  # errors of its own, of its HTTP client, and plain ones
