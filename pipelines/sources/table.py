"""JSONL and CSV: a row an image, or a row a caption. Columns say where the image is and what is to be said of it."""

import csv
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelines.config import SourceConfig
from pipelines.images import ImagesSpec
from pipelines.records import Record
from pipelines.sources import files
from pipelines.sources.paths import Paths, leads_out
from shards.errors import ConfigError

SUFFIXES = {
    kind: (*plain, *(f"{suffix}.gz" for suffix in plain))
    for kind, plain in {"jsonl": (".jsonl", ".ndjson"), "csv": (".csv", ".tsv")}.items()
}
DELIMITERS = {",": ",", ";": "';'", "\t": "tab", "|": "'|'"}  # as they are given on a command line
_EXPECTED = {
    "jsonl": 'JSONL, one object a line, such as {"image": "a.jpg", "caption": "a dog"}',
    "csv": "CSV in UTF-8 with a line of column names, such as image,caption",
}
csv.field_size_limit(1 << 27)


class TableSource:
    """Rows are read one by one, never all at once."""

    def __init__(self, config: SourceConfig) -> None:
        self.kind: str = config.kind
        self.counts: Counter[str] = Counter()
        self._config = config
        self._files = files.find_files(config, SUFFIXES[config.kind])
        self.location = files.several([os.path.abspath(f) for f in self._files])  # noqa: PTH100
        folders = [os.path.dirname(os.path.abspath(f)) for f in self._files]  # noqa: PTH100, PTH120
        top = os.path.commonpath(folders)
        self._names = [os.path.relpath(os.path.abspath(f), top) for f in self._files]  # noqa: PTH100
        self._below = [os.path.relpath(f, top) if config.images is None and f != top else "" for f in folders]
        others: ImagesSpec = images_of(config) or top
        self.images: ImagesSpec = {"kind": "urls", "others": others}  # a row may name an address
        self._paths = Paths.of(others)
        for file in self._files:
            self._columns(file, next(self._rows(file), None))

    def _columns(self, file: str, first: tuple[str, Mapping[str, Any]] | None) -> tuple[str, str]:
        """Names of the columns of image and caption."""
        if first is None:
            raise ConfigError(f"{file}: holds no rows; expected {_EXPECTED[self.kind]}", path=file)
        config, where = self._config, files.section(self._config)
        for field in ("id_field", "split_field"):
            if wanted := getattr(config, field):
                files.require_column(file, first[1], wanted, (), f"{where}.{field}")
        return (
            files.require_column(file, first[1], config.image_field, files.IMAGE_FIELDS, f"{where}.image_field"),
            files.require_column(file, first[1], config.caption_field, files.CAPTION_FIELDS, f"{where}.caption_field"),
        )

    def records(self) -> Iterator[Record]:
        """In the order of files and rows; neighbouring rows of one image are one record."""
        for file, name, below in zip(self._files, self._names, self._below, strict=True):
            yield from files.joined(self._records(file, files.split_of_file(name), below))

    def _records(self, file: str, split_of_file: str | None, below: str) -> Iterator[Record]:
        config = self._config
        columns: tuple[str, str] | None = None
        folder = os.path.dirname(os.path.abspath(file))  # noqa: PTH100, PTH120
        starts = [folder] if config.images is None else [*self._paths.tops, folder]
        for where, row in self._rows(file):
            image_field, caption_field = columns = columns or self._columns(file, (where, row))
            name = row.get(image_field)
            if isinstance(name, str):
                if below and "://" not in name and not leads_out(name):
                    name = f"{below}/{name}"
                name = self._paths.place(name, starts)
            image_id = (
                files.given_id(where, row.get(config.id_field), config.id_field)
                if config.id_field
                else files.derived_id(config, name)
            )
            split = row.get(config.split_field) if config.split_field else split_of_file
            about = {"kind": self.kind, **files.plain(row)}
            yield Record(image_id, name, self._captions(row.get(caption_field)), about, None, split)

    def _captions(self, value: Any) -> tuple[Any, ...]:
        if self.kind == "csv" and isinstance(value, str) and value.startswith("["):
            try:
                value = json.loads(value)
            except ValueError:
                return (value,)
        return files.as_captions(value)

    def _rows(self, file: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Where a row stands, and what is in it."""
        try:
            yield from _json_rows(file) if self.kind == "jsonl" else self._csv_rows(file)
        except (*files.UNREADABLE, csv.Error) as error:
            raise files.unreadable(file, error, _EXPECTED[self.kind]) from None

    def _csv_rows(self, file: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        with files.open_text(file) as lines:
            delimiter = self._config.delimiter or ("\t" if file.removesuffix(".gz").endswith(".tsv") else ",")
            rows = csv.reader(lines, delimiter=delimiter, strict=True)
            names = next(rows, [])
            if len(names) == 1 and (others := [other for other in DELIMITERS if other in names[0]]):
                raise ConfigError(
                    f"{file}: with {delimiter!r} between columns its only one is {names[0]!r}; set "
                    f"{files.section(self._config)}.delimiter={DELIMITERS[others[0]]}",
                    path=file,
                )
            if len(set(names)) != len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise ConfigError(f"{file}: has two columns {twice!r}; rename one of them", path=file)
            for row in rows:
                if not row:
                    continue
                where = f"{file}, line {rows.line_num}"
                if len(row) != len(names):
                    raise ConfigError(
                        f"{where}: has {len(row)} values, its header names {len(names)} columns; a caption with a comma or "
                        "a line break stands in double quotes",
                        path=file,
                    )
                yield where, dict(zip(names, row, strict=True))


def images_of(config: SourceConfig) -> ImagesSpec | None:
    """Where the config says that the images are: one place, several, or None where it does not."""
    places = [os.path.abspath(i) if "://" not in i else i for i in files.listed(config.images)]  # noqa: PTH100
    for place in places:
        if "://" not in place and not Path(place).exists():
            raise ConfigError(
                f"{place}: there is no such folder or zip of images; check {files.section(config)}.images", path=place
            )
    return None if not places else places[0] if len(places) == 1 else {"kind": "several", "places": places}


def _json_rows(file: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with files.open_binary(file) as lines:
        for number, line in enumerate(lines, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.isspace():
                continue
            where = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                hint = "; it looks like one JSON list: write one object a line" if line.strip() == b"[" else ""
                raise ConfigError(
                    f"{where}: is not JSON ({error}){hint}; expected {_EXPECTED['jsonl']}", path=file
                ) from None
            if not isinstance(row, dict):
                raise ConfigError(f"{where}: holds a {type(row).__name__}; expected {_EXPECTED['jsonl']}", path=file)
            yield where, row
