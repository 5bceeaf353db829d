"""What a run does before its first step, so that a broken set-up fails in the first minute: the model is shared over the
ranks, runs the largest samples, and writes one caption.
"""

import os
import shutil
import sys
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shards.joined import SampleReader
from shards.stream import accumulation
from xctrain.collate import Batch
from xctrain.config import Config
from xctrain.errors import ConfigError, TrainError
from xctrain.largest import Length, rows_of
from xctrain.memory import is_out_of_memory
from xctrain.optim import make_optimizer
from xctrain.parallel import Engine, Sharded
from xctrain.phase import enter
from xctrain.ranks import Ranks

if TYPE_CHECKING:
    from xctrain.models import Family

_COMPILE_S = 1800  # that compiling may take beside what a stuck run is given


def dry_step(config: Config, ranks: Ranks, family: "Family", largest: list[Length], reader: SampleReader) -> Engine:
    """The model shared over the ranks, after a step without an update on a micro-batch of the largest samples.

    Raises:
        TrainError: there is not enough memory for them; names the largest.
        ConfigError: the layers cannot be compiled here.
    """
    if config.train.compile:
        require_compiler(ranks.accelerator.device.type)
    batch = family.collator(rows_of(largest, reader, config)).to(ranks.accelerator.device)
    family.module.train()
    try:
        return settle(ranks, family.module, batch, config)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise out_of_memory(config, largest[0]) from error
        if config.train.compile and isinstance(error, torch._dynamo.exc.TorchDynamoException):
            raise ConfigError(
                f"train.compile is true, the layers of this model cannot be compiled: {str(error).strip().splitlines()[0]}; "
                "use train.compile=false"
            ) from error
        raise


def require_compiler(device: str) -> None:
    """Require what torch.compile calls: a C++ compiler, for GPUs triton and a C compiler.

    Raises:
        ConfigError: one is missing.
    """
    names = ("CXX", "g++") if device == "cpu" else ("CC", "gcc")
    compiler = os.environ.get(*names)
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"train.compile is true, there is no compiler {compiler}, which torch.compile calls; install it (apt-get install "
            f"g++), name another in {names[0]}, or use train.compile=false"
        )
    if device != "cpu" and not torch.utils._triton.has_triton():
        raise ConfigError(
            "train.compile is true, triton is missing, which torch.compile needs on GPUs; run `make install` again, or use "
            "train.compile=false"
        )


def share(ranks: Ranks, module: nn.Module, config: Config) -> Engine:
    """The model shared over the ranks as ``parallel.mode`` says, and in no other way: asserted."""
    mode = config.parallel.mode
    kinds: dict[str, type[Engine]] = {"ddp": Engine, "fsdp": Sharded}
    if mode not in kinds:
        from xctrain.zero import Zero  # needs an optional library

        kinds[mode] = Zero
    engine = kinds[mode].wrap(ranks, module, config)
    parameters = list(module.parameters())
    assert engine.mode == mode
    if mode != "fsdp":  # nothing is sent at the start: every rank has read, or made, the same
        sums = ranks.gather([float(sum(p.detach().sum(dtype=torch.float64) for p in parameters))])
        if len(set(sums)) > 1:
            raise TrainError(
                f"the ranks hold different weights before the first step (their sums are {', '.join(map(str, sums))}); see "
                "that model.path is the same model on every node",
                on_every_rank=True,
            )
    assert sum(isinstance(p, DTensor) for p in parameters) == (len(parameters) if mode == "fsdp" else 0)
    return engine


def settle(ranks: Ranks, module: nn.Module, batch: Batch, config: Config) -> Engine:
    """Share the model over the ranks, and run one micro-batch, the same at every start, without an update.

    It freezes parameters that never get a gradient, and fills memory in the first minute rather than the last, if the
    batch is the largest there is.
    """
    compiled = ", which compiles the layers" if config.train.compile else ""
    enter(f"dry step on the largest samples{compiled}", _COMPILE_S if compiled else 0)
    if compiled and ranks.is_main:
        print("compiling the model's repeated layers (train.compile), which may take minutes", file=sys.stderr)
    engine = share(ranks, module, config)
    engine.accumulate([batch], 1)
    unused = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
    for name in unused:
        module.get_parameter(name).requires_grad_(False)
    if unused and ranks.is_main:
        print(f"frozen, as they never get a gradient: {', '.join(sorted(unused))}", file=sys.stderr)
    # The optimizer's two means of each parameter, which a run has from its second step on; some take theirs at once.
    means = [torch.empty_like(p) for p in engine.trainable for _ in range(2)] if config.optim.name == "adamw" else []
    engine.use_optimizer(make_optimizer(module.parameters(), config.optim))
    if accumulation(config.train.global_batch, ranks.world_size, config.train.micro_batch) == 1:
        engine.drop()  # else gradients are there when the second one begins
    engine.accumulate([batch], 1)
    engine.drop()
    del means
    return engine


def out_of_memory(config: Config, largest: Length) -> TrainError:
    """The error of a run whose dry step found no memory."""
    model = config.model
    ways = [f"train.micro_batch ({config.train.micro_batch})"]
    if model.family == "xcomposer":
        ways.append(f"model.hd_num ({model.hd_num})")
    more = "" if model.gradient_checkpointing else ", or set model.gradient_checkpointing=true"
    return TrainError(
        f"{largest.key}: out of memory in a dry step on the largest samples, this one has {largest.tokens} tokens; lower "
        f"{' or '.join(ways)}{more}; a model.max_length below {largest.tokens} counts the samples that a build without "
        "them must leave out; `python -m xctrain plan` says what takes how much",
        key=largest.key,
    )


def first_caption(
    config: Config, ranks: Ranks, engine: Engine, family: "Family", sample: Length, reader: SampleReader
) -> None:
    """Print what the model says of one picture before it trains; or why that is not tried."""
    mode = config.parallel.mode
    if mode == "zero3" or (mode == "fsdp" and config.eval.every is None):
        why = "its ranks wait for each other in every forward" if mode == "zero3" else "weights may not fit whole"
        if ranks.is_main:
            print(
                f"no caption is written before training with parallel.mode={mode}, as {why}; try one with `python -m xctrain "
                f"caption {config.run.dir} IMAGE` after the first checkpoint",
                file=sys.stderr,
            )
        return
    enter("writing a caption before training")
    with engine.whole():
        if ranks.is_main:
            [row] = rows_of([sample], reader, config, count=1)
            [text] = family.generate([row.image], config.eval.max_new_tokens)
            # An untrained model says control characters too.
            said = "".join(c if c.isprintable() else " " for c in text).strip()
            print(f"{sample.key}: before this start trains, the model says: {said or '(nothing)'}", file=sys.stderr)
