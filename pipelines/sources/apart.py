"""A build must not write to the folder that it reads: it would replace its own source."""

import glob
import os
from collections.abc import Iterator
from pathlib import Path

from pipelines.config import BuildConfig, HeldOutConfig, SourceConfig
from pipelines.sources.files import listed, section
from shards.errors import ConfigError


def require_apart(config: BuildConfig) -> None:
    """Refuse a source that is, or lies in, the folder to write to, links followed.

    Raises:
        ConfigError: names the location and the folder; nothing has been written.
    """
    out = Path(os.path.realpath(config.folder))
    sources = [*config.all_sources, *([config.held_out] if isinstance(config.held_out, HeldOutConfig) else [])]
    for source in sources:
        for field, location in _locations(source):
            if Path(os.path.realpath(_without_pattern(location))).is_relative_to(out):
                raise ConfigError(
                    f"{section(source)}.{field} is {location}, which is or lies in the folder to write to, {out}: the build "
                    "would replace what it reads; choose another out",
                    path=location,
                )


def _locations(source: SourceConfig) -> Iterator[tuple[str, str]]:
    """The local paths of a source, by the field that names them."""
    fields = {"root": source.root, "annotations": source.annotations, "images": source.images, "path": source.path}
    return ((field, place) for field, value in fields.items() for place in listed(value) if "://" not in place)


def _without_pattern(location: str) -> Path:
    """The folder above the first part of a path that is a pattern; the path itself if it is none."""
    parts = Path(location).parts
    plain = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return Path(location) if Path(location).exists() else Path(*parts[:plain])
