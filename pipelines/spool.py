"""All records of a build: their text in a file, a row of fixed width each in memory (some 130 bytes).

A record's text is its line in a shard's order but for what is decided later; JSON with sorted keys, so that what comes
later is appended (see ``Spool.row``).
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.captions import CleanCaptions, clean_captions
from pipelines.config import FilterConfig
from pipelines.facts import FACTS
from pipelines.filters import Reason, Rejection
from pipelines.images import Stamp
from pipelines.records import ImageId, Record, id_bytes
from shards.sample import canonical_json

ROW = np.dtype(
    [
        ("offset", "<u8"),  # of the text
        ("place_bytes", "<u4"),
        ("text_bytes", "<u4"),
        ("placed", "?"),  # whether the place is another than the file name
        ("id", "S16"),  # id_bytes
        ("order", "S16"),  # hash by which records are put in order before they are cut into shards
        ("stamp", "S16"),  # hash of place and stamp
        ("source", "<u2"),  # number of the source in the build
        ("split", "<u2"),  # number of the split in the build
        ("hashed", "?"),  # whether ``facts`` are known
        ("facts", FACTS),
        ("verdict", "<u4"),  # number of the rejection, 0 for none
        ("owner", "<i8"),  # row that the rejection speaks of, -1 for none
    ]
)
Rows = NDArray[Any]  # of dtype ROW
Numbers = NDArray[np.int64]


class Spool:
    """Rows in the order in which they were added. ``table`` may be changed; the texts may not."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=1 << 20)  # noqa: SIM115 - closed by close()
        self._seed = seed
        self._size = 0
        self._table: Rows = np.zeros(1024, ROW)
        self._count = 0
        self.rejections: list[Rejection | None] = [None]
        self._numbers: dict[Rejection, int] = {}

    @property
    def table(self) -> Rows:
        """One row a record, of dtype ``ROW``."""
        return self._table[: self._count]

    def __len__(self) -> int:
        return self._count

    def close(self) -> None:
        """Give the file's space back."""
        self._file.close()

    def add(
        self, record: Record, cleaned: CleanCaptions, found: Stamp | Rejection, *, source: int = 0, split: int = 0
    ) -> None:
        """Append a record whose file was found, or why it was not."""
        place = _place(record)
        stamp = (
            b""
            if isinstance(found, Rejection)
            else hashlib.blake2b(b"%b\0%a" % (place, found), digest_size=16).digest()
        )
        if self._count == len(self._table):
            self._table = np.concatenate([self._table, np.zeros(len(self._table) // 2, ROW)])
        self._table[self._count] = (
            *self._write(place, _text(record, cleaned)),
            record.place is not None and record.place != record.file_name,
            id_bytes(record.image_id),
            hashlib.sha256(f"{self._seed}:{record.image_id}".encode("utf-8", "surrogatepass")).digest()[:16],
            stamp,
            source,
            split,
            False,
            (b"", 0, 0, False, 0),
            self.number(found if isinstance(found, Rejection) else _no_caption(record, cleaned)),
            -1,
        )
        self._count += 1

    def _write(self, place: bytes, text: bytes) -> tuple[int, int, int]:
        """Where in the file they begin, and their lengths."""
        self._file.write(place)
        self._file.write(text)
        self._size += len(place) + len(text)
        return self._size - len(place) - len(text), len(place), len(text)

    def join(self, numbers: Numbers, limits: FilterConfig) -> None:
        """Give the first of some records the captions of all of them."""
        rows = [self.record(int(n)) for n in numbers]
        raw = [c for row in rows for c in (row["captions"] if row["captions_raw"] is None else row["captions_raw"])]
        first, number = rows[0], int(numbers[0])
        place = self.place(number) if self._table["placed"][number] else None
        record = Record(first["image_id"], first["file_name"], tuple(raw), first["about"], place)
        cleaned = clean_captions(raw, limits)
        self._file.seek(self._size)
        where = self._write(_place(record), _text(record, cleaned))
        self._file.flush()
        for name, value in zip(("offset", "place_bytes", "text_bytes"), where, strict=True):
            self._table[name][number] = value
        if self._table["stamp"][number]:
            self._table["verdict"][number] = self.number(_no_caption(record, cleaned))

    def number(self, rejection: Rejection | None) -> int:
        """The number by which ``verdict`` names a rejection."""
        if rejection is None:
            return 0
        number = self._numbers.setdefault(rejection, len(self.rejections))
        if number == len(self.rejections):
            self.rejections.append(rejection)
        return number

    def reject(self, rows: Numbers | int, reason: Reason, detail: str, owners: Numbers | int = -1) -> None:
        """Reject rows; ``{owner}`` in the detail becomes the id of the row that ``owners`` names."""
        self.table["verdict"][rows] = self.number(Rejection(reason, detail))
        self.table["owner"][rows] = owners

    def keep(self, mask: NDArray[np.bool_]) -> None:
        """Drop the rows that the mask does not have."""
        assert not (self.table["owner"] >= 0).any(), "owners are numbers of rows"
        self._table = self.table[mask]
        self._count = len(self._table)

    def place(self, number: int) -> str:
        """Where ``Images`` finds the record's bytes."""
        row = self._table[number]
        return self._read(row["offset"], row["place_bytes"]).decode("utf-8", "surrogatepass")

    def rows(self, numbers: Numbers, sources: Sequence[int], placed: bool) -> Iterator[bytes]:
        """The records as they stand in a shard's order, canonical JSON.

        ``sources`` are those of the split, in order. ``placed``: also where the pictures are, which no shard says, and the
        crc32 of their files.
        """
        table = self._table[numbers]
        sha256 = table["facts"]["sha256"].tobytes().hex()
        for i, (number, row) in enumerate(zip(numbers.tolist(), table, strict=True)):
            text = self._read(row["offset"] + row["place_bytes"], row["text_bytes"])
            digest = f'"{sha256[64 * i : 64 * i + 64]}"' if row["hashed"] else "null"
            later = f',"sha256":{digest}'
            if placed and row["placed"]:
                later = f',"place":{json.dumps(self.place(number))}{later}'
            if placed and row["hashed"]:
                later = f',"crc32":{row["facts"]["crc32"]}{later}'
            if source := sources.index(row["source"]):
                later += f',"source":{source}'
            verdict = canonical_json(asdict(rejection)) if (rejection := self.rejection(number)) else b"null"
            yield b'%b%b,"verdict":%b}' % (text, later.encode(), verdict)

    def rejection(self, number: int) -> Rejection | None:
        """Why a record was rejected, if it was."""
        row = self._table[number]
        rejection: Rejection | None = self.rejections[row["verdict"]]
        if rejection is None or row["owner"] < 0:
            return rejection
        return Rejection(rejection.reason, rejection.detail.format(owner=self.image_id(int(row["owner"]))))

    def verdicts(self, reason: Reason) -> NDArray[np.bool_]:
        """Which rows are rejected for a reason."""
        numbers = [i for i, r in enumerate(self.rejections) if r and r.reason == reason]
        return np.isin(self.table["verdict"], numbers)

    def image_id(self, number: int) -> ImageId:
        """The id of a record."""
        found: ImageId = self.record(number)["image_id"]
        return found

    def record(self, number: int) -> Mapping[str, Any]:
        """A record as it stands in a shard's order, without what is decided later."""
        row = self._table[number]
        text = self._read(row["offset"] + row["place_bytes"], row["text_bytes"])
        record: dict[str, Any] = json.loads(text + b"}")
        return record

    def _read(self, offset: int, length: int) -> bytes:
        return os.pread(self._file.fileno(), int(length), int(offset))

    def flush(self) -> None:
        """Call it after the last ``add``, before anything is read."""
        self._file.flush()


def _text(record: Record, cleaned: CleanCaptions) -> bytes:
    """The record in canonical JSON without its last brace; ``place``, ``sha256``, ``source`` and ``verdict`` sort behind it."""
    raw = [str(c) if isinstance(c, str) else None for c in record.captions]
    row = {
        "image_id": record.image_id,
        "file_name": _plain(record.file_name),
        "captions": cleaned.captions,
        "captions_raw": None if raw == list(cleaned.captions) else raw,
        "caption_counts": cleaned.counts,
        "about": record.about,
    }
    return canonical_json(row)[:-1]


def _place(record: Record) -> bytes:
    place = record.place if record.place is not None else _plain(record.file_name)
    return place.encode("utf-8", "surrogatepass")


def _plain(file_name: Any) -> str:
    return file_name if isinstance(file_name, str) else ascii(file_name)


def _no_caption(record: Record, cleaned: CleanCaptions) -> Rejection | None:
    if cleaned.captions:
        return None
    why = ", ".join(f"{count} {name}" for name, count in sorted(cleaned.counts.items())) or "there are none"
    return Rejection(Reason.NO_CAPTION, f"no caption is left of {len(record.captions)}: {why}")
