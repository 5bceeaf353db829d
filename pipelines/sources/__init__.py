"""Where records come from: one reader a format, behind one interface. ``open_sources`` picks them by the config."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipelines.config import BuildConfig, HeldOutConfig, SourceConfig
from pipelines.images import ImagesSpec
from pipelines.records import Record
from pipelines.sources import coco
from pipelines.sources.karpathy import KarpathySource
from pipelines.sources.table import TableSource
from pipelines.sources.webdataset import WebdatasetSource


class Source(Protocol):
    """A reader. Opening it checks what can be checked without reading all of it; nothing is written by any of it."""

    @property
    def kind(self) -> str:
        """Format, as in ``source.kind``."""

    @property
    def location(self) -> str:
        """Where the records stand, for messages and for telling whether a folder was built from another source."""

    @property
    def images(self) -> ImagesSpec:
        """Where the pictures are, for ``open_images`` in any process."""

    @property
    def counts(self) -> Counter[str]:
        """What was left aside, by kind; whole once ``records`` has come to its end."""

    def records(self) -> Iterator[Record]:
        """All records, in the order of the source. May be called again.

        Raises:
            ConfigError: the source is damaged or not of its format; where, and what was expected.
        """


@dataclass(frozen=True)
class Origin:
    """A source as part of a build. ``split`` is None where the records or their hashes decide it.

    ``group`` counts the sources of the config, one of which may be several files, each a source of its own.
    """

    source: Source
    config: SourceConfig
    group: int
    split: str | None


def open_sources(config: BuildConfig) -> tuple[Origin, ...]:
    """The sources to train on, then the held-out one, if there is one.

    Raises:
        ConfigError: a path or a file is not what a source consists of; nothing has been written.
    """
    configs = [*config.all_sources]
    if isinstance(config.held_out, HeldOutConfig):
        configs.append(config.held_out)
    elif config.held_out == "auto" and config.split_by == "source" and config.source is not None:
        configs += coco.held_out_beside(config.source)
    return tuple(
        Origin(source, each, group, each.split if config.split_by == "source" else None)
        for group, each in enumerate(configs)
        for source in _open(each, config.split_by == "official", config.folder / ".build" / "images")
    )


def _open(config: SourceConfig, official: bool, cache: Path) -> Sequence[Source]:
    if config.kind == "coco":
        return coco.open_all(config, official)
    if config.kind == "karpathy":
        return [KarpathySource(config)]
    if config.kind == "parquet":
        from pipelines.sources.parquet import ParquetSource  # pyarrow is not for everyone

        return [ParquetSource(config, cache)]
    if config.kind == "webdataset":
        return [WebdatasetSource(config)]
    return [TableSource(config)]
