"""Files that are whole or absent: written aside, fsynced, renamed."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_LIBC = ctypes.CDLL(None)
_SYNC_FILE_RANGE_WRITE = 2  # Source: sync_file_range(2)

ASIDE = ".tmp"  # ends every half-written name; readers and rebuilds ignore and overwrite such files


def aside(path: Path) -> Path:
    """The name under which ``path`` is written until it is whole. Fixed: a rerun overwrites what a kill left."""
    return path.with_name(f".{path.name}{ASIDE}")


@contextmanager
def written_aside(path: Path) -> Iterator[BinaryIO]:
    """A binary file that appears as ``path`` only when the block ends without an error.

    What a link leads to is replaced, not the link; a device or a pipe (/dev/stdout) is written to as it is.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        with path.open("wb") as file:
            yield file
        return
    path = path.resolve() if path.is_symlink() else path
    temporary = aside(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_file(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``, or leave it as it was."""
    with written_aside(path) as file:
        file.write(data)


def publish(temporary: Path, path: Path) -> None:
    """Rename an fsynced file or folder into place and make the rename itself durable."""
    temporary.replace(path)
    sync_folder(path.parent)


def begin_writing(file: BinaryIO, offset: int, num_bytes: int) -> None:
    """Have the kernel write a part of a file to disk while its writer goes on, which leaves little to wait for in fsync."""
    call = getattr(_LIBC, "sync_file_range", None)  # Linux has it, in every C library
    if call:
        file.flush()
        call(file.fileno(), ctypes.c_int64(offset), ctypes.c_int64(num_bytes), _SYNC_FILE_RANGE_WRITE)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
