"""The samples of several datasets under one numbering."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Protocol

from shards.manifest import ShardEntry
from shards.reader import SampleMeta, SplitReader
from shards.sample import Sample


class SampleReader(Protocol):
    """Random access to samples by number: a ``SplitReader``, or several of them joined. See ``SplitReader``."""

    def __len__(self) -> int: ...

    def locate(self, index: int) -> tuple[ShardEntry, int]:
        """The shard that holds a sample, and the sample's number in it."""

    def read(self, index: int, epoch: int | None = None) -> Sample:
        """One sample, checked; ``epoch`` as for a ``SplitReader``."""

    def meta(self, index: int) -> SampleMeta:
        """What meta.jsonl says of one sample."""

    def read_json(self, index: int) -> dict[str, Any]:
        """KEY.json of one sample, without touching its picture."""

    def key(self, index: int) -> str:
        """The key of one sample."""

    def require_whole(self) -> None:
        """Compare sizes, counts and offsets of every shard with the manifest; reads no picture."""


class JoinedReader:
    """The samples of several splits, one behind the other; each keeps its own files, cache and errors."""

    def __init__(self, readers: Sequence[SplitReader]) -> None:
        self.readers = tuple(readers)
        self._ends = list(accumulate(map(len, readers)))

    def __len__(self) -> int:
        return self._ends[-1]

    def locate(self, index: int) -> tuple[ShardEntry, int]:
        """The shard that holds a sample, and the sample's number in it."""
        reader, inside = self._find(index)
        return reader.locate(inside)

    def read(self, index: int, epoch: int | None = None) -> Sample:
        """One sample, checked; raises what the dataset's own reader raises."""
        reader, inside = self._find(index)
        return reader.read(inside, epoch)

    def meta(self, index: int) -> SampleMeta:
        """What meta.jsonl says of one sample."""
        reader, inside = self._find(index)
        return reader.meta(inside)

    def read_json(self, index: int) -> dict[str, Any]:
        """KEY.json of one sample, without touching its picture."""
        reader, inside = self._find(index)
        return reader.read_json(inside)

    def key(self, index: int) -> str:
        """The key of one sample."""
        return self.meta(index).key

    def metas(self) -> Iterator[SampleMeta]:
        """What meta.jsonl says of every sample, in order."""
        for reader in self.readers:
            yield from reader.metas()

    def require_whole(self) -> None:
        """Open every shard once, which compares sizes, counts and offsets with the manifests."""
        for reader in self.readers:
            reader.require_whole()

    def _find(self, index: int) -> tuple[SplitReader, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = bisect_right(self._ends, index)
        return self.readers[number], index - (self._ends[number - 1] if number else 0)


def join(readers: Sequence[SplitReader]) -> SampleReader:
    """One reader for all: the reader itself if it is the only one."""
    return readers[0] if len(readers) == 1 else JoinedReader(readers)
