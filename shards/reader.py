"""Random access to the samples of one split; every byte that leaves it has been checked."""

import json
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shards import foreign, ustar
from shards.checksum import crc32
from shards.errors import DamagedSampleError, FormatError, describe
from shards.index import REBUILD, read_index
from shards.manifest import Manifest, ShardEntry
from shards.sample import Sample

if TYPE_CHECKING:
    from shards.cache import NodeCache

MAX_OPEN = 128  # shards; two file descriptors each, and many systems allow 1,024 per process


class Part(NamedTuple):
    """One member of a sample: extension, payload offset in the tar, payload size, crc32 of the payload."""

    name: str
    offset: int
    num_bytes: int
    crc32: int


class SampleMeta(NamedTuple):
    """One line of meta.jsonl; width and height in pixels. ``member``: in a foreign tar, the picture's name there."""

    key: str
    parts: tuple[Part, ...]
    width: int
    height: int
    flags: tuple[str, ...]
    member: str = ""

    @property
    def span(self) -> tuple[int, int]:
        """From the first to the last payload byte that is read, as places in the tar."""
        return min(p.offset for p in self.parts), max(p.offset + p.num_bytes for p in self.parts)


class SplitReader:
    """The samples of a split by index: length and random access, no position. Cheap to pickle and to make.

    Shards are opened on first use, once per process, and the least recently used are closed again.
    """

    def __init__(self, folder: "Path | str | NodeCache", split: str, manifest: Manifest | None = None) -> None:
        """Reads the manifest unless it is given; touches no shard. ``folder``: here, or as a node has it of an address.

        Raises:
            ConfigError: not a shard folder, or it has no such split.
        """
        self.cache: NodeCache | None = None
        if isinstance(folder, Path | str):
            self.folder = Path(folder)
            self.manifest = Manifest.load(self.folder) if manifest is None else manifest
        else:
            self.cache, self.folder, self.manifest = folder, folder.folder, folder.manifest
        self.split = split
        self.shards = self.manifest.of_split(split)
        self._ends = list(accumulate(s.num_samples for s in self.shards))
        self._open: OrderedDict[int, OpenShard] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """Samples per shard, which is all that the order needs to know."""
        return tuple(s.num_samples for s in self.shards)

    def locate(self, index: int) -> tuple[ShardEntry, int]:
        """The shard that holds a sample, and the sample's number in it."""
        number, inside = self._find(index)
        return self.shards[number], inside

    def read(self, index: int, epoch: int | None = None) -> Sample:
        """One sample, its headers and checksums compared with what the index and the sample list say.

        ``epoch``: that of the slot in a run's plan, along which remote shards are fetched; None for a read beside it.

        Raises:
            DamagedSampleError: bytes differ from those written; shard, key, found and expected are named.
            FormatError: the shard as a whole is absent or not what the manifest says.
            RemoteError: it cannot be fetched.
        """
        number, inside = self._find(index)
        return self.shard(number).read(inside, epoch)

    def meta(self, index: int) -> SampleMeta:
        """What meta.jsonl says of one sample."""
        number, inside = self._find(index)
        return self.shard(number).meta(inside)

    def read_json(self, index: int) -> dict[str, Any]:
        """KEY.json of one sample, without touching its picture."""
        number, inside = self._find(index)
        return self.shard(number).read_json(inside)

    def key(self, index: int) -> str:
        """The key of one sample."""
        return self.meta(index).key

    def metas(self) -> Iterator[SampleMeta]:
        """What meta.jsonl says of every sample, in order."""
        for number, shard in enumerate(self.shards):
            opened = self.shard(number)
            for inside in range(shard.num_samples):
                yield opened.meta(inside)

    def require_whole(self) -> None:
        """Open every shard once, which compares sizes, counts and offsets with the manifest; reads no picture.

        Raises:
            FormatError: a shard is not what the manifest says.
        """
        for number in range(len(self.shards)):
            self.shard(number)

    def keys(self) -> list[str]:
        """All keys, in order."""
        return [meta.key for meta in self.metas()]

    def _find(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of split {self.split}, which has {len(self)}")
        number = bisect_right(self._ends, index)
        return number, index - (self._ends[number - 1] if number else 0)

    def shard_of(self, index: int) -> "OpenShard":
        """The open shard that holds a sample."""
        return self.shard(self._find(index)[0])

    def shard(self, number: int) -> "OpenShard":
        """An open shard, by its number in the split."""
        opened = self._open.pop(number, None)
        if opened is None:
            opened = OpenShard(self.folder, self.shards[number], self.cache)
        self._open[number] = opened
        while len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)
        return opened


