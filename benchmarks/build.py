"""How many images a second does the build take in, against only reading and decoding them on the same cores?

    python benchmarks/build.py [--images N] [--processes P] [--repeats K]

N different 640x480 JPEGs of COCO's size (about 160 kB), page cache warm, two captions each; plain build from nothing to the
published manifest, report included. Both sides use P processes and turns are taken. One JSON line: medians and their ratio.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg

from pipelines.config import BuildConfig
from pipelines.run import run_plain

RECORDS_PER_SHARD = 100


def draw(folder: Path, count: int) -> None:
    """``count`` photo-like pictures in the official COCO layout."""
    rng = np.random.default_rng(0)
    (folder / "train2017").mkdir()
    (folder / "annotations").mkdir()
    y, x = np.mgrid[0:480, 0:640]
    images, annotations = [], []
    for i in range(count):
        waves = [127 + 90 * np.sin(x / (60 + 9 * c + i % 7) + y / (90 - 9 * c) + i) for c in range(3)]
        noise = rng.normal(0, 22, (480, 640))[..., None]
        pixels = np.clip(np.stack(waves, -1) + noise, 0, 255).astype(np.uint8)
        (folder / "train2017" / f"{i:012d}.jpg").write_bytes(simplejpeg.encode_jpeg(pixels, quality=90))
        images.append({"id": i, "file_name": f"{i:012d}.jpg"})
        annotations += [{"id": 2 * i + j, "image_id": i, "caption": f"caption {j} of picture {i}"} for j in (0, 1)]
    content = {"images": images, "annotations": annotations}
    (folder / "annotations" / "captions_train2017.json").write_text(json.dumps(content))


def decode(paths: list[str]) -> int:
    """Bytes of pixels, so that nothing can be left out."""
    return sum(simplejpeg.decode_jpeg(Path(path).read_bytes()).nbytes for path in paths)


def decode_only(pool: ProcessPoolExecutor, paths: list[str]) -> float:
    """Seconds to read and decode every file once."""
    chunks = [paths[i : i + RECORDS_PER_SHARD] for i in range(0, len(paths), RECORDS_PER_SHARD)]
    start = time.perf_counter()
    list(pool.map(decode, chunks))
    return time.perf_counter() - start


def build(source: Path, out: Path, processes: int) -> float:
    """Seconds of a build from nothing, starting its processes included."""
    settings = {"records_per_shard": RECORDS_PER_SHARD, "processes": processes}
    config = BuildConfig.model_validate({"source": source, "out": out, "build": settings})
    start = time.perf_counter()
    run_plain(config)
    seconds = time.perf_counter() - start
    shutil.rmtree(out)
    return seconds


def measure(folder: Path, count: int, processes: int, repeats: int) -> dict[str, Any]:
    """Medians of both sides."""
    draw(folder, count)
    paths = sorted(map(str, (folder / "train2017").iterdir()))
    decoding, building = [], []
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        decode_only(pool, paths)  # starts the processes and warms the page cache
        for _ in range(repeats):
            decoding.append(decode_only(pool, paths))
            building.append(build(folder, folder / "out", processes))
    decoded, built = (count / statistics.median(seconds) for seconds in (decoding, building))
    return {
        "benchmark": "build",
        "images": count,
        "processes": processes,
        "repeats": repeats,
        "mean_image_kb": round(sum(Path(p).stat().st_size for p in paths) / count / 1000, 1),
        "build_images_per_s": round(built, 1),
        "decode_only_images_per_s": round(decoded, 1),
        "ratio": round(built / decoded, 3),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("numpy", "pillow", "simplejpeg")},
        "cpu": cpu_name(),
    }


def cpu_name() -> str:
    """Model of the processor, with the number of CPUs that may be used."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return f"{len(os.sched_getaffinity(0))} x {model}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), arguments.images, arguments.processes, arguments.repeats)))


if __name__ == "__main__":
    main()
