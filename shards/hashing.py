"""The fixed 64-bit mix behind order, caption choice and audit. Frozen: its values are held by tests/golden/hash.json.

mix64(v1, ..., vk) starts at h = 0 and takes in one value after the other, all modulo 2**64:

    h = h + v + 0x9E3779B97F4A7C15
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9
    h = (h ^ h >> 27) * 0x94D049BB133111EB
    h = h ^ h >> 31

Negative values count modulo 2**64. Source: the finaliser and the increment of SplitMix64 (Steele, Lea, Flood: Fast
splittable pseudorandom number generators, OOPSLA 2014). Not numpy's or Python's generators: those may change.
"""

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_INCREMENT = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix64(*values: int) -> int:
    """A number in [0, 2**64) that is a fixed function of the values and their order."""
    h = 0
    for value in values:
        h = (h + value + _INCREMENT) & _MASK
        h = ((h ^ h >> 30) * _FIRST) & _MASK
        h = ((h ^ h >> 27) * _SECOND) & _MASK
        h ^= h >> 31
    return h


def mix64_array(*values: int | NDArray[Any]) -> NDArray[np.uint64]:
    """``mix64`` element by element, with broadcasting.

    Shapes: integers and integer arrays of shapes that broadcast; uint64 of the broadcast shape.
    """
    h = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for value in values:
            h = h + _as_uint64(value) + np.uint64(_INCREMENT)
            h = (h ^ h >> np.uint64(30)) * np.uint64(_FIRST)
            h = (h ^ h >> np.uint64(27)) * np.uint64(_SECOND)
            h = h ^ h >> np.uint64(31)
    return np.asarray(h)


def _as_uint64(value: int | NDArray[Any]) -> NDArray[np.uint64]:
    if isinstance(value, int):
        return np.asarray(value & _MASK, np.uint64)
    return np.asarray(value).astype(np.uint64, copy=False)  # int64 wraps modulo 2**64


def text64(text: str) -> int:
    """A number for a text, such as a key: the first 8 bytes, little endian, of the sha256 of its UTF-8."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "little")


def slot_digest(n: int | NDArray[Any], key64: int | NDArray[Any]) -> NDArray[np.uint64]:
    """What one trained slot adds, modulo 2**64, to the audit digest: a sum, so ranks and steps may add in any order."""
    return mix64_array(n, key64)
