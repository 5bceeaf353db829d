"""What the loop costs beside its model: against a bare torch loop, and against the Hugging Face Trainer.

Three questions, one JSON line. All sides get the same batches, read beforehand, and take turns in blocks of steps; each
figure is the median over the blocks, a ratio that of neighbours. CPU time of the process, which holds on a busy machine.

- a tiny LLaVA with a step of some 15 ms, against a bare loop: `ratio`
- a model of two lines, whose step is nothing but the loop, against the Trainer, which logs a step in 500, or each as ours
  does: `two_lines_ratio`
- the LLaVA on two processes, against a bare loop around torch's DistributedDataParallel (DDP), by CPU time and by the clock
  on the wall: `two_ranks_ratio`, `two_ranks_wall_ratio`; and forward, backward and sum of 100 MB of gradients, against DDP's,
  which adds up while the backward pass runs: `sum_100_mb_ratio_to_ddp`
"""

import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

STEPS = 12  # in a block; the first two do not count
BLOCKS = 15
TWO_LINES_STEPS = 200
GLOBAL_BATCH = 4
RANKS = 2


def main(argv: Sequence[str]) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if argv:  # one of the two ranks
        measure_rank(Path(argv[0]))
        return
    with tempfile.TemporaryDirectory() as folder:
        make_shards(Path(folder))
        print(json.dumps(measure(Path(folder))))


def measure(folder: Path) -> dict[str, Any]:
    """All figures."""
    run = make_run(folder, micro_batch=GLOBAL_BATCH)
    batches = [micro for micro, _ in run.loader.global_batches(0)]
    bare, ours = compare(lambda: bare_times(run, batches), lambda: loop_times(run, batches))
    bare_ms, ours_ms = statistics.median(bare), statistics.median(ours)
    return {
        "benchmark": "loop",
        "ratio": ratio(ours, bare),
        "bare_cpu_ms_per_step": round(bare_ms, 2),
        "loop_cpu_ms_per_step": round(ours_ms, 2),
        **two_lines(folder, run, batches),
        **two_ranks(folder),
        "global_batch": GLOBAL_BATCH,
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
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


def make_run(folder: Path, micro_batch: int) -> Any:
    """A real run on the tiny LLaVA that saves nothing."""
    from shards.settings import load_settings
    from xctrain.config import Config
    from xctrain.ranks import join
    from xctrain.start import make_plan, open_model, start

    settings = {
        "data.shards": folder / "shards",
        "run.dir": folder / "run",
        "train.global_batch": GLOBAL_BATCH,
        "train.micro_batch": micro_batch,
        "train.num_steps": STEPS,
        "train.save_every": 10**9,
        "data.workers": 0,
    }
    config = load_settings(Config, None, [f"{name}={value}" for name, value in settings.items()])
    ranks = join(config)
    plan = make_plan(config, ranks.world_size)
    family, model_id = open_model(config, ranks, plan)
    run = start(config, ranks, plan, family, model_id, stop_asked=lambda: False, show=lambda *_: None)
    return replace(run, saver=NoSaver())


def compare(*sides: Callable[[], list[float]]) -> list[list[float]]:
    """Median times of a step in each block of each side; the sides take turns."""
    found: list[list[float]] = [[] for _ in sides]
    for _ in range(BLOCKS):
        for blocks, side in zip(found, sides, strict=True):
            blocks.append(statistics.median(side()[2:]))
    return found


def ratio(ours: list[float], others: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(ours, others, strict=True)), 3)


