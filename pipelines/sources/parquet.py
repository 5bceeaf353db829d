"""Parquet files, and Hugging Face datasets as they lie on a disk: Parquet or the Arrow files of ``save_to_disk``.

Images are bytes, a struct of bytes and path, or paths. Bytes can be had by whole row groups only, but shards need them one
by one in another order, so each row group's images are written once, as they stand, below the build's own folder (as
much disk as the images take, until the build is published).
"""

import fcntl
import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from pipelines.config import SourceConfig
from pipelines.filters import Reason, Rejection
from pipelines.images import ImagesSpec, Stamp
from pipelines.records import Record
from pipelines.sources import files
from pipelines.sources.paths import Paths
from pipelines.sources.table import images_of
from shards.atomic import written_aside
from shards.errors import ConfigError

BATCH = 64  # rows in memory at a time, so that large row groups of large images fit
_EXPECTED = "a Parquet file, or an Arrow file as Hugging Face's save_to_disk writes it"


class ParquetSource:
    """Columns other than images are read row group by row group."""

    kind = "parquet"

    def __init__(self, config: SourceConfig, cache: Path) -> None:
        self.counts: Counter[str] = Counter()
        self._config = config
        self._files = [os.path.abspath(f) for f in files.find_files(config, (".parquet", ".arrow"))]  # noqa: PTH100
        self._folder = os.path.commonpath([os.path.dirname(f) for f in self._files])  # noqa: PTH120
        self.location = self._folder if len(self._files) > 1 else self._files[0]
        schemas = [_open(file).schema for file in self._files]
        if not any(_open(file).num_rows for file in self._files):
            raise ConfigError(f"{self.location}: holds no rows; expected {_EXPECTED} with images", path=self.location)
        self._image, self._caption = self._columns(self._files[0], schemas[0])
        for file, schema in zip(self._files, schemas, strict=True):
            self._columns(file, schema)
            if (found := schema.field(self._image).type) != schemas[0].field(self._image).type:
                raise ConfigError(
                    f"{file}: column {self._image!r} holds {found}, in {self._files[0]} "
                    f"{schemas[0].field(self._image).type}; give them as two sources",
                    path=file,
                )
        self._type = schemas[0].field(self._image).type
        self._has_path = pa.types.is_struct(self._type) and "path" in [f.name for f in self._type]
        self._as_paths = pa.types.is_string(self._type) or pa.types.is_large_string(self._type) or self._only_paths()
        places = images_of(config)
        if places is not None and not self._as_paths:
            raise ConfigError(
                f"{self.location}: column {self._image!r} holds the images themselves; remove "
                f"{files.section(config)}.images"
            )
        stored = {"kind": "parquet", "folder": self._folder, "column": self._image, "cache": str(cache.absolute())}
        paths = {"kind": "urls", "others": places or self._folder}  # a row may name an address
        self.images: ImagesSpec = paths if self._as_paths else stored
        self._paths = Paths.of(paths["others"])

    def _only_paths(self) -> bool:
        """Whether a struct of bytes and path has no bytes: Hugging Face datasets whose images were not embedded."""
        if not self._has_path:
            return False
        opened = [_open(file) for file in self._files]
        batches = (b for o in opened for chunk in range(o.num_chunks) for b in o.batches(chunk, [self._image]))
        first = next(batch for batch in batches if batch.num_rows).column(self._image).to_pylist()
        return all(image and image["bytes"] is None and image["path"] for image in first)

    def _columns(self, file: str, schema: pa.Schema) -> tuple[str, str]:
        """Names of the columns of image and caption."""
        config, where = self._config, files.section(self._config)
        for field in ("id_field", "split_field"):
            if wanted := getattr(config, field):
                files.require_column(file, schema.names, wanted, (), f"{where}.{field}")
        image = files.require_column(file, schema.names, config.image_field, files.IMAGE_FIELDS, f"{where}.image_field")
        _require_images(file, image, schema.field(image).type, where)
        usual = files.CAPTION_FIELDS
        return image, files.require_column(file, schema.names, config.caption_field, usual, f"{where}.caption_field")

    def records(self) -> Iterator[Record]:
        """In the order of files and rows; neighbouring rows of one image are one record."""
        for file in self._files:
            yield from files.joined(self._records(file))

    def _records(self, file: str) -> Iterator[Record]:
        config, name = self._config, os.path.relpath(file, self._folder)
        chunks, split_of_file, folder = _open(file), files.split_of_file(name), os.path.dirname(file)  # noqa: PTH120
        has_path = self._as_paths or self._has_path
        image = f"{self._image}.path" if self._has_path else self._image
        wanted = [self._caption, config.id_field, config.split_field, *files.KEPT_FIELDS, image if has_path else None]
        columns = list(dict.fromkeys(c for c in wanted if c and c.partition(".")[0] in chunks.schema.names))
        for chunk in range(chunks.num_chunks):
            rows = (row for batch in chunks.batches(chunk, columns) for row in batch.to_pylist())
            contents = iter(
                () if config.id_field or self._as_paths else _contents(chunks, chunk, self._image, has_path)
            )
            for number, row in enumerate(rows):
                path = row.get(self._image) if has_path else None
                path = path.get("path") if isinstance(path, dict) else path
                path = self._paths.place(path, [*self._paths.tops, folder]) if path and self._as_paths else path
                place = None if self._as_paths else f"{name}:{chunk}:{number}"
                content = next(contents, None)
                if config.id_field:
                    where = f"{file}, row {number} of group {chunk}"
                    image_id = files.given_id(where, row.get(config.id_field), config.id_field)
                else:  # where there is no path, the hash of the bytes: never the number of the row
                    image_id = files.derived_id(
                        config, path if path or self._as_paths else content or f"no-image-{place}"
                    )
                split = row.get(config.split_field) if config.split_field else split_of_file
                captions = files.as_captions(row.get(self._caption))
                about = {"kind": self.kind, **files.plain(row)}
                file_name = path if self._as_paths or path else f"{name}/{image_id}"
                yield Record(image_id, file_name, captions, about, place, split)


