"""What is found out about every file by reading it once, and remembered: a second build reads only what has changed."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.facts import FACTS
from pipelines.filters import Rejection
from pipelines.spool import Numbers, Spool
from shards.atomic import written_aside

CHUNK = 256  # files in one request
_KNOWN = np.dtype([("stamp", "S16"), ("facts", FACTS)])

# Facts (bytes of dtype FACTS) or a rejection for each of some places of a source, request by request.
HashFiles = Callable[[Iterator[tuple[Numbers, int]], Spool], Iterator[tuple[Numbers, Sequence[bytes | Rejection]]]]


def hash_all(spool: Spool, path: Path, hash_files: HashFiles, seen: int = 0) -> None:
    """Set ``facts`` of every row, or reject it; remembered in ``path`` by place and stamp of the file.

    Where ``seen`` is not 0, only facts found under the same limits count.
    """
    known, table = _load(path), spool.table
    wanted = table["stamp"] != b""
    at = np.minimum(np.searchsorted(known["stamp"], table["stamp"]), max(0, len(known) - 1))
    if len(known):
        found = wanted & (known["stamp"][at] == table["stamp"])
        if seen:
            found &= known["facts"]["seen"][at] == seen
        table["facts"][found] = known["facts"][at[found]]
        table["hashed"] = found
    for numbers, replies in hash_files(_requests(spool, np.flatnonzero(wanted & ~table["hashed"])), spool):
        for number, reply in zip(numbers.tolist(), replies, strict=True):
            if isinstance(reply, Rejection):
                table["verdict"][number] = spool.number(reply)
            else:
                table["facts"][number] = np.frombuffer(reply, FACTS)[0]
                table["hashed"][number] = True
    _save(path, table)


def _requests(spool: Spool, numbers: Numbers) -> Iterator[tuple[Numbers, int]]:
    """Rows to be hashed and their source, at most ``CHUNK`` at a time."""
    sources = spool.table["source"][numbers]
    for run in np.split(numbers, np.flatnonzero(np.diff(sources)) + 1):
        for i in range(0, len(run), CHUNK):
            yield run[i : i + CHUNK], int(spool.table["source"][run[i]])


def _load(path: Path) -> Any:
    with suppress(OSError):
        data = memoryview(path.read_bytes())
        if data[:32] == _checksum(data[32:]) and (len(data) - 32) % _KNOWN.itemsize == 0:
            return np.frombuffer(data, _KNOWN, offset=32)
    return np.zeros(0, _KNOWN)


def _save(path: Path, table: Any) -> None:
    hashed = table["hashed"]
    content = np.zeros(int(hashed.sum()), _KNOWN)
    content["stamp"], content["facts"] = table["stamp"][hashed], table["facts"][hashed]
    content.sort(order="stamp")
    checksum = _checksum(content)
    with suppress(OSError), path.open("rb") as file:
        whole = path.stat().st_size == len(checksum) + content.nbytes
        if whole and file.read(len(checksum)) == checksum and np.array_equal(np.fromfile(file, _KNOWN), content):
            return
    with written_aside(path) as file:
        file.write(checksum)
        content.tofile(file)


def _checksum(content: Any) -> bytes:
    """Of the content and of what its columns are."""
    digest = hashlib.sha256(str(_KNOWN).encode())
    digest.update(content)
    return digest.digest()
