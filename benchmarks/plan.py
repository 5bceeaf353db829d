"""How long does it take, and how much memory, to plan a build of a million records?

    python benchmarks/plan.py [--records N] [--processes P]

A JSONL file of N records with two captions each, whose images are N names (hard links) of 1,000 small files: planning
reads the records, finds and hashes every file, puts the records in order, cuts them into slices of 1,000 and says which
shards are to be built. Planning again finds nothing to hash. One JSON line: seconds, and peak resident memory of the planning
process (the build processes, which hash, stay at some 60 MB each).
"""

import argparse
import json
import os
import platform
import resource
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipelines.build import Build
from pipelines.config import BuildConfig

DISTINCT = 1000
PER_FOLDER = 10_000


def make(folder: Path, count: int) -> Path:
    """The JSONL file, with its images beside it."""
    for i in range(DISTINCT):
        (folder / f"{i}.jpg").write_bytes(b"%d" % i * 500)
    with (folder / "pairs.jsonl").open("w") as lines:
        for i in range(count):
            name = f"{i // PER_FOLDER}/{i:012d}.jpg"
            if i % PER_FOLDER == 0:
                (folder / name).parent.mkdir()
            os.link(folder / f"{i % DISTINCT}.jpg", folder / name)
            captions = [f"a synthetic picture with the number {i}", f"number {i}, seen from another side"]
            lines.write(json.dumps({"image": name, "captions": captions}) + "\n")
    return folder / "pairs.jsonl"


def plan(config: BuildConfig) -> tuple[float, int]:
    """Seconds, and number of shards that are to be built."""
    start = time.perf_counter()
    with Build(config) as build:
        todo = build.plan()
        return time.perf_counter() - start, len(todo)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        values: dict[str, Any] = {
            "source": {"kind": "jsonl", "path": make(folder, arguments.records)},
            "out": folder / "out",
            "build": {"processes": arguments.processes},
            "filters": {"duplicates": False},
        }
        config = BuildConfig.model_validate(values)
        before_s = time.process_time()
        first_s, shards = plan(config)
        cpu_s = time.process_time() - before_s
        again_s, _ = plan(config)
    result = {
        "benchmark": "plan",
        "records": arguments.records,
        "processes": arguments.processes,
        "shards": shards,
        "first_s": round(first_s, 1),
        "cpu_s": round(cpu_s, 1),  # of the planning process, the first time; on a busy machine the others say little
        "again_s": round(again_s, 1),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
