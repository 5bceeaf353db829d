"""What each rank is doing, readable from outside: a rank that hangs cannot say it any more."""

import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

VARIABLE = "XCTRAIN_PHASES"  # path of the board, which the launcher sets for its ranks
_RECORD = struct.Struct("<dd119s?")  # seconds since 1970, seconds of patience, text in UTF-8, whether it is saving
_TEXT_BYTES, _SAVING = 119, _RECORD.size - 1


@dataclass(frozen=True)
class Phase:
    """What a rank does, since when (seconds since 1970), and how much longer than usual that may take."""

    since: float
    patience_s: float
    text: str
    saving: bool  # a checkpoint is being written, whatever else the rank does meanwhile


class Board:
    """A file with one record for each rank of a node. The launcher makes it, ranks write to it as to memory."""

    def __init__(self, path: Path, ranks: int) -> None:
        self.path = path
        self._ranks = ranks
        path.write_bytes(bytes(_RECORD.size * ranks))

    def read(self) -> list[Phase]:
        """Phase of each rank; one without text for a rank that has not said anything yet."""
        found = _RECORD.iter_unpack(self.path.read_bytes())
        return [
            Phase(since, more, text.rstrip(b"\0").decode(errors="replace"), saving)
            for since, more, text, saving in found
        ]


def enter(text: str, patience_s: float = 0.0) -> None:
    """Say what this rank does from now on; costs a microsecond, and nothing without a launcher that asks."""
    if record := _record():
        record[:_SAVING] = _RECORD.pack(time.time(), patience_s, text.encode()[:_TEXT_BYTES], False)[:_SAVING]


@contextmanager
def saving() -> Iterator[None]:
    """Say that this rank is writing a checkpoint, which its launcher gives it time to end; in any thread."""
    record = _record()
    if record:
        record[_SAVING] = True
    try:
        yield
    finally:
        if record:
            record[_SAVING] = False


@cache
def _record() -> memoryview | None:
    """This rank's place on the board."""
    path = os.environ.get(VARIABLE)
    if not path or not Path(path).exists():
        return None
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    with Path(path).open("r+b") as file:
        board = memoryview(mmap.mmap(file.fileno(), 0))
    return board[rank * _RECORD.size : (rank + 1) * _RECORD.size]
