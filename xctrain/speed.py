"""How fast the steps are, and why they wait: what the log, the progress line and the trackers say of it."""

import os
import resource
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from xctrain.collate import Batch
from xctrain.config import Config
from xctrain.flops import Shape, Work, peak_flops, step_flops

WAIT_SHARE = 0.1  # of a step; a run that waits longer for data is told why
WINDOW = 50  # steps that are looked at together
_LEAST = 20  # steps before anything is said: the first ones also fill caches


@dataclass(frozen=True)
class Speed:
    """One step."""

    step_s: float
    data_wait_s: float  # mean over the ranks
    samples: int
    num_targets: int
    work: Work
    max_memory_gb: float
    mfu: float | None  # None where the device's peak, or what the model multiplies with, is not known
    read_s: float = 0.0  # of this rank's loader workers, for the step
    prepare_s: float = 0.0

    def as_event(self) -> dict[str, Any]:
        """As the step's log line has it."""
        text = self.work.tokens - self.work.image_tokens
        return {
            "samples_per_s": self.samples / self.step_s,
            "tokens_per_s": self.num_targets / self.step_s,
            **(
                {"text_tokens_per_s": text / self.step_s, "image_tokens_per_s": self.work.image_tokens / self.step_s}
                if self.work.tokens
                else {}
            ),
            "step_s": self.step_s,
            "data_wait_s": self.data_wait_s,
            "max_memory_gb": self.max_memory_gb,
            **({} if self.mfu is None else {"mfu": self.mfu}),
        }


def utilisation(config: Config, shape: Shape | None, world_size: int) -> Callable[[Work, int, float], float | None]:
    """Says of a step's (work, target tokens, seconds) which share of the GPUs' products it used."""
    half = config.train.precision != "fp32" or config.model.dtype != "float32"
    peak = peak_flops(torch.cuda.get_device_name(), half=half) if torch.cuda.is_available() else None

    def share(work: Work, num_targets: int, step_s: float) -> float | None:
        if peak is None or shape is None:
            return None
        return step_flops(shape, work, num_targets) / (step_s * peak * world_size)

    return share


def worker_seconds(batches: Sequence[Batch]) -> tuple[float, float]:
    """What reading, and decoding with laying out, took this rank's loader workers for these micro-batches."""
    return sum(b.read_s for b in batches), sum(b.prepare_s for b in batches)


def max_memory_gb() -> float:
    """Most memory used so far: of the GPU, or of this process where there is none."""
    if torch.cuda.is_initialized():  # is_available asks the driver each time
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


class Speedometer:
    """The steps of the last moment together."""

    def __init__(self, num_workers: int, local_world_size: int) -> None:
        self._speeds: deque[Speed] = deque(maxlen=WINDOW)
        self._num_steps = 0
        self._workers, self._processes = num_workers, local_world_size
        self._said = False

    def add(self, speed: Speed) -> None:
        """Count a step."""
        self._num_steps += 1
        if self._num_steps > 1:  # the first one waits until the workers have come up
            self._speeds.append(speed)

    def line(self, steps_left: int) -> str:
        """What a person wants to know, in one line; empty before there is anything to say."""
        if not self._speeds:
            return ""
        seconds = sum(s.step_s for s in self._speeds)
        text = sum(s.work.tokens - s.work.image_tokens for s in self._speeds) / seconds
        image = sum(s.work.image_tokens for s in self._speeds) / seconds
        parts = [f"{sum(s.samples for s in self._speeds) / seconds:.3g} samples/s"]
        if text or image:
            parts.append(f"{_thousands(text)} text and {_thousands(image)} image tokens/s")
        parts += [f"{self.step_s:.3g} s a step", f"{self.wait_share:.0%} waiting for data"]
        parts.append(f"{self._speeds[-1].max_memory_gb:.3g} GB")
        if used := [s.mfu for s in self._speeds if s.mfu is not None]:
            parts.append(f"MFU {statistics.mean(used):.0%}")
        return ", ".join([*parts, f"{duration(steps_left * self.step_s)} left"])

    @property
    def step_s(self) -> float:
        """Seconds a step, in the mean."""
        return statistics.mean(s.step_s for s in self._speeds) if self._speeds else 0.0

    @property
    def wait_share(self) -> float:
        """Part of the time that was spent waiting for data."""
        seconds = sum(s.step_s for s in self._speeds)
        return sum(s.data_wait_s for s in self._speeds) / seconds if seconds else 0.0

    def warning(self) -> str | None:
        """Why the run waits for data, if it does so for more than a tenth of its time; said once."""
        if self._said or len(self._speeds) < _LEAST or self.wait_share <= WAIT_SHARE:
            return None
        self._said = True
        samples = sum(s.samples for s in self._speeds) or 1
        read, prepare = sum(s.read_s for s in self._speeds), sum(s.prepare_s for s in self._speeds)
        return f"{self.wait_share:.0%} of the time goes by waiting for data: {self._reason(read, prepare, samples)}"

    def _reason(self, read_s: float, prepare_s: float, samples: int) -> str:
        per_sample = f"{1000 * (read_s + prepare_s) * self._processes / samples:.3g} ms of a worker a sample"
        if read_s > prepare_s:
            return (
                f"reading takes {read_s / (read_s + prepare_s):.0%} of {per_sample}; put the shards on a faster disk, or raise "
                "data.prefetch and data.workers so that more is read at once"
            )
        cpus = len(os.sched_getaffinity(0))
        busy = max(1, self._workers) * self._processes
        how = (
            f"raise data.workers ({self._workers} for each of {self._processes} processes here, {cpus} CPUs)"
            if busy < cpus
            else f"all {cpus} CPUs have a worker already: model.decode=fast or scaled takes less, smaller pictures too "
            "(filters.max_side_px of the build)"
        )
        return f"decoding and laying out take {prepare_s / (read_s + prepare_s or 1):.0%} of {per_sample}; {how}"


def duration(seconds: float) -> str:
    """A time as people say it: 42 s, 12 min, 3 h 05 min, 2 d 4 h."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def _thousands(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
