import zlib

from hypothesis import given
from hypothesis import strategies as st

from shards.checksum import crc32


@given(st.binary(max_size=300))
def test_checksum_is_the_crc32_that_everyone_knows(data: bytes) -> None:
    assert crc32(data) == zlib.crc32(data)
    assert crc32(memoryview(data)) == zlib.crc32(data)  # type: ignore[arg-type]
