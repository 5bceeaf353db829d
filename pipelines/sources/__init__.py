"""Where records come from: one reader a format, behind one interface. ``open_sources`` picks them by the config."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from pipelines.config import BuildConfig, HeldOutConfig, SourceConfig
from pipelines.images import ImagesSpec
from pipelines.records import Record
from pipelines.sources import coco


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
    """A source as part of a build. ``split`` is None where the records or their hashes decide it."""

    source: Source
    config: SourceConfig
    split: str | None


def open_sources(config: BuildConfig) -> tuple[Origin, ...]:
    """The sources to train on, then the held-out one, if there is one.

    Raises:
        ConfigError: a path or a file is not what a source consists of; nothing has been written.
    """
    configs = [config.source]
    if isinstance(config.held_out, HeldOutConfig):
        configs.append(config.held_out)
    elif config.held_out == "auto" and (held_out := coco.held_out_beside(config.source)):
        configs.append(held_out)
    return tuple(Origin(coco.CocoSource(source), source, source.split) for source in configs)
