"""How long, and in how much memory, are the near duplicates of a large dataset found?

    python benchmarks/near_duplicates.py [--hashes N] [--bits B]

N random 64-bit hashes, a hundredth of them changed in up to B bits from another one; every planted pair has to be found.
One JSON line: seconds, peak memory of the process, and how much of it was there before the search.
"""

import argparse
import json
import platform
import resource
import time
from importlib.metadata import version

import numpy as np
from numpy.typing import NDArray

from pipelines.near_duplicates import settle


def plant(count: int, bits: int) -> tuple[NDArray[np.uint64], dict[int, int]]:
    """Hashes, and which of them have to give way to which."""
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**64, count, dtype=np.uint64)
    num_pairs = count // 100
    owners, copies = rng.choice(count // 2, num_pairs, False), count // 2 + rng.choice(count // 2, num_pairs, False)
    for i, (owner, copy) in enumerate(zip(owners, copies, strict=True)):
        flips = rng.choice(64, i % (bits + 1), replace=False)
        hashes[copy] = hashes[owner] ^ np.uint64(sum(1 << int(bit) for bit in flips))
    return hashes, dict(zip(copies.tolist(), owners.tolist(), strict=True))


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hashes", type=int, default=1_000_000)
    parser.add_argument("--bits", type=int, default=4)
    arguments = parser.parse_args()
    hashes, planted = plant(arguments.hashes, arguments.bits)
    before = peak_mb()
    start = time.perf_counter()
    found = settle(hashes, arguments.bits)
    seconds = time.perf_counter() - start
    facts = {
        "benchmark": "near_duplicates",
        "hashes": arguments.hashes,
        "bits": arguments.bits,
        "planted": len(planted),
        "planted_found": sum(found.get(copy) == owner for copy, owner in planted.items()),
        "found": len(found),
        "seconds": round(seconds, 2),
        "peak_mb": round(peak_mb()),
        "peak_mb_before": round(before),
        "python": platform.python_version(),
        "numpy": version("numpy"),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
