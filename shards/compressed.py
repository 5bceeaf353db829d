"""Files that are compressed as a whole, known by their first bytes, whatever they are called."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".tgz")
_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\3\4": "zip"}
_TOOLS: Mapping[str, str] = {"gzip": "gunzip", "bzip2": "bunzip2", "xz": "unxz", "zstd": "unzstd", "zip": "unzip"}


def compression(path: Path | str) -> str | None:
    """gzip, bzip2, xz, zstd or zip; None of anything else, and of what cannot be read."""
    with suppress(OSError), Path(path).open("rb") as file:
        start = file.read(8)
        return next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), None)
    return None


def advice(path: Path | str, kind: str) -> str:
    """What to say of a compressed file that cannot be read as it is."""
    return f"is compressed ({kind}); decompress it first (`{_TOOLS[kind]} {Path(path).name}`)"