class OpenShard:
    """One shard's files, checked against its manifest entry on opening. Reads by offset, so forks may share it."""

    def __init__(self, folder: Path, entry: ShardEntry, cache: "NodeCache | None" = None) -> None:
        """``cache``: where the tar's bytes come from if only the lists are in ``folder``.

        Raises FormatError: a file is absent, or a size, a count or an offset is not what the manifest says.
        """
        self.entry = entry
        self.path = folder / entry.name
        self._cache = cache
        self._descriptors: list[int] = []
        if cache is None:
            self._tar, tar_bytes = self._opened(self.path)
            if tar_bytes != entry.num_bytes:
                raise FormatError(
                    f"{entry.name}: has {tar_bytes} bytes, the manifest says {entry.num_bytes}; {REBUILD}",
                    path=self.path,
                )
        self.offsets = read_index(folder / entry.idx_name, entry.num_samples, entry.num_bytes, entry.foreign)
        self._meta, meta_bytes = self._opened(folder / entry.meta_name)
        self._width, rest = divmod(meta_bytes, max(1, entry.num_samples))
        if rest or (self._width == 0) != (entry.num_samples == 0):
            raise FormatError(
                f"{entry.meta_name}: has {meta_bytes} bytes, expected {entry.num_samples} equal lines; {REBUILD}",
                path=folder / entry.meta_name,
            )

    def __del__(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _opened(self, path: Path) -> tuple[int, int]:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise FormatError(f"{path}: is missing, the manifest lists its shard; {REBUILD}", path=path) from None
        except OSError as error:
            raise FormatError(f"{describe(error)}; or {REBUILD}", path=path) from None
        self._descriptors.append(descriptor)
        return descriptor, os.fstat(descriptor).st_size

    def meta(self, inside: int) -> SampleMeta:
        """The parsed line of one sample; lines have one width, so nothing before it is read."""
        line = os.pread(self._meta, self._width, inside * self._width)
        try:
            if line[-1:] != b"\n":
                raise ValueError(f"ends with {line[-1:]!r}, expected a line break")
            return parse_meta(line)
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged(
                inside, None, f"line {inside + 1} of {self.entry.meta_name} is damaged: {error}"
            ) from None

    def span(self, inside: int, meta: SampleMeta) -> tuple[int, int]:
        """From which byte of the tar up to which one sample is read."""
        return meta.span if self.entry.foreign else (int(self.offsets[inside]), int(self.offsets[inside + 1]))

    def read(self, inside: int, epoch: int | None = None) -> Sample:
        """One sample, checked."""
        meta = self.meta(inside)
        start, stop = self.span(inside, meta)
        if self._cache is None:
            data = os.pread(self._tar, stop - start, start)
        else:
            data = self._cache.read(self.entry, self.offsets, inside, (start, stop), meta.key, epoch)
        try:
            return checked_sample(meta, data, start, self.entry.foreign)
        except MismatchError as error:
            raise self._damaged(inside, meta.key, str(error)) from None

    def read_json(self, inside: int) -> dict[str, Any]:
        """KEY.json of one sample, without touching its picture."""
        meta = self.meta(inside)
        part = meta.parts[-1]
        if self._cache is None:
            payload = os.pread(self._tar, part.num_bytes, part.offset)
        else:
            span = (part.offset, part.offset + part.num_bytes)
            payload = self._cache.read(self.entry, self.offsets, inside, span, meta.key, None)
        if crc32(payload) != part.crc32:
            raise self._damaged(inside, meta.key, _crc_differs(f"{meta.key}.{part.name}", payload, part))
        return _foreign_json(meta, payload) if self.entry.foreign else dict(json.loads(payload))

    def _damaged(self, inside: int, key: str | None, what: str) -> DamagedSampleError:
        name = f"sample {inside}" if key is None else f"sample {inside} ({key})"
        return DamagedSampleError(f"{self.entry.name}: {name}: {what}; {REBUILD}", path=self.path, key=key)


class MismatchError(Exception):
    """Bytes of a tar are not what meta.jsonl says; the text holds what was found and expected."""


def checked_sample(meta: SampleMeta, span: bytes, start: int, is_foreign: bool) -> Sample:
    """The sample in ``span``, the tar's bytes from ``start`` on: all of its own, or ``meta.span`` if foreign.

    Raises:
        MismatchError: an offset, a header or a payload is not the one that ``meta`` describes.
    """
    extension = meta.parts[0].name
    if is_foreign:
        image, captions = (_foreign_payload(meta, part, span, start) for part in meta.parts)
        return Sample(meta.key, image, extension, _foreign_json(meta, captions))
    payloads = checked_payloads(meta, span, start)
    return Sample(meta.key, payloads[extension], extension, json.loads(payloads["json"]))


def _foreign_payload(meta: SampleMeta, part: Part, span: bytes, start: int) -> bytes:
    payload = span[part.offset - start : part.offset - start + part.num_bytes]
    if len(payload) != part.num_bytes or crc32(payload) != part.crc32:
        raise MismatchError(_crc_differs(f"{meta.key}.{part.name}", payload, part))
    return payload


def _foreign_json(meta: SampleMeta, captions: bytes) -> dict[str, Any]:
    return foreign.make_meta(
        meta.parts[-1].name, captions, member=meta.member, width=meta.width, height=meta.height, flags=meta.flags
    )


def checked_payloads(meta: SampleMeta, span: bytes, start: int) -> dict[str, bytes]:
    """The payloads by extension in ``span``, a sample's bytes from its first header to its last padding.

    Raises:
        MismatchError: an offset, a header or a payload is not the one that ``meta`` describes.
    """
    extensions = [part.name for part in meta.parts]
    if len(extensions) != 2 or extensions[1] != "json":
        raise MismatchError(f"its members are {', '.join(extensions)}, expected a picture and json")
    payloads = {}
    at = 0
    for part in meta.parts:
        name = f"{meta.key}.{part.name}"
        expected = ustar.header(name, part.num_bytes)
        found, at = span[at : at + ustar.BLOCK], at + ustar.BLOCK
        if found != expected:
            raise MismatchError(ustar.difference(found, expected))
        if part.offset != start + at:
            raise MismatchError(f"{name} begins at byte {start + at}, meta.jsonl says {part.offset}")
        payload = span[at : at + part.num_bytes]
        if len(payload) != part.num_bytes:
            raise MismatchError(
                f"{name} has {len(payload)} bytes before the end of the file, expected {part.num_bytes}"
            )
        if crc32(payload) != part.crc32:
            raise MismatchError(_crc_differs(name, payload, part))
        payloads[part.name] = payload
        stop = at + ustar.padded(part.num_bytes)
        if span[at + part.num_bytes : stop] != ustar.padding(part.num_bytes):
            raise MismatchError(f"the padding behind {name} has bytes that are not zero, expected zeros")
        at = stop
    if at != len(span):
        raise MismatchError(f"its members end at byte {start + at}, expected {start + len(span)}")
    return payloads


def _crc_differs(name: str, payload: bytes, part: Part) -> str:
    return f"crc32 of {name} is {crc32(payload):08x}, meta.jsonl says {part.crc32:08x}"


def parse_meta(line: bytes) -> SampleMeta:
    """One line of meta.jsonl.

    Raises:
        ValueError, KeyError, TypeError: it is not one.
    """
    values = json.loads(line.decode())
    parts = []
    numbers = [values["width"], values["height"]]
    for part in values["parts"]:
        parts.append(Part(part["name"], part["offset"], part["bytes"], part["crc32"]))
        numbers += parts[-1][1:]
    if not parts or set(map(type, numbers)) != {int} or min(numbers) < 0:
        raise ValueError("expected parts, and whole numbers for places and sizes")
    member = values.get("member", "")
    return SampleMeta(values["key"], tuple(parts), values["width"], values["height"], tuple(values["flags"]), member)
