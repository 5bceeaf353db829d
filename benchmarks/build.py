"""How many images a second does the build take in, against only decoding them, and against img2dataset, on the same cores?

    python benchmarks/build.py [--images N] [--processes P] [--repeats K] [--img2dataset PYTHON] [--flow]

N different 640x480 JPEGs of COCO's size (about 160 kB), page cache warm, two captions each. The sides take turns:

- build: a plain build from nothing to the published manifest and report, all checks on, starting its processes included;
- decode: the files are read and decoded by Pillow, in full, by processes that have started already;
- img2dataset (with the path of a Python that has it): puts the same files into tars in their own size, with fewer checks; by
  its defaults it encodes every picture anew, and with skip_reencode it keeps the files as the build does. Without the path
  both are left out, and the line says so;
- flow (with --flow): the same build as a Prefect flow; a build of 8 pictures says what its start costs.

One JSON line: medians, ratios, processor time of both sides (which other work on the machine disturbs less), load before and
after. What did not help: own buffers for reading, allocator settings, leaving out garbage collection.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image

from pipelines.config import BuildConfig
from pipelines.run import run_plain, run_with_prefect

RECORDS_PER_SHARD = 1000  # the default

IMG2DATASET = """
import sys
from img2dataset import download

if __name__ == "__main__":
    urls, out, processes, skip = sys.argv[1:]
    download(
        url_list=urls, output_folder=out, processes_count=int(processes), thread_count=16, resize_mode="no",
        skip_reencode=skip == "skip", output_format="webdataset", input_format="jsonl", url_col="url", caption_col="caption",
        number_sample_per_shard=RECORDS, enable_wandb=False, retries=0, disallowed_header_directives=[],
    )
"""


def draw(folder: Path, count: int) -> None:
    """``count`` photo-like pictures in the official COCO layout."""
    rng = np.random.default_rng(0)
    (folder / "train2017").mkdir(parents=True)
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


def decode(paths: list[str]) -> float:
    """Processor time of reading and decoding every file in full."""
    start = time.process_time()
    for path in paths:
        with Image.open(path) as image:
            image.load()
    return time.process_time() - start


class Sides:
    """What is timed. Each takes the number of pictures from the folder and returns seconds, and processor time."""

    def __init__(self, folder: Path, processes: int, pool: ProcessPoolExecutor) -> None:
        self.folder, self.processes, self.pool = folder, processes, pool
        self.paths = sorted(map(str, (folder / "train2017").iterdir()))
        rows = [{"url": Path(path).as_uri(), "caption": f"picture {i}"} for i, path in enumerate(self.paths)]
        (folder / "urls.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def decode(self) -> tuple[float, float]:
        chunks = [self.paths[i : i + RECORDS_PER_SHARD // 5] for i in range(0, len(self.paths), RECORDS_PER_SHARD // 5)]
        start = time.perf_counter()
        used = sum(self.pool.map(decode, chunks))
        return time.perf_counter() - start, used

    def build(self) -> tuple[float, float]:
        return self._build(run_plain, self.folder)

    def flow(self) -> tuple[float, float]:
        return self._build(run_with_prefect, self.folder)

    def flow_start(self, few: Path) -> float:
        """Seconds that a flow needs beyond a plain build, for next to nothing."""
        return self._build(run_with_prefect, few)[0] - self._build(run_plain, few)[0]

    def _build(self, run: Callable[[BuildConfig], Any], source: Path) -> tuple[float, float]:
        out = self.folder / "out"
        settings = {"records_per_shard": RECORDS_PER_SHARD, "processes": self.processes}
        config = BuildConfig.model_validate({"source": source, "out": out, "build": settings})
        start, used = time.perf_counter(), _processor_s()
        run(config)
        seconds, used = time.perf_counter() - start, _processor_s() - used
        shutil.rmtree(out)
        return seconds, used

    def img2dataset(self, python: str, reencode: str) -> tuple[float, float]:
        """Its own start included, as that of the build is."""
        out = self.folder / "img2dataset"
        script = self.folder / "run_img2dataset.py"
        script.write_text(IMG2DATASET.replace("RECORDS", str(RECORDS_PER_SHARD)))
        command = [python, str(script), str(self.folder / "urls.jsonl"), str(out), str(self.processes), reencode]
        start, used = time.perf_counter(), _processor_s()
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": ""})
        seconds, used = time.perf_counter() - start, _processor_s() - used
        stored = sum(json.loads(p.read_text())["successes"] for p in out.glob("*_stats.json"))
        assert stored == len(self.paths), f"img2dataset stored {stored} of {len(self.paths)}"
        shutil.rmtree(out)
        return seconds, used


def _processor_s() -> float:
    """Of this process and of those it started that have ended."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(s.ru_utime + s.ru_stime for s in spent)


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians of all sides."""
    count, before = arguments.images, os.getloadavg()[0]
    draw(folder / "many", count)
    times: dict[str, list[tuple[float, float]]] = {}
    starts: list[float] = []
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        sides = Sides(folder / "many", arguments.processes, pool)
        sides.decode()  # starts the processes and warms the page cache
        if arguments.flow:
            draw(folder / "few", 8)
        for _ in range(arguments.repeats):
            times.setdefault("decode", []).append(sides.decode())
            times.setdefault("build", []).append(sides.build())
            if arguments.img2dataset:
                for name, reencode in (("img2dataset", "reencode"), ("img2dataset_skip_reencode", "skip")):
                    times.setdefault(name, []).append(sides.img2dataset(arguments.img2dataset, reencode))
            if arguments.flow:
                times.setdefault("flow", []).append(sides.flow())
                starts.append(sides.flow_start(folder / "few"))
    seconds = {name: statistics.median(s for s, _ in pairs) for name, pairs in times.items()}
    used = {name: statistics.median(u for _, u in pairs) for name, pairs in times.items()}
    facts: dict[str, Any] = {
        "benchmark": "build",
        "images": count,
        "processes": arguments.processes,
        "repeats": arguments.repeats,
        "mean_image_kb": round(sum(Path(p).stat().st_size for p in sides.paths) / count / 1000, 1),
        "images_per_s": {name: round(count / s, 1) for name, s in seconds.items()},
        "processor_ms_per_image": {name: round(1000 * u / count, 3) for name, u in used.items() if name != "flow"},
        "of_decode": round(seconds["decode"] / seconds["build"], 3),
        "of_decode_processor_time": round(used["decode"] / used["build"], 3),
    }
    if arguments.img2dataset:
        facts["times_img2dataset"] = round(seconds["img2dataset"] / seconds["build"], 2)
        facts["times_img2dataset_skip_reencode"] = round(seconds["img2dataset_skip_reencode"] / seconds["build"], 2)
    else:
        facts["times_img2dataset"] = "not measured: --img2dataset PYTHON names no Python that has it"
    if arguments.flow:
        start = statistics.median(starts)
        facts["flow_start_s"] = round(start, 2)
        facts["flow_overhead_beyond_start"] = round((seconds["flow"] - start) / seconds["build"] - 1, 3)
    return facts | {
        "load": [round(before, 1), round(os.getloadavg()[0], 1)],
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
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--img2dataset", metavar="PYTHON", help="a Python in whose environment img2dataset is installed"
    )
    parser.add_argument("--flow", action="store_true", help="measure what Prefect costs too")
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), parser.parse_args())))


if __name__ == "__main__":
    main()
