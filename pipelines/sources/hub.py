"""Datasets on the Hugging Face hub: their Parquet files, downloaded into the hub's own cache because the config names them."""

import re
from fnmatch import fnmatch
from pathlib import Path

from shards.errors import ConfigError

PREFIX = "hf://datasets/"
_ADDRESS = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([\w.%-]+))?(?:/(.+))?")
_CONVERTED = "refs/convert/parquet"  # where the hub puts Parquet files of datasets that have none


def fetch(location: str, where: str) -> list[str]:
    """Local paths of the Parquet files that ``hf://datasets/ORG/NAME[@REVISION][/PATTERN]`` names.

    Raises:
        ConfigError: the address is of another form, there are no such files, or they cannot be had.
    """
    if (match := _ADDRESS.fullmatch(location)) is None:
        raise ConfigError(
            f"{location}: expected hf://datasets/ORG/NAME, @REVISION and /PATTERN if you like; check {where}"
        )
    name, revision, pattern = match[1], (match[2] or "").replace("%2F", "/") or None, match[3] or "*.parquet"
    for tried in (revision,) if revision else (None, _CONVERTED):
        if found := _parquet_files(location, name, tried, pattern, where):
            return found
    raise ConfigError(
        f"{location}: has no file like {pattern}; look at https://huggingface.co/datasets/{name}/tree/main"
    )


def _parquet_files(location: str, name: str, revision: str | None, pattern: str, where: str) -> list[str]:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    # The base of the first is what its HTTP client raises, which has changed before.
    errors: tuple[type[Exception], ...] = (*HfHubHTTPError.__bases__, OSError, ValueError, RuntimeError)
    try:
        folder = huggingface_hub.snapshot_download(
            name, repo_type="dataset", revision=revision, allow_patterns=[pattern, f"**/{pattern}"]
        )
    except errors as error:
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        raise ConfigError(
            f"{location}: cannot be downloaded: {reason}; check name, revision, rights (`hf auth login`) and network, or "
            f"give downloaded files as {where}"
        ) from None
    # The folder may hold files of other patterns too, from before.
    names = [path.relative_to(folder).as_posix() for path in Path(folder).rglob("*.parquet")]
    return sorted(str(Path(folder, n)) for n in names if fnmatch(n, pattern) or fnmatch(n, f"*/{pattern}"))