def _contents(chunks: "_Chunks", chunk: int, column: str, has_path: bool) -> Iterator[str | None]:
    """Hashes of the images that have no path."""
    if has_path:
        paths = (row[column] for batch in chunks.batches(chunk, [f"{column}.path"]) for row in batch.to_pylist())
        if all(path and path.get("path") for path in paths):
            return
    for data in _images(chunks, chunk, column):
        yield hashlib.sha256(data).hexdigest()[:32] if data else None


def _require_images(file: str, column: str, kind: pa.DataType, where: str) -> None:
    if pa.types.is_struct(kind) and "bytes" in [f.name for f in kind]:
        return
    tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_string, pa.types.is_large_string)
    if not any(test(kind) for test in tests):
        raise ConfigError(
            f"{file}: column {column!r} holds {kind}, expected bytes, a struct of bytes and path, or paths; set "
            f"{where}.image_field",
            path=file,
        )


class _Chunks:
    """Row groups of a Parquet file, or record batches of an Arrow file."""

    def __init__(self, file: str) -> None:
        self._arrow: list[pa.RecordBatch] | None = None
        if file.endswith(".arrow"):
            with pa.memory_map(file) as data:  # batches keep it open; nothing is copied
                reader = pa.ipc.open_stream(data)
                self.schema: pa.Schema = reader.schema
                self._arrow = list(reader)
            self.num_chunks = len(self._arrow)
            self.num_rows = sum(batch.num_rows for batch in self._arrow)
        else:
            self._parquet = pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)  # page by page
            self.schema = self._parquet.schema_arrow
            self.num_chunks = self._parquet.num_row_groups
            self.num_rows = self._parquet.metadata.num_rows

    def num_rows_of(self, chunk: int) -> int:
        """Number of rows in a chunk."""
        if self._arrow is None:
            return int(self._parquet.metadata.row_group(chunk).num_rows)
        return int(self._arrow[chunk].num_rows)

    def batches(self, chunk: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Some columns of a chunk, never all rows at once; ``image.path`` is one field of a struct."""
        if self._arrow is None:
            yield from self._parquet.iter_batches(BATCH, row_groups=[chunk], columns=columns, use_threads=False)
            return
        whole = self._arrow[chunk].select(list(dict.fromkeys(c.partition(".")[0] for c in columns)))
        yield from (whole.slice(start, BATCH) for start in range(0, whole.num_rows, BATCH))


def _open(file: str) -> _Chunks:
    """Opened once per process, and again when it has changed."""
    try:
        return _opened(file, os.stat(file).st_mtime_ns)  # noqa: PTH116
    except (OSError, pa.ArrowException) as error:
        raise files.unreadable(file, error, _EXPECTED) from None


@lru_cache(maxsize=4)
def _opened(file: str, _changed_ns: int) -> _Chunks:
    return _Chunks(file)


class ParquetImages:
    """Images by ``FILE:CHUNK:ROW``."""

    def __init__(self, folder: Path, column: str, cache: Path) -> None:
        self._folder, self._column, self._cache = folder, column, cache

    def stamp(self, file_name: str) -> Stamp | Rejection:
        try:
            status = (self._folder / file_name.rsplit(":", 2)[0]).stat()
        except OSError as error:
            return Rejection(Reason.UNREADABLE_FILE, os.strerror(error.errno or 0))
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def read(self, file_name: str) -> bytes | Rejection:
        chunk, _, row = file_name.rpartition(":")
        name = hashlib.sha256(f"{self._folder}/{chunk}:{self.stamp(f'{chunk}:0')}".encode()).hexdigest()[:32]
        path = self._cache / name
        try:
            if not path.exists():
                self._extract(chunk, path)
        except (pa.ArrowException, ConfigError) as error:
            return Rejection(
                Reason.UNREADABLE_FILE, " ".join(str(error).split())[:200].replace(str(self._folder), "...")
            )
        with path.open("rb", buffering=0) as file:
            file.seek(16 * int(row))
            offset, length = np.frombuffer(file.read(16), "<i8").tolist()
            file.seek(offset)
            return Rejection(Reason.MISSING_FILE, "the row has no image") if length < 0 else file.read(length)

    def _extract(self, chunk: str, path: Path) -> None:
        """Offset and length (-1: no image) of each row, then the images. One process does it, others wait for it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f".{path.name}.lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                file_name, _, number = chunk.rpartition(":")
                chunks = _open(str(self._folder / file_name))
                with written_aside(path) as file:
                    self._write(file, chunks, int(number))

    def _write(self, file: BinaryIO, chunks: _Chunks, chunk: int) -> None:
        index = np.zeros((chunks.num_rows_of(chunk), 2), "<i8")
        file.seek(index.nbytes)
        for row, data in enumerate(_images(chunks, chunk, self._column)):
            index[row] = file.tell(), -1 if data is None else len(data)
            file.write(data or b"")
        file.seek(0)
        file.write(index.tobytes())


def _images(chunks: _Chunks, chunk: int, name: str) -> Iterator[bytes | None]:
    for batch in chunks.batches(chunk, [name]):
        column = batch.column(name)
        if pa.types.is_struct(column.type):
            column = pa.compute.struct_field(column, "bytes")
        yield from column.to_pylist()
