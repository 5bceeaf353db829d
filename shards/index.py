"""The .idx file of a shard: where each sample begins, so that sample i is one seek away.

Little-endian uint64, N + 1 values: the offset of each sample's first header, then the end of the last sample's padding.
Source: the layout that Megatron-Energon's preparation writes; tests/golden/energon.idx is its output for a tar of ours.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shards.errors import FormatError, describe
from shards.ustar import BLOCK, END

REBUILD = "run the build again, it redoes only what does not match"


def pack_index(offsets: Sequence[int]) -> bytes:
    """The bytes of an .idx file; ``offsets`` holds the N sample starts and the end."""
    return np.asarray(offsets, dtype="<u8").tobytes()


def read_index(path: Path, num_samples: int, tar_bytes: int, foreign: bool = False) -> NDArray[np.int64]:
    """The N + 1 offsets in ``path``, checked against what the manifest says of the tar.

    Shapes: int64 [num_samples + 1].
    Raises:
        FormatError: absent, of another length, not rising in whole blocks, or not ending where the tar does.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise FormatError(f"{path}: the index is missing; {REBUILD}", path=path) from None
    except OSError as error:
        raise FormatError(f"{describe(error)}; or {REBUILD}", path=path) from None
    expected = 8 * (num_samples + 1)
    if len(raw) != expected:
        raise FormatError(
            f"{path}: has {len(raw)} bytes, expected {expected} for {num_samples} samples; {REBUILD}", path=path
        )
    offsets = np.frombuffer(raw, dtype="<u8").astype(np.int64)
    if problem := index_problem(offsets, tar_bytes, foreign):
        raise FormatError(f"{path}: {problem}; {REBUILD}", path=path)
    return offsets


def index_problem(offsets: NDArray[np.int64], tar_bytes: int, foreign: bool = False) -> str | None:
    """What is impossible about these offsets in a tar of ``tar_bytes`` bytes, or None.

    Another tool's (``foreign``) may begin with members of no sample, and end with more zeros than it needs.
    """
    if offsets[0] != 0 and not foreign:
        return f"the first sample begins at {offsets[0]}, expected 0"
    (bad,) = np.nonzero((np.diff(offsets) < 2 * BLOCK) | (offsets[1:] % BLOCK != 0))
    if bad.size:
        i = int(bad[0])
        return f"sample {i} spans bytes {offsets[i]} to {offsets[i + 1]}, expected whole blocks of {BLOCK}, two or more"
    if offsets[-1] + BLOCK > tar_bytes if foreign else offsets[-1] + len(END) != tar_bytes:
        return f"the last sample ends at {offsets[-1]}, expected {tar_bytes - len(END)} in a tar of {tar_bytes} bytes"
    return None
