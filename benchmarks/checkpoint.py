"""How long does an asynchronous save of a full fine-tune hold up the loop, and what does it cost the steps meanwhile?

    python benchmarks/checkpoint.py [--parameters MILLIONS] [--folder DIR]

200 M float32 parameters and their AdamW means (2.4 GB), one process, real files in DIR (a temporary folder of this one
unless given). One JSON line, for the first save and for one after it: seconds that the loop was blocked inside `save`,
seconds from its start to the checkpoint being renamed and the older one gone, and the share; then the median and the longest
step of a small other model while nothing is written and while a save is under way.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

WIDTH = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=200, metavar="MILLIONS")
    parser.add_argument("--folder", type=Path, default=Path())
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        print(json.dumps(measure(Path(folder), arguments.parameters)))


def measure(folder: Path, millions: int) -> dict[str, Any]:
    """Two saves by the loop's own function."""
    import torch
    from torch import nn

    from xctrain import loop
    from xctrain.state import Segment, TrainState

    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(-(-millions * 10**6 // WIDTH**2))))
    run = run_of(module, folder)
    segment = Segment(0, 0, 0, 100, 12, "abc", "train", seed=7, fragment=16, window=64, lanes=4)
    small = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    inputs = torch.ones(256, 512)

    def step() -> float:
        began = time.perf_counter()
        small(inputs).sum().backward()
        return time.perf_counter() - began

    idle, busy = [step() for _ in range(200)], []
    for number in (1, 2):
        loop.save(run, TrainState(step=number, samples_consumed=12 * number, segments=(segment,)))
        while not run.saver.ended():
            busy.append(step())
        loop.finish_save(run)
    first, following = (saved(json.loads(line)) for line in (folder / "log").read_text().splitlines())
    files = (folder / "checkpoints").rglob("*.safetensors")
    return {
        "benchmark": "checkpoint",
        "parameters": sum(p.numel() for p in module.parameters()),
        "gb": round(sum(path.stat().st_size for path in files) / 1e9, 2),
        "first_save": first,
        "next_save": following,
        "step_ms_idle": figures(idle),
        "step_ms_while_saving": figures(busy),
        **machine(),
    }


def run_of(module: Any, folder: Path) -> Any:
    """A run after one update of the module, with no more parts than saving needs."""
    import torch

    from xctrain import tensors
    from xctrain.checkpoint import Checkpoints
    from xctrain.config import Config
    from xctrain.log import JsonLines
    from xctrain.optim import make_optimizer
    from xctrain.parallel import Engine
    from xctrain.ranks import join
    from xctrain.run import Run
    from xctrain.saver import Saver

    config = Config.model_validate({"train": {"num_steps": 9}, "run": {"dir": folder}})
    ranks = join(config)
    engine = Engine.wrap(ranks, module, config)
    engine.use_optimizer(make_optimizer(module.parameters(), config.optim))
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    engine.update()
    saver = Saver(Checkpoints(folder / "checkpoints", keep=1), asynchronous=True)
    saver.prepare(tensors.shapes(module, ("exp_avg", "exp_avg_sq")))
    parts: dict[str, Any] = dict.fromkeys(Run.__dataclass_fields__)
    parts |= {"config": config, "ranks": ranks, "engine": engine, "saver": saver, "world": {}}
    return Run(**{**parts, "log": JsonLines(folder / "log")})


def saved(event: dict[str, Any]) -> dict[str, float]:
    """What a save took, from its line in the log."""
    share = round(event["blocked_s"] / event["save_s"], 4)
    return {**{name: round(event[name], 3) for name in ("blocked_s", "save_s")}, "share": share}


def machine() -> dict[str, Any]:
    """Versions and hardware."""
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "safetensors": version("safetensors"),
        "cpus": len(os.sched_getaffinity(0)),
        "processor": platform.processor() or platform.machine(),
    }


def figures(seconds: list[float]) -> dict[str, float]:
    """Median and longest, in milliseconds."""
    return {"median": round(statistics.median(seconds) * 1e3, 2), "longest": round(max(seconds) * 1e3, 2)}


if __name__ == "__main__":
    main()
