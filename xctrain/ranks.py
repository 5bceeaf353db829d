"""The processes of a run and what they tell each other. Accelerate underneath, asserted after set-up."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import broadcast_object_list, gather_object

from shards.errors import UserError
from xctrain.config import Config
from xctrain.errors import ConfigError, TrainError

T = TypeVar("T")

# What a launcher's own config file asks for, as `accelerate launch --config_file` passes it on.
_LAUNCHER_MODES = {"ACCELERATE_USE_FSDP": ("fsdp",), "ACCELERATE_USE_DEEPSPEED": ("zero1", "zero2", "zero3")}


@dataclass(frozen=True)
class Ranks:
    """This process among the others."""

    accelerator: Accelerator
    rank: int
    world_size: int
    local_world_size: int  # processes on this node

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which alone writes and prints."""
        return self.rank == 0

    @property
    def local_rank(self) -> int:
        """This rank's number on its node."""
        return int(self.accelerator.local_process_index)

    def sum_ints(self, values: Sequence[int]) -> list[int]:
        """Each value summed over the ranks; sums stay below 2**63."""
        return [int(v) for v in self._sum(values, torch.int64)]

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the ranks, in float64."""
        return [float(v) for v in self._sum(values, torch.float64)]

    def _sum(self, values: Sequence[float], dtype: torch.dtype) -> list[float]:
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=dtype, device=self.accelerator.device)
        dist.all_reduce(tensor)
        return list(tensor.tolist())

    def gather(self, values: list[Any]) -> list[Any]:
        """The lists of all ranks joined in rank order, on every rank."""
        return list(gather_object(values)) if self.world_size > 1 else values

    def from_main(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        return broadcast_object_list([value])[0] if self.world_size > 1 else value

    def agree(self, work: Callable[[], T]) -> T:
        """The result of ``work``, done on every rank; what fails on one of them is raised on all.

        Raises:
            TrainError: with the text and exit code of the first rank that failed.
        """
        result, failure = None, None
        try:
            result = work()
        except UserError as error:
            failure = (str(error), error.exit_code)
        if failures := [f for f in self.gather([failure]) if f]:
            shared = TrainError(failures[0][0], on_every_rank=True)
            shared.exit_code = failures[0][1]
            raise shared
        return cast(T, result)

    def barrier(self) -> None:
        """Wait for every rank."""
        self.accelerator.wait_for_everyone()

    def close(self) -> None:
        """Leave the process group; without this gloo can abort at exit after a success."""
        if dist.is_initialized():
            dist.destroy_process_group()


def lost_peer(error: RuntimeError) -> str | None:
    """How a collective noticed that another rank is gone or does not answer; None for any other error."""
    if not isinstance(error, dist.DistError) and "gloo" not in str(error):
        return None
    return str(error).splitlines()[0].partition("] ")[2].partition(". ")[0] or type(error).__name__


@contextmanager
def _met_or_named(timeout_s: int) -> Iterator[None]:
    """Say at which address the ranks did not meet; the library's error is a trace of C++."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        if "EADDRINUSE" in str(error):
            raise TrainError(
                f"rank 0 cannot listen at {place}, another process does; take another port with --master HOST:PORT"
            ) from error
        if not isinstance(error, dist.DistError):
            raise
        raise TrainError(
            f"rank {os.environ.get('RANK')}: the ranks did not meet at {place} within {timeout_s} s "
            f"({str(error).splitlines()[0]}); start every node, with the address of node 0 as --master, a port that its "
            "firewall lets through, and the same number of processes"
        ) from error


def join(config: Config) -> Ranks:
    """Set up devices and the process group, and require that they are what was asked.

    Raises:
        ConfigError: another world size, precision or device than asked for: Accelerate lowers each of them silently.
    """
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS refuses deterministic products
    use_gpu = torch.cuda.is_available()
    train = config.train
    if train.precision == "fp16" and not use_gpu:
        raise ConfigError("train.precision is fp16, there is no GPU; fp16 runs on GPUs only, use fp32 or bf16 here")
    if config.optim.name.startswith("paged") and not use_gpu:
        raise ConfigError(
            f"optim.name is {config.optim.name}, there is no GPU whose memory could be lent out; use "
            f"{config.optim.name.removeprefix('paged_')} here"
        )
    _require_same_mode(config.parallel.mode)
    with _met_or_named(train.timeout_s):
        accelerator = Accelerator(
            cpu=not use_gpu,
            mixed_precision="no" if train.precision == "fp32" else train.precision,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=train.timeout_s))],
        )
    asked = train.processes or int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != asked:
        raise ConfigError(
            f"{asked} processes were asked for, the launcher started {accelerator.num_processes}; start with `python -m "
            f"xctrain launch CONFIG --processes {asked}` or `torchrun --nproc_per_node {asked} -m xctrain train CONFIG`"
        )
    found = {"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)
    if found != train.precision:
        raise ConfigError(
            f"train.precision is {train.precision}, Accelerate set up {found}; unset ACCELERATE_MIXED_PRECISION"
        )
    return Ranks(
        accelerator=accelerator,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes)),
    )


def _require_same_mode(mode: str) -> None:
    """Require that a launcher which names a parallel mode names the config's.

    Raises:
        ConfigError: they differ.
    """
    asked = [modes for variable, modes in _LAUNCHER_MODES.items() if os.environ.get(variable) == "true"]
    if asked and mode not in asked[0]:
        raise ConfigError(
            f"parallel.mode is {mode}, the launcher's config file asks for {' or '.join(asked[0])}; set parallel.mode, or "
            "take a file of distributed_type MULTI_GPU"
        )
    for variable in _LAUNCHER_MODES:  # Accelerate would wrap the model a second time, in its own way
        os.environ.pop(variable, None)
