from pathlib import Path

import pytest

from shards.errors import FormatError
from shards.index import pack_index, read_index


def test_offsets_are_read_back(tmp_path: Path) -> None:
    (tmp_path / "a.idx").write_bytes(pack_index([0, 1536, 4096]))
    assert read_index(tmp_path / "a.idx", 2, 4096 + 1024).tolist() == [0, 1536, 4096]


def test_values_are_little_endian_64_bit() -> None:
    assert pack_index([0, 1536]) == bytes(8) + b"\0\6" + bytes(6)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 1536], "has 16 bytes, expected 24 for 2 samples"),
        ([0, 1536, 4096, 5120], "has 32 bytes, expected 24 for 2 samples"),
        ([512, 1536, 4096], "the first sample begins at 512, expected 0"),
        ([0, 1537, 4096], "sample 0 spans bytes 0 to 1537, expected whole blocks of 512"),
        ([0, 4096, 4096], "sample 1 spans bytes 4096 to 4096"),
        ([0, 4096, 1536], "sample 1 spans bytes 4096 to 1536"),
        ([0, 1536, 4608], "the last sample ends at 4608, expected 4096 in a tar of 5120 bytes"),
    ],
)
def test_an_impossible_index_is_refused(tmp_path: Path, offsets: list[int], message: str) -> None:
    (tmp_path / "a.idx").write_bytes(pack_index(offsets))
    with pytest.raises(FormatError, match=rf"a\.idx: {message}.*; run the build again"):
        read_index(tmp_path / "a.idx", 2, 5120)


def test_a_missing_index_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"a\.idx: the index is missing"):
        read_index(tmp_path / "a.idx", 2, 5120)
