"""Where a run runs: machine, processes and versions, which decide the last bits of its numbers."""

import platform
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from xctrain import checkpoint
from xctrain.config import Config
from xctrain.resume import ResumePoint

if TYPE_CHECKING:
    from xctrain.ranks import Ranks


def describe_world(config: Config, ranks: "Ranks") -> dict[str, Any]:
    """Where the run runs; goes into every checkpoint."""
    import torch

    return {
        "world_size": ranks.world_size,
        "threads": torch.get_num_threads(),
        "micro_batch": config.train.micro_batch,
        "device": gpu_name() or "cpu",
        "precision": config.train.precision,
        "versions": versions(),
    }


def say_differences(point: ResumePoint, world: dict[str, Any]) -> None:
    """Say what may change the last bits of the numbers, though not the samples."""
    saved = point.position["world"]
    for name in ("world_size", "threads", "micro_batch", "device", "versions"):
        if saved[name] != world[name]:
            print(
                f"{checkpoint.label(point.path)}: saved with {name} {saved[name]}, this start has {world[name]}",
                file=sys.stderr,
            )


def versions() -> dict[str, str]:
    """Versions of what decides the numbers."""
    names = (
        "torch",
        "accelerate",
        "transformers",
        "peft",
        "bitsandbytes",
        "sentencepiece",
        "numpy",
        "Pillow",
        "xctrain",
    )
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def gpu_name() -> str | None:
    """The kind of GPU that this rank has, None without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