def bare_times(run: Any, batches: Sequence[Any], model: Any = None, clock: Any = time.process_time) -> list[float]:
    """Milliseconds of each step of the loop that one would write first."""
    import torch

    optimizer = run.engine.optimizer
    model = model or run.engine.module
    clocks = [clock()]
    for micro_batches in batches:
        targets = sum(b.num_targets for b in micro_batches) * run.ranks.world_size  # as DDP averages over ranks
        for number, batch in enumerate(micro_batches, start=1):
            alone = hasattr(model, "no_sync") and number < len(micro_batches)
            with model.no_sync() if alone else nullcontext():
                (model(batch) / targets).backward()
        torch.nn.utils.clip_grad_norm_(run.engine.trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clocks.append(clock())
    return between(clocks)


def loop_times(run: Any, batches: Sequence[Any], clock: Any = time.process_time) -> list[float]:
    """Milliseconds of each step of this project's loop: with its checks, its log and its digest."""
    from xctrain import loop
    from xctrain.state import TrainState

    clocks: list[float] = []
    run = replace(run, loader=Prefetched(batches, run.loader), show=lambda *_: clocks.append(clock()))
    began = TrainState(segments=segments_of(run))
    loop.train(run, began)
    return between(clocks)


def segments_of(run: Any) -> Any:
    from xctrain import resume
    from xctrain.data import open_data
    from xctrain.state import TrainState

    data = open_data(run.config.data)
    return resume.next_segments(run.config, TrainState(), data)


def between(clocks: Sequence[float]) -> list[float]:
    return [(later - before) * 1e3 for before, later in itertools.pairwise(clocks)]


def two_lines(folder: Path, run: Any, batches: Sequence[Any]) -> dict[str, Any]:
    """The loop against the Trainer on a model of two lines, in microseconds."""
    import torch

    from xctrain.optim import make_optimizer
    from xctrain.parallel import Engine

    class TwoLines(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, batch: Any = None, x: Any = None, y: Any = None) -> Any:
            if batch is not None:  # ours sums, the Trainer wants a mean
                return (self.layer(batch.inputs["x"]) - batch.inputs["y"]).square().sum()
            return {"loss": (self.layer(x) - y).square().mean()}

    inputs = {"x": torch.randn(GLOBAL_BATCH, 4), "y": torch.randn(GLOBAL_BATCH, 1)}
    many = [batches[i % len(batches)] for i in range(TWO_LINES_STEPS)]
    small = [[replace(batch, inputs=inputs) for batch in micro_batches] for micro_batches in many]
    engine = Engine(run.ranks, TwoLines(), run.config)
    engine.use_optimizer(make_optimizer(engine.module.parameters(), run.config.optim))
    ours = replace(run, engine=engine)
    sides = compare(
        lambda: bare_times(ours, small),
        lambda: loop_times(ours, small),
        lambda: trainer_times(folder, TwoLines(), inputs, log_every=500),
        lambda: trainer_times(folder, TwoLines(), inputs, log_every=1),
    )
    names = ("bare", "loop", "trainer", "trainer_logging_each")
    return {
        "two_lines_ratio": ratio(sides[1], sides[2]),
        "two_lines_ratio_to_trainer_logging_each": ratio(sides[1], sides[3]),
        **{f"two_lines_{n}_cpu_us": round(statistics.median(s) * 1e3) for n, s in zip(names, sides, strict=True)},
    }


def trainer_times(folder: Path, model: Any, inputs: Any, log_every: int) -> list[float]:
    """Milliseconds of each step of the Hugging Face Trainer, given batches that are in memory."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    clocks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clocks.append(time.process_time())

    class InMemory(Trainer):
        def get_train_dataloader(self) -> Any:
            return [inputs] * TWO_LINES_STEPS

    arguments = TrainingArguments(
        str(folder / "trainer"),
        max_steps=TWO_LINES_STEPS,
        logging_steps=log_every,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        max_grad_norm=1.0,
        lr_scheduler_type="cosine",
    )
    trainer = InMemory(model, arguments, callbacks=[Clock()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return between(clocks)


def two_ranks(folder: Path) -> dict[str, Any]:
    """The figures of two processes, which rank 0 prints."""
    command = [sys.executable, __file__, str(folder)]
    code = f"import sys; from xctrain.launch import launch; sys.exit(launch({command!r}, {RANKS}))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def measure_rank(folder: Path) -> None:
    """One of two ranks: the loop against DDP."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    run = make_run(folder, micro_batch=GLOBAL_BATCH // RANKS)
    batches = [micro for micro, _ in run.loader.global_batches(0)]
    wrapped = DistributedDataParallel(run.engine.module)
    sides = compare(
        lambda: bare_times(run, batches, wrapped),
        lambda: loop_times(run, batches),
        lambda: bare_times(run, batches, wrapped, time.perf_counter),
        lambda: loop_times(run, batches, time.perf_counter),
    )
    if run.ranks.is_main:
        names = ("ddp_cpu", "loop_cpu", "ddp_wall", "loop_wall")
        figures = {f"two_ranks_{n}_ms": round(statistics.median(s), 2) for n, s in zip(names, sides, strict=True)}
        figures |= {"two_ranks_ratio": ratio(sides[1], sides[0]), "two_ranks_wall_ratio": ratio(sides[3], sides[2])}
    large = torch.nn.Sequential(*(torch.nn.Linear(1600, 1600) for _ in range(10)))
    figures_of_sum = sums(run, large, torch.randn(256, 1600))
    if run.ranks.is_main:
        print(json.dumps({**figures, **figures_of_sum}), flush=True)
    run.ranks.barrier()
    run.ranks.close()


def sums(run: Any, module: Any, batch: Any) -> dict[str, Any]:
    """Forward, backward and the sum of gradients over ranks, by the clock on the wall: with DDP, which adds up while the
    backward pass runs, and as here, after it.
    """
    from torch.nn.parallel import DistributedDataParallel

    from xctrain.parallel import Engine

    engine, wrapped = Engine(run.ranks, module, run.config), DistributedDataParallel(module)
    ddp_ms, ours_ms, shares = [], [], []
    for _ in range(BLOCKS):
        run.ranks.barrier()
        began = time.perf_counter()
        wrapped(batch).sum().backward()
        ddp_ms.append((time.perf_counter() - began) * 1e3)
        module.zero_grad()
        run.ranks.barrier()
        began = time.perf_counter()
        module(batch).sum().backward()
        computed = time.perf_counter()
        engine.reduce()
        ours_ms.append((time.perf_counter() - began) * 1e3)
        shares.append((time.perf_counter() - computed) * 1e3 / ours_ms[-1])
        module.zero_grad()
    return {
        "sum_100_mb_ratio_to_ddp": ratio(ours_ms, ddp_ms),
        "sum_100_mb_share": round(statistics.median(shares), 3),
        "sum_100_mb_ms": round(statistics.median(ours_ms), 1),
    }


class Prefetched:
    """Batches that are in memory already, in the place of a loader."""

    def __init__(self, batches: Sequence[Any], loader: Any) -> None:
        self.batches = batches
        self.stream = loader.stream
        self.micro_batch = loader.micro_batch

    def global_batches(self, start: int) -> Generator[tuple[Any, float], None, None]:
        yield from ((batch, 0.0) for batch in self.batches)


class NoSaver:
    """Saves nothing: what a save costs is another question."""

    pusher = None

    def due(self) -> bool:
        return False

    ended = due

    def copy(self, name: str, tensor: Any) -> Any:
        return tensor

    def begin(self, content: Any, began: float) -> None:
        pass

    def finish(self) -> None:
        pass


if __name__ == "__main__":
    main(sys.argv[1:])
