"""Writes one shard: a byte-deterministic tar, its index and its sample list, whole or not at all."""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from shards import ustar
from shards.atomic import aside, begin_writing, publish
from shards.checksum import crc32
from shards.errors import DuplicateKeyError, ShardsError
from shards.index import pack_index
from shards.manifest import ShardEntry
from shards.sample import Sample

_BEGIN_BYTES = 8_000_000  # that go to disk together while the next ones are made


class ShardWriter:
    """Context manager; samples written inside it appear under final names only when the block ends without an error.

    An error inside the block removes what was written aside; a kill leaves it there, and the next run overwrites it.
    """

    def __init__(self, folder: Path, name: str, split: str) -> None:
        """``name`` is that of the files without suffix, for example ``train-000000``."""
        entry = ShardEntry(f"{name}.tar", split, 0, 0, "", "", "")  # checks both names before anything is opened
        self._split = split
        self._tar_path, self._idx_path, self._meta_path = (
            folder / n for n in (entry.name, entry.idx_name, entry.meta_name)
        )
        self._offsets = [0]
        self._begun = 0  # bytes that are on their way to disk
        self._lines: list[bytes] = []
        self._keys: set[str] = set()
        self._sha256 = hashlib.sha256()
        self._entry: ShardEntry | None = None
        self._tar: BinaryIO

    @property
    def entry(self) -> ShardEntry:
        """What the manifest has to say of the shard; there after a clean exit."""
        if self._entry is None:
            raise RuntimeError(f"{self._tar_path.name} is not finished")
        return self._entry

    def __enter__(self) -> Self:
        self._tar_path.parent.mkdir(parents=True, exist_ok=True)
        self._tar = aside(self._tar_path).open("wb")
        return self

    def write(self, sample: Sample, flags: Sequence[str] = ()) -> None:
        """Append one sample. ``flags`` are remarks for people and for later selection; they do not enter the tar.

        Raises:
            DuplicateKeyError: the shard has this key already.
            ShardsError: width or height is missing from the sample's meta.
        """
        if sample.key in self._keys:
            raise DuplicateKeyError(
                f"{self._tar_path.name}: key {sample.key} is in it already; keys are unique over the dataset",
                path=self._tar_path,
                key=sample.key,
            )
        start = self._offsets[-1]
        chunks: list[bytes] = []
        parts: list[dict[str, object]] = []
        for name, payload in sample.members():
            offset = start + sum(map(len, chunks)) + ustar.BLOCK
            chunks += ustar.header(name, len(payload)), payload, ustar.padding(len(payload))
            extension = name.removeprefix(f"{sample.key}.")
            parts.append({"name": extension, "offset": offset, "bytes": len(payload), "crc32": crc32(payload)})
        line = _meta_line(sample, parts, flags)
        block = b"".join(chunks)
        self._append(block)
        self._offsets.append(start + len(block))
        self._lines.append(line)
        self._keys.add(sample.key)

    def _append(self, data: bytes) -> None:
        self._tar.write(data)
        self._sha256.update(data)
        at = self._tar.tell()
        if at - self._begun >= _BEGIN_BYTES:
            begin_writing(self._tar, self._begun, at - self._begun)
            self._begun = at

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        paths = (self._meta_path, self._idx_path, self._tar_path)  # the tar last: once it is there, its companions are
        with ExitStack() as cleanup:
            cleanup.callback(_remove, [aside(p) for p in paths])
            with self._tar:
                if error is not None:
                    return
                self._append(ustar.END)
                _sync(self._tar)
                num_bytes = self._tar.tell()
            if num_bytes != self._offsets[-1] + len(ustar.END):  # a failed write was swallowed by the caller
                raise ShardsError(
                    f"{self._tar_path}: {num_bytes} bytes were written, expected {self._offsets[-1] + len(ustar.END)}; "
                    "an earlier write failed, run the build again",
                    path=self._tar_path,
                )
            idx, meta = pack_index(self._offsets), same_width(self._lines)
            _write_synced(aside(self._idx_path), idx)
            _write_synced(aside(self._meta_path), meta)
            for path in paths:
                publish(aside(path), path)
        self._entry = ShardEntry(
            name=self._tar_path.name,
            split=self._split,
            num_samples=len(self._lines),
            num_bytes=num_bytes,
            sha256=self._sha256.hexdigest(),
            idx_sha256=hashlib.sha256(idx).hexdigest(),
            meta_sha256=hashlib.sha256(meta).hexdigest(),
        )


def _meta_line(sample: Sample, parts: Sequence[object], flags: Sequence[str]) -> bytes:
    try:
        width, height = sample.meta["width"], sample.meta["height"]
    except KeyError as error:
        raise ShardsError(f"{sample.key}: meta has no {error}; set it, in pixels", key=sample.key) from None
    line = {"key": sample.key, "parts": parts, "width": width, "height": height, "flags": list(flags)}
    return json.dumps(line, separators=(",", ":")).encode("ascii")


def same_width(lines: Sequence[bytes]) -> bytes:
    """The lines padded with spaces to one width, so that line i is at i * width and no reader has to scan for it."""
    width = max(map(len, lines), default=0)
    return b"".join(line.ljust(width) + b"\n" for line in lines)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)
