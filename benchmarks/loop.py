"""Time of a step in the loop, with logs, digest and key log, against a bare torch loop on the same batches.

The tiny LLaVA, one process, batches read beforehand so that only the loop differs; blocks of steps take turns. One JSON
line: medians in milliseconds of CPU time, which holds on a busy machine, and their ratio; and that of what a step does
besides training: finding its samples in the order, counting and digesting them, moving on, logging step and keys.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

STEPS = 20  # in a block
BLOCKS = 7
GLOBAL_BATCH = 16
MICRO_BATCH = 8


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder))))


def measure(folder: Path) -> dict[str, Any]:
    """Median step times of both loops."""
    import torch

    from shards.settings import load_settings
    from xctrain import loop
    from xctrain.config import Config
    from xctrain.ranks import join
    from xctrain.start import make_plan, open_model, start

    make_shards(folder)
    settings = {
        "data.shards": folder / "shards",
        "run.dir": folder / "run",
        "train.global_batch": GLOBAL_BATCH,
        "train.micro_batch": MICRO_BATCH,
        "train.num_steps": STEPS,
        "train.log_keys": "true",
        "train.save_every": 10**9,
        "data.workers": 0,
    }
    config = load_settings(Config, None, [f"{name}={value}" for name, value in settings.items()])
    ranks = join(config)
    plan = make_plan(config, 1)
    family, model_id = open_model(config, ranks, plan)
    run = start(config, ranks, plan, family, model_id, stop_asked=lambda: False, show=lambda state, metrics: None)
    batches = [micro for micro, _ in run.loader.global_batches(0)]
    run = replace(run, loader=Prefetched(batches), checkpoints=NoCheckpoints())
    bare_ms, loop_ms = [], []
    for _ in range(BLOCKS):
        began = time.process_time()
        for micro_batches in batches:
            targets = sum(b.num_targets for b in micro_batches)
            for batch in micro_batches:
                (run.engine.module(batch) / targets).backward()
            torch.nn.utils.clip_grad_norm_(run.engine.trainable, 1.0)
            run.engine.optimizer.optimizer.step()
            run.engine.optimizer.optimizer.zero_grad()
        bare_ms.append((time.process_time() - began) / STEPS * 1e3)
        began = time.process_time()
        loop.train(run, plan.state)
        loop_ms.append((time.process_time() - began) / STEPS * 1e3)
    bookkeeping = Timed()
    loop.count_over_ranks = bookkeeping(loop.count_over_ranks)
    loop.log_step = bookkeeping(loop.log_step)
    loop.train(run, plan.state)
    position = bookkeeping(plan.stream.step)
    for step in range(STEPS):
        position(step * GLOBAL_BATCH)
    bookkeeping_ms = bookkeeping.seconds / STEPS * 1e3
    bare, ours = statistics.median(bare_ms), statistics.median(loop_ms)
    return {
        "benchmark": "loop",
        "bare_cpu_ms_per_step": round(bare, 2),
        "loop_cpu_ms_per_step": round(ours, 2),
        "ratio": round(ours / bare, 3),
        "bookkeeping_cpu_ms_per_step": round(bookkeeping_ms, 3),
        "bookkeeping_share_of_this_tiny_step": round(bookkeeping_ms / ours, 4),
        "step_ms_above_which_it_is_below_2_percent": round(bookkeeping_ms / 0.02, 1),
        "global_batch": GLOBAL_BATCH,
        "python": platform.python_version(),
        "torch": version("torch"),
        "cpus": len(os.sched_getaffinity(0)),
        "processor": platform.processor() or platform.machine(),
    }


def make_shards(folder: Path) -> None:
    """The sample dataset, small."""
    for arguments in (
        ["sample", "--out", folder / "coco", "--images", "200"],
        ["build", "configs/build.yaml", f"source.root={folder / 'coco'}", f"out={folder / 'shards'}", "--plain"],
    ):
        subprocess.run([sys.executable, "-m", "pipelines", *map(str, arguments)], check=True, capture_output=True)


class Prefetched:
    """Batches that are in memory already."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def global_batches(self, start: int) -> Generator[tuple[Any, float], None, None]:
        yield from ((batch, 0.0) for batch in self.batches)


class Timed:
    """Adds up the CPU time of the functions that it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.process_time()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.process_time() - began

        return timed


class NoCheckpoints:
    """Saves nothing: what a save costs is another question."""

    def save(self, content: Any) -> Path:
        return Path("none")


if __name__ == "__main__":
    main()
