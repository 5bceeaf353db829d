"""How fast are samples read in order 1, and decoded, against plain sequential reading and against decoding alone?

    python benchmarks/stream.py [--folder DIR --split train] [--samples N] [--repeats K]

Without a folder, pictures of COCO's size are made. The files are read once beforehand, so the page cache is warm and
what is measured is the code, not the disk. One JSON line: medians in samples/s and the two ratios.
"""

import argparse
import io
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from PIL import Image

from shards.manifest import Manifest
from shards.order import Order, OrderSettings
from shards.reader import SplitReader
from shards.sample import Sample
from shards.writer import ShardWriter

PER_SHARD = 500


def make_dataset(folder: Path, samples: int) -> None:
    """Shards of JPEGs of 640 x 480 px and about 100 kB; 64 different pictures, repeated under new keys."""
    generator = np.random.default_rng(0)
    pictures = []
    for _ in range(64):
        coarse = Image.fromarray(generator.integers(0, 256, (48, 64, 3), np.uint8)).resize(
            (640, 480), Image.Resampling.BICUBIC
        )
        noisy = np.clip(np.asarray(coarse, np.int16) + generator.normal(0, 6, (480, 640, 3)), 0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(noisy).save(file, "JPEG", quality=85)
        pictures.append(file.getvalue())
    entries = []
    for first in range(0, samples, PER_SHARD):
        with ShardWriter(folder, f"train-{first // PER_SHARD:06d}", "train") as writer:
            for n in range(first, min(samples, first + PER_SHARD)):
                meta = {
                    "width": 640,
                    "height": 480,
                    "captions": ["a caption of some ten words, as they are in COCO"] * 5,
                }
                writer.write(Sample(f"{n:012d}", pictures[n % 64], "jpg", meta))
        entries.append(writer.entry)
    Manifest(tuple(entries)).save(folder)


def measure(folder: Path, split: str, samples: int, repeats: int) -> dict[str, Any]:
    """Medians of samples/s, each run over the same ``samples`` positions in a reader of its own."""
    manifest = Manifest.load(folder)
    order = Order([s.num_samples for s in manifest.of_split(split)], OrderSettings(0))
    count = min(samples, order.num_samples)
    ns = np.arange(count)
    encoded = [SplitReader(folder, split, manifest).read(i) for i in range(min(count, 256))]
    total_bytes = sum(s.num_bytes for s in manifest.of_split(split))

    def sequential() -> int:
        for shard in manifest.of_split(split):
            with (folder / shard.name).open("rb", buffering=0) as file:
                while file.read(1 << 20):
                    pass
        return order.num_samples

    def raw() -> int:
        reader = SplitReader(folder, split, manifest)
        for index in order.indices(ns).tolist():
            reader.read(index)
        return count

    def decoded() -> int:
        reader = SplitReader(folder, split, manifest)
        for index in order.indices(ns).tolist():
            reader.read(index).open_image()
        return count

    def decoding() -> int:
        for n in range(count):
            encoded[n % len(encoded)].open_image()
        return count

    sequential()
    rounds = [{f.__name__: samples_per_s(f) for f in (sequential, raw, decoding, decoded)} for _ in range(repeats)]
    rates = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    return {
        "samples": count,
        "mean_sample_bytes": round(total_bytes / order.num_samples),
        **{f"{name}_samples_per_s": round(rate) for name, rate in rates.items()},
        "raw_over_sequential": round(statistics.median(r["raw"] / r["sequential"] for r in rounds), 3),
        "decoded_over_decoding": round(statistics.median(r["decoded"] / r["decoding"] for r in rounds), 3),
    }


def samples_per_s(run: Callable[[], int]) -> float:
    """Rate of one run; the four kinds take turns, so that a busy moment of the machine hits all of them alike."""
    start = time.perf_counter()
    done = run()
    return done / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--split", default="train")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        if arguments.folder is None:
            make_dataset(folder, arguments.samples)
        result = measure(folder, arguments.split, arguments.samples, arguments.repeats)
    versions = {"python": platform.python_version(), "numpy": np.__version__, "pillow": PIL.__version__}
    print(
        json.dumps({"benchmark": "stream", **result, "versions": versions, "cpus": os.cpu_count(), "cpu": cpu_name()})
    )


def cpu_name() -> str:
    """Model name of the processor, from the kernel."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
