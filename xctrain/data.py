"""The datasets of a run: opened, named as segments name them, and turned into an order."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path

from shards.errors import UserError
from shards.joined import SampleReader, join
from shards.mix import Mix, Part, Stretches
from shards.quarantine import Quarantine, quarantine_id
from shards.reader import SplitReader
from shards.sample import canonical_json
from xctrain.dataconfig import DataConfig, SourceConfig
from xctrain.errors import ConfigError
from xctrain.state import Segment, Source


@dataclass(frozen=True)
class Dataset:
    """One dataset of a run, opened at the split that is trained on."""

    source: Source
    reader: SplitReader
    quarantine: Quarantine

    @property
    def label(self) -> str:
        """What it is called in messages."""
        return self.source.name or self.place

    @property
    def place(self) -> str:
        """Folder or address."""
        return str(self.reader.cache or self.reader.folder)

    def pictures(self, number: int) -> dict[str, bytes]:
        """Files of the first pictures of the split, by key, without those that are left out."""
        left_out = set(self.source.left_out)
        indices = islice((i for i in range(len(self.reader)) if i not in left_out), number)
        return {sample.key: sample.image for sample in map(self.reader.read, indices)}

    def sizes_of(self, source: Source) -> tuple[int, ...] | None:
        """Samples per shard of the dataset that a segment names, if it is this one, or what this one was added to."""
        number = self.reader.manifest.num_shards_of(source.manifest_id)
        if number is None:
            return None
        names = {shard.name for shard in self.reader.manifest.shards[:number]}
        return tuple(shard.num_samples for shard in self.reader.shards if shard.name in names)


@dataclass(frozen=True)
class Data:
    """All datasets of a run, in the order of the config."""

    datasets: tuple[Dataset, ...]

    @property
    def sources(self) -> tuple[Source, ...]:
        """As a segment names them."""
        return tuple(d.source for d in self.datasets)

    @cached_property
    def reader(self) -> SampleReader:
        """The samples of all of them under one numbering."""
        return join([d.reader for d in self.datasets])

    @property
    def manifest_id(self) -> str:
        """Names all of them."""
        return manifest_id(self.sources)

    @property
    def kept(self) -> list[int]:
        """Numbers of the samples that are not left out."""
        numbers: list[int] = []
        for dataset, first in zip(self.datasets, self._firsts, strict=True):
            left_out = set(dataset.source.left_out)
            numbers += [first + i for i in range(len(dataset.reader)) if i not in left_out]
        return numbers

    @property
    def known_damage(self) -> frozenset[str]:
        """Keys in the quarantine lists, which may still come until the epoch ends."""
        return frozenset(s.key for d in self.datasets for s in d.quarantine.samples if s.key)

    @property
    def _firsts(self) -> list[int]:
        return [0, *accumulate(len(d.reader) for d in self.datasets)][:-1]

    def missing(self, segment: Segment) -> Source | None:
        """A dataset of the segment that is not among these."""
        return next((source for source in segment.parts if self._find(source) is None), None)

    def order(self, segments: Sequence[Segment]) -> Stretches:
        """What stands at every position of a run; each segment's data must be among these."""
        return Stretches([(segment.first_n, self._mix(segment)) for segment in segments])

    def _mix(self, segment: Segment) -> Mix:
        parts = []
        for source in segment.parts:
            found = self._find(source)
            assert found is not None, "segments are compared with the data before"
            number, sizes = found
            parts.append(Part(sizes, source.repeat, source.left_out, self._firsts[number]))
        return Mix(parts, segment.order_settings, base_n=segment.base_n, base_epoch=segment.base_epoch)

    def _find(self, source: Source) -> tuple[int, tuple[int, ...]] | None:
        """The dataset that holds a segment's, and how many samples of each shard are that one's; by name, then by content."""
        numbers = sorted(range(len(self.datasets)), key=lambda i: self.datasets[i].source.name != source.name)
        for number in numbers:
            if (sizes := self.datasets[number].sizes_of(source)) is not None:
                return number, sizes
        return None


def manifest_id(sources: Sequence[Source]) -> str:
    """Names what datasets hold together; of one, it is its own."""
    if len(sources) == 1:
        return sources[0].manifest_id
    return hashlib.sha256(canonical_json([[s.manifest_id, s.repeat] for s in sources])).hexdigest()


def joint_quarantine_id(sources: Sequence[Source]) -> str | None:
    """Names what is left out of datasets together; None for nothing."""
    ids = [s.quarantine_id for s in sources]
    if len(ids) == 1 or not any(ids):
        return ids[0]
    return hashlib.sha256(canonical_json(ids)).hexdigest()


def open_data(config: DataConfig, split: str | None = None) -> Data:
    """The datasets that the config names, at ``data.split`` unless another is given; reads no shard.

    Raises:
        ConfigError: no dataset, no such split, or a quarantine list of another dataset.
    """
    found = [_open(config, name, source, split or config.split) for name, source in config.sources.items()]
    places: dict[Path, str] = {}  # of shards at an address, where their lists are
    for dataset in found:
        folder = dataset.reader.folder.resolve()
        if folder in places:
            raise ConfigError(
                f"data.shards: {places[folder]} and {dataset.source.name} are the same folder, {dataset.reader.folder}; name "
                "it once and set its repeat",
                path=folder,
            )
        places[folder] = dataset.source.name
    return Data(tuple(found))


def open_split(config: DataConfig, location: Path | str, split: str) -> SplitReader:
    """A split of a folder here, or of an address, of which the node then has the lists.

    Raises:
        ConfigError: no dataset, or no such split. RemoteError: the store refuses, or does not answer.
    """
    if isinstance(location, Path):
        return SplitReader(location, split)
    from shards.cache import NodeCache

    cache = NodeCache(location, config.cache_dir, timeout_s=config.read_timeout_s)
    reader = SplitReader(cache, split)
    cache.fetch_lists(split)
    return reader


def _open(data: DataConfig, name: str, config: SourceConfig, split: str) -> Dataset:
    try:
        reader = open_split(data, config.path, split)
        if config.quarantine is None:
            return Dataset(
                Source(name, reader.manifest.manifest_id, len(reader), config.repeat), reader, Quarantine(())
            )
        quarantine = Quarantine.load(config.quarantine)
        left_out = quarantine.indices(reader, config.quarantine)
    except ConfigError as error:
        if not name:
            raise
        raise ConfigError(f"data.shards.{name}: {error}", path=error.path) from None
    source = Source(
        name,
        reader.manifest.manifest_id,
        len(reader) - len(left_out),
        config.repeat,
        quarantine_id(reader, left_out),
        left_out,
    )
    if not source.num_samples:
        raise ConfigError(f"{config.quarantine}: leaves out every sample of split {split} in {config.path}")
    return Dataset(source, reader, quarantine)


def held_out(config: DataConfig, split: str, only: str | None) -> list[Dataset]:
    """The datasets that are scored at ``split``: those that have it, or the one that is asked for.

    Raises:
        ConfigError: none has it, or there is no dataset of that name.
    """
    sources = config.sources
    if only is not None and only not in sources:
        known = ", ".join(filter(None, sources)) or "a single dataset without a name"
        raise ConfigError(f"eval.source is {only}, data.shards has {known}; choose one of those, or leave it out")
    found: list[Dataset] = []
    failure: UserError | None = None
    for name, source in sources.items():
        if only is None or name == only:
            try:
                found.append(_open(config, name, source, split))
            except ConfigError as error:
                failure = failure or error
    if not found:
        assert failure is not None
        raise failure
    return found
