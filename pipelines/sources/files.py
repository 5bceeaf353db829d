"""The files that a source consists of, and what their names and columns say."""

import bz2
import difflib
import glob
import gzip
import io
import lzma
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TextIO

from pipelines.config import HeldOutConfig, SourceConfig
from pipelines.records import ImageId, Record, as_id
from pipelines.sources import hub
from shards.compressed import SUFFIXES, advice, compression
from shards.errors import ConfigError, counted, describe

# Names of splits that mean the same; restval is the part of COCO's val that Karpathy's split trains on.
SAME_SPLIT = {
    "training": "train",
    "restval": "train",
    "validation": "val",
    "valid": "val",
    "dev": "val",
    "testing": "test",
}
UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError, UnicodeDecodeError)  # a file that is not what it should be
_OPENERS: Mapping[str, Callable[[str], Any]] = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}
_SPLITS = {*SAME_SPLIT, "train", "val", "test"}
KEPT_FIELDS = ("license", "coco_url", "flickr_url", "date_captured", "url")  # what attribution needs
IMAGE_FIELDS = ("image", "file_name", "filename", "image_path", "filepath", "path", "image_url", "url", "jpg", "png")
CAPTION_FIELDS = ("captions", "caption", "text", "texts", "sentences", "txt")


def section(config: SourceConfig) -> str:
    """The section of the config that the source stands in."""
    return "held_out" if isinstance(config, HeldOutConfig) else "source"


def listed(value: str | Sequence[str] | None) -> list[str]:
    """One location or several, as a list."""
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def find_files(config: SourceConfig, suffixes: Sequence[str]) -> list[str]:
    """The files that ``path`` names: each one there is, the files of a folder and of a pattern in order of their names.

    Raises:
        ConfigError: a path leads to nothing, or to no file with one of the suffixes.
    """
    found: list[str] = []
    for location in listed(config.path):
        path = Path(location)
        if location.startswith(hub.PREFIX):
            found += hub.fetch(location, f"{section(config)}.path")
        elif "://" in location or path.is_file():
            found.append(location)
        elif path.is_dir():
            inside = sorted(str(p) for p in path.rglob("*") if p.name.endswith(tuple(suffixes)) and p.is_file())
            packed = [p.name for p in sorted(path.rglob("*")) if p.name.endswith(SUFFIXES)]
            hint = f", and {packed[0]} is compressed: decompress it first" if packed else ""
            found += inside or _nothing(config, location, f"holds no file that ends in {' or '.join(suffixes)}{hint}")
        elif glob.has_magic(location):
            inside = sorted(p for p in glob.glob(location, recursive=True) if Path(p).is_file())  # noqa: PTH207
            found += inside or _nothing(config, location, "no file has a name like this")
        else:
            near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*")], n=1)
            hint = f"; did you mean {path.parent / near[0]}?" if near else ""
            if not near and config.kind == "parquet" and re.fullmatch(r"[\w.-]+/[\w.-]+", location):
                hint = f"; for a dataset of the Hugging Face hub give {hub.PREFIX}{location}"
            _nothing(config, location, f"there is no such file or folder{hint}")
    if len(set(found)) != len(found):
        twice = next(name for name in found if found.count(name) > 1)
        _nothing(config, twice, "stands in it twice")
    return found


def _nothing(config: SourceConfig, location: str, what: str) -> list[str]:
    end = " " if what.endswith("?") else "; "
    raise ConfigError(f"{location}: {what}{end}check {section(config)}.path", path=location)


def require_column(where: str, names: Iterable[str], wanted: str | None, usual: Sequence[str], field: str) -> str:
    """The column to use: the one that is wanted, or the first of the usual ones.

    Raises:
        ConfigError: there is none of that name; the nearest is named.
    """
    there = list(names)
    if wanted in there and wanted is not None:
        return wanted
    if wanted is None and (found := [name for name in usual if name in there]):
        return found[0]
    near = difflib.get_close_matches(wanted, there, n=1) if wanted else []
    what = f"has no column {wanted!r}" if wanted else f"has none of the columns {', '.join(usual)}"
    hint = f"did you mean {near[0]!r}? " if near else ""
    shown = ", ".join(map(repr, there)) or "none"
    raise ConfigError(f"{where}: {what}; {hint}its columns are {shown}; set {field}", path=where)


def given_id(where: str, value: Any, field: str) -> ImageId:
    """The id in a row.

    Raises:
        ConfigError: it is neither a whole number from 0 nor a text.
    """
    if type(value) is int and 0 <= value < 2**63:
        return value
    if isinstance(value, str) and value.strip():
        return as_id(value.strip())
    raise ConfigError(
        f"{where}: {field} is {ascii(value)[:60]}, expected a whole number of at least 0 or a text; correct the row, or "
        "leave id_field out: then the path of the image names it",
        path=where,
    )


def derived_id(config: SourceConfig, locator: Any) -> ImageId:
    """The id of an image that has none: its path, never the number of its row, so that it stays when rows are added."""
    text = locator if isinstance(locator, str) else ascii(locator)
    # Two sources with their own folders may hold the same path; equal pictures are then found by their bytes.
    return f"{config.split}/{text}" if isinstance(config, HeldOutConfig) else text


def split_of_file(name: str) -> str | None:
    """The split that a file's name or its folder's says: ``val.jsonl``, ``train-00001-of-00004.parquet``, ``test/1.tar``.

    Give the name below the folder that all files of the source share: what lies above it says nothing.
    """
    for part in reversed(PurePosixPath(name).parts):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in _SPLITS:
                return SAME_SPLIT.get(word, word)
    return None


def as_captions(value: Any) -> tuple[Any, ...]:
    """A caption or a list of them; what is no text is left to the cleaning, which counts it."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def joined(records: Iterable[Record]) -> Iterator[Record]:
    """Neighbouring rows of the same image as one record: files with one caption a row are common."""
    for _, group in groupby(records, key=lambda r: (r.image_id, r.file_name, r.split)):
        first, *others = group
        yield replace(first, captions=tuple(c for r in (first, *others) for c in r.captions)) if others else first


def unreadable(location: str, error: Exception, expected: str) -> ConfigError:
    """What to raise when a file of a source cannot be read."""
    if kind := compression(location):
        expected = f"{expected}; it {advice(location, kind)}"
    system = isinstance(error, OSError) and error.errno
    what = describe(error) if system else f"{location}: {' '.join(str(error).split())[:200]}"  # type: ignore[arg-type]
    return ConfigError(f"{what}; expected {expected}", path=location)


def several(location: Sequence[str]) -> str:
    """A few locations for a message."""
    return location[0] if len(location) == 1 else f"{location[0]} and {counted(len(location) - 1, 'other file')}"


def plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row says of origin and licence; only plain values, as KEY.json must be valid JSON."""
    found = {name: row[name] for name in KEPT_FIELDS if name in row}
    return {k: v for k, v in found.items() if isinstance(v, str | int) or (isinstance(v, float) and math.isfinite(v))}


def open_binary(location: str) -> BinaryIO:
    """A file to read line by line, decompressed where it is compressed.

    Raises:
        ConfigError: it is compressed in a way that Python cannot undo.
    """
    kind = compression(location)
    if kind is None:
        return Path(location).open("rb")
    if kind not in _OPENERS:
        raise ConfigError(f"{location}: {advice(location, kind)}", path=location)
    opened: BinaryIO = _OPENERS[kind](location)
    return opened


def open_text(location: str) -> TextIO:
    """The same as UTF-8, line ends as they stand."""
    return io.TextIOWrapper(open_binary(location), encoding="utf-8-sig", newline="")
