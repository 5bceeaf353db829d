"""What is found out about a file by reading it; remembered between builds."""

import hashlib

import numpy as np

from pipelines.filters import Limits
from pipelines.fingerprint import fingerprint, seen
from shards.checksum import crc32

FACTS = np.dtype(
    [
        ("sha256", "S32"),
        ("crc32", "<u4"),  # shows a build process that the file is still the same, for a thirtieth of the work
        ("seen", "<u4"),  # stands for the limits under which ``likeness`` was looked for, 0 where it was not
        ("comparable", "?"),  # whether it was found
        ("likeness", "<u8"),  # perceptual hash
    ]
)


def find_facts(data: bytes, limits: Limits) -> bytes:
    """One value of dtype FACTS."""
    looked = seen(limits)
    likeness = fingerprint(data, limits) if looked else None
    facts = (hashlib.sha256(data).digest(), crc32(data), looked, likeness is not None, likeness or 0)
    return np.array(facts, FACTS).tobytes()
