"""Who stays among pictures whose 64-bit hashes differ in few bits. Exact, without comparing all with all. No I/O."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

BITS = 64
_BLOCK = 1 << 20  # hashes compared at once: 8 MB


def settle(hashes: NDArray[np.uint64], most_bits: int) -> dict[int, int]:
    """Whom each near duplicate gives way to, by index into ``hashes``, which stand in the order of precedence.

    One rule: in that order, a picture stays unless it is within ``most_bits`` of one that stays, and gives way to the
    first such. So no two that stay are alike, each that goes is like the one named, and later pictures change nothing.
    """
    unique, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    order = np.argsort(first)  # of equal hashes only the first can stay, and it speaks for the others
    stays = np.arange(len(order))
    for earlier, later in near_pairs(unique[order], most_bits).tolist():
        if stays[earlier] == earlier and stays[later] == later:
            stays[later] = earlier
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    owner = first[order][stays[rank[inverse]]]
    lost = np.flatnonzero(owner != np.arange(len(hashes)))
    return dict(zip(lost.tolist(), owner[lost].tolist(), strict=True))


def near_pairs(hashes: NDArray[np.uint64], most_bits: int) -> NDArray[np.int64]:
    """All pairs (i, j), i < j, of hashes that differ in at most ``most_bits``, by j, then i.

    Cut into most_bits + 1 bands, two such hashes agree in at least one: only those that share a band are compared.
    """
    found = [np.empty(0, np.int64)]
    edges = np.linspace(0, BITS, most_bits + 2).astype(int).tolist()
    for low, high in pairwise(edges):
        band = (hashes >> np.uint64(low)) & np.uint64((1 << (high - low)) - 1)
        order = np.argsort(band, kind="stable")
        cuts = np.flatnonzero(np.diff(band[order])) + 1
        for members in np.split(order, cuts):
            found += _near(hashes, members, most_bits)
    keys = np.unique(np.concatenate(found))
    return np.stack([keys % len(hashes), keys // len(hashes)], axis=1) if len(keys) else np.empty((0, 2), np.int64)


def _near(hashes: NDArray[np.uint64], members: NDArray[np.int64], most_bits: int) -> Iterator[NDArray[np.int64]]:
    """Near pairs among ``members``, which ascend, as j * len(hashes) + i. A crowded band costs time, not memory."""
    values, rows = hashes[members], max(1, _BLOCK // max(1, len(members)))
    for at in range(0, len(members) - 1, rows):
        differing = np.bitwise_count(values[at : at + rows, None] ^ values[None, at:])
        i, j = np.nonzero(differing <= most_bits)
        if (upper := i < j).any():
            yield members[at + j[upper]] * len(hashes) + members[at + i[upper]]
