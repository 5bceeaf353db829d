"""The tar dialect of a shard: plain USTAR regular files, every header a pure function of (name, size)."""

from shards.errors import ShardsError

BLOCK = 512
END = bytes(2 * BLOCK)  # two zero blocks end a tar; the file stops there
MAX_NAME = 100  # bytes in the header's name field; the prefix field is never used
MAX_SIZE = 8**11 - 1  # eleven octal digits, 8 GiB less one byte

_BEFORE_SIZE = b"0000644\0" + 2 * b"0000000\0"  # mode, owner, group
_MTIME = b"02263523000\0"  # 1980-01-01 UTC; 0 makes some versions of GNU tar warn about an implausibly old time stamp
_KIND = b"0" + bytes(100) + b"ustar\00000" + bytes(64 + 16 + 155 + 12)
_FIXED_SUM = sum(_BEFORE_SIZE + _MTIME + b" " * 8 + _KIND)
_LAYOUT = b"%b" + _BEFORE_SIZE + b"%b" + _MTIME + b"%06o\0 " + _KIND


def header(name: str, size: int) -> bytes:
    """The 512 bytes in front of a member's payload.

    Raises:
        ShardsError: the name or the size does not fit into the header's field.
    Source: POSIX.1-1988 ustar interchange format; tests/shards/test_writer.py reads it back with tarfile and GNU tar.
    """
    raw = name.encode("utf-8")
    if len(raw) > MAX_NAME:
        raise ShardsError(
            f"member {name!r}: the name has {len(raw)} bytes, a tar header holds {MAX_NAME}; use a shorter key"
        )
    if size > MAX_SIZE:
        raise ShardsError(f"member {name!r}: has {size} bytes, a tar header holds at most {MAX_SIZE}")
    octal = b"%011o\0" % size
    return _LAYOUT % (raw.ljust(MAX_NAME, b"\0"), octal, _FIXED_SUM + sum(raw) + sum(octal))


def padding(size: int) -> bytes:
    """The zeros behind a payload of ``size`` bytes, up to the next block."""
    return bytes(-size % BLOCK)


def padded(size: int) -> int:
    """``size`` rounded up to whole blocks."""
    return size + -size % BLOCK


def difference(found: bytes, expected: bytes) -> str:
    """Says how a header differs from the one that should be there, in words for an error message."""
    if len(found) < len(expected):
        return f"its tar header has {len(found)} bytes, expected {len(expected)}"
    byte = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
    name = expected[:MAX_NAME].rstrip(b"\0").decode()
    return f"byte {byte} of the tar header of {name} is {found[byte]:#04x}, expected {expected[byte]:#04x}"
