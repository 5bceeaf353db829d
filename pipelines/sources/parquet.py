"""Parquet files, and Hugging Face datasets as they lie on a disk: Parquet or the Arrow files of ``save_to_disk``.

Images are bytes, a struct of bytes and path, or paths. Bytes can be had by whole row groups only, but shards need them one
by one in another order, so each row group's images are written once, as they stand, below the build's own folder (as
much disk as the images take, until the build is published).
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.config import SourceConfig
from pipelines.filters import Reason, Rejection
from pipelines.images import ImagesSpec, Stamp
from pipelines.records import ImageId, Record
from pipelines.sources import files
from pipelines.sources.table import images_of
from shards.errors import ConfigError

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
        self._as_paths = pa.types.is_string(self._type) or pa.types.is_large_string(self._type)
        places = images_of(config)
        if places is not None and not self._as_paths:
            raise ConfigError(
                f"{self.location}: column {self._image!r} holds the images themselves; remove "
                f"{files.section(config)}.images"
            )
        stored = {"kind": "parquet", "folder": self._folder, "column": self._image, "cache": str(cache.absolute())}
        self._uncached = ParquetImages(Path(self._folder), self._image, None)
        paths = {"kind": "urls", "others": places or self._folder}  # a row may name an address
        self.images: ImagesSpec = paths if self._as_paths else stored

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
        chunks, split_of_file = _open(file), files.split_of_file(name)
        has_path = self._as_paths or (pa.types.is_struct(self._type) and "path" in [f.name for f in self._type])
        image = self._image if self._as_paths else f"{self._image}.path"
        wanted = [self._caption, config.id_field, config.split_field, *files.KEPT_FIELDS, image if has_path else None]
        columns = list(dict.fromkeys(c for c in wanted if c and c.partition(".")[0] in chunks.schema.names))
        for chunk in range(chunks.num_chunks):
            for number, row in enumerate(chunks.read(chunk, columns).to_pylist()):
                path = row.get(self._image) if has_path else None
                path = path.get("path") if isinstance(path, dict) else path
                place = None if self._as_paths else f"{name}:{chunk}:{number}"
                image_id = self._image_id(file, place, path, row)
                split = row.get(config.split_field) if config.split_field else split_of_file
                captions = files.as_captions(row.get(self._caption))
                about = {"kind": self.kind, **files.plain(row)}
                file_name = path if self._as_paths or path else f"{name}/{image_id}"
                yield Record(image_id, file_name, captions, about, place, split)

    def _image_id(self, file: str, place: str | None, path: Any, row: Mapping[str, Any]) -> ImageId:
        """The one given, the path, or where there is neither the hash of the bytes: never the number of the row."""
        if self._config.id_field:
            return files.given_id(
                f"{file}, row {place or path!a}", row.get(self._config.id_field), self._config.id_field
            )
        if place is None or path:
            return files.derived_id(self._config, path)
        data = self._uncached.read(place)
        digest = hashlib.sha256(data).hexdigest()[:32] if isinstance(data, bytes) else f"no-image-{place}"
        return files.derived_id(self._config, digest)


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
            self._parquet = pq.ParquetFile(file)
            self.schema = self._parquet.schema_arrow
            self.num_chunks = self._parquet.num_row_groups
            self.num_rows = self._parquet.metadata.num_rows

    def read(self, chunk: int, columns: list[str]) -> pa.Table:
        """Some columns of a chunk; ``image.path`` is one field of a struct."""
        if self._arrow is None:
            return self._parquet.read_row_group(chunk, columns=columns)
        whole = pa.Table.from_batches([self._arrow[chunk]])
        return whole.select(list(dict.fromkeys(c.partition(".")[0] for c in columns)))


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

    def __init__(self, folder: Path, column: str, cache: Path | None) -> None:
        self._folder, self._column, self._cache = folder, column, cache
        self._chunk: tuple[str, list[bytes | None]] = ("", [])

    def stamp(self, file_name: str) -> Stamp | Rejection:
        try:
            status = (self._folder / file_name.rsplit(":", 2)[0]).stat()
        except OSError as error:
            return Rejection(Reason.UNREADABLE_FILE, os.strerror(error.errno or 0))
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def read(self, file_name: str) -> bytes | Rejection:
        chunk, _, row = file_name.rpartition(":")
        try:
            data = self._images(chunk)[int(row)] if self._cache is None else self._cached(self._cache, chunk, int(row))
        except (OSError, pa.ArrowException, ConfigError) as error:
            return Rejection(Reason.UNREADABLE_FILE, " ".join(str(error).split())[:200])
        return Rejection(Reason.MISSING_FILE, "the row has no image") if data is None else data

    def _cached(self, cache: Path, chunk: str, row: int) -> bytes | None:
        stamp = self.stamp(f"{chunk}:0")
        path = cache / hashlib.sha256(f"{self._folder}/{chunk}:{stamp}".encode()).hexdigest()[:32]
        if not path.exists():
            self._extract(chunk, path)
        with path.open("rb", buffering=0) as file:
            file.seek(16 * row)
            offset, length = np.frombuffer(file.read(16), "<i8").tolist()
            file.seek(offset)
            return None if length < 0 else file.read(length)

    def _extract(self, chunk: str, path: Path) -> None:
        """Offset and length (-1: no image) of each row, then the images; several processes may do it at once."""
        images = self._images(chunk)
        lengths = np.array([-1 if data is None else len(data) for data in images], "<i8")
        ends = 16 * len(images) + np.cumsum(np.maximum(lengths, 0))
        index = np.stack([ends - np.maximum(lengths, 0), lengths], 1).astype("<i8")
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with aside.open("wb") as file:
            file.write(index.tobytes())
            file.writelines(data for data in images if data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)

    def _images(self, chunk: str) -> list[bytes | None]:
        """Those of the chunk that was asked for last are kept."""
        if self._chunk[0] != chunk:
            file, _, number = chunk.rpartition(":")
            column = _open(str(self._folder / file)).read(int(number), [self._column])[self._column]
            if pa.types.is_struct(column.type):
                column = pa.chunked_array(
                    [part.field("bytes") for part in column.chunks], column.type.field("bytes").type
                )
            self._chunk = chunk, column.to_pylist()
        return self._chunk[1]
