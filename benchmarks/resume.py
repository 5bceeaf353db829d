"""How long does a new process take to its first batch, and how much does it read, early and late in an epoch?

    python benchmarks/resume.py [--samples N] [--global-batch B] [--repeats K]

The dataset has N tiny samples (default a million) in shards of 1,000, as a build makes them, that are hard links to one:
what counts is the number of samples, not their bytes. One JSON line: medians at 5, 50 and 95 % of an epoch, from after the
imports to a batch in memory, the processor's part of that, and bytes read by system calls (rchar).
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shards.manifest import Manifest
from shards.order import Order, OrderSettings
from shards.reader import SplitReader
from shards.sample import Sample
from shards.stream import Stream
from shards.writer import ShardWriter

PER_SHARD = 1000


def make_dataset(folder: Path, samples: int) -> None:
    """Equal shards; ``samples`` is rounded down to whole ones."""
    meta = {"width": 1, "height": 1, "captions": ["a caption of some ten words, as they are in COCO"]}
    with ShardWriter(folder, "train-000000", "train") as writer:
        for n in range(PER_SHARD):
            writer.write(Sample(f"{n:012d}", bytes(100), "jpg", meta))
    first = writer.entry
    entries = [replace(first, name=f"train-{i:06d}.tar") for i in range(samples // PER_SHARD)]
    for entry in entries[1:]:
        for source, target in zip(files_of(first), files_of(entry), strict=True):
            os.link(folder / source, folder / target)
    Manifest(tuple(entries)).save(folder)


def files_of(entry: Any) -> tuple[str, str, str]:
    """Names of a shard's three files."""
    return entry.name, entry.idx_name, entry.meta_name


def first_batch(folder: Path, samples_consumed: int, global_batch: int) -> dict[str, float]:
    """Seconds and bytes from nothing to the whole global batch that follows ``samples_consumed``."""
    before, start, cpu = bytes_read(), time.perf_counter(), time.process_time()
    reader = SplitReader(folder, "train")
    slots = Stream(Order(reader.shard_sizes, OrderSettings(0)), global_batch).step(samples_consumed)
    samples = [reader.read(slot.index) for slot in slots]
    assert len(samples) == global_batch
    return {
        "s": time.perf_counter() - start,
        "cpu_s": time.process_time() - cpu,
        "bytes": bytes_read() - before,
    }


def bytes_read() -> int:
    """Bytes that this process has asked the kernel for."""
    return int(Path("/proc/self/io").read_text().split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--global-batch", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--first-batch", nargs=2, metavar=("DIR", "N"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.first_batch:
        folder, consumed = arguments.first_batch
        print(json.dumps(first_batch(Path(folder), int(consumed), arguments.global_batch)))
        return
    result: dict[str, Any] = {
        "benchmark": "resume",
        "samples": arguments.samples,
        "global_batch": arguments.global_batch,
    }
    with tempfile.TemporaryDirectory() as temporary:
        make_dataset(Path(temporary), arguments.samples)
        for percent in (5, 50, 95):
            runs = [in_new_process(Path(temporary), arguments, percent) for _ in range(arguments.repeats)]
            result[f"at_{percent}_percent_s"] = round(statistics.median(run["s"] for run in runs), 4)
            result[f"at_{percent}_percent_cpu_s"] = round(statistics.median(run["cpu_s"] for run in runs), 4)
            result[f"at_{percent}_percent_bytes"] = round(statistics.median(run["bytes"] for run in runs))
        window = OrderSettings(0).window * Manifest.load(Path(temporary)).shards[0].num_bytes
        result["bytes_of_one_window"] = window // PER_SHARD
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    print(json.dumps({**result, "versions": versions, "cpus": os.cpu_count(), "cpu": cpu_name()}))


def in_new_process(folder: Path, arguments: argparse.Namespace, percent: int) -> dict[str, float]:
    """``first_batch`` in a process of its own."""
    consumed = arguments.samples * percent // 100
    command = [sys.executable, __file__, "--first-batch", folder, consumed, "--global-batch", arguments.global_batch]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def cpu_name() -> str:
    """Model name of the processor, from the kernel."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
