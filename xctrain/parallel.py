"""How the ranks share one model: a copy each (ddp), or a part each (fsdp). What differs between the modes is here.

FSDP2 is torch's own `fully_shard`: Accelerate would leave it out on a CPU without a word, so no test would see it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from xctrain import tensors
from xctrain.collate import Batch
from xctrain.config import Config
from xctrain.errors import ConfigError
from xctrain.memory import layers
from xctrain.ranks import Ranks
from xctrain.tensors import Copy, Snapshot, in_memory

_BUCKET_BYTES = 64 * 2**20  # of gradients that are added up over the ranks at once


class Engine:
    """A model, its optimizer and its gradients on one rank. This one holds all of each (ddp, or one process)."""

    mode = "ddp"
    recovers = True  # from running out of memory: no rank waits for another before all have their gradients

    def __init__(self, ranks: Ranks, module: nn.Module, config: Config) -> None:
        self.ranks = ranks
        self.module = module
        self.config = config
        self.optimizer: Any = None

    @classmethod
    def wrap(cls, ranks: Ranks, module: nn.Module, config: Config) -> "Engine":
        """The model on this rank's device, shared in the mode of the config."""
        if config.train.compile:
            compile_layers(module)
        return cls(ranks, module.to(ranks.accelerator.device), config)

    def use_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Update by ``optimizer``, which holds the trainable weights as they are now."""
        self.optimizer = optimizer  # bare: Accelerate's wrapper looks for packages on the disk in each of its steps

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The weights that train, or this rank's parts of them."""
        return [p for p in self.module.parameters() if p.requires_grad]

    def accumulate(self, batches: Sequence[Batch], num_targets: int) -> list[Tensor]:
        """Add the gradients of this rank's micro-batches; their shares of the global batch's token mean."""
        return [self._backward(batch, num_targets, 1) for batch in batches]

    def _backward(self, batch: Batch, num_targets: int, factor: int) -> Tensor:
        accelerator = self.ranks.accelerator
        with accelerator.autocast() if accelerator.native_amp else nullcontext():
            part: Tensor = self.module(batch.to(accelerator.device)) / num_targets
        loss = part if factor == 1 else part * factor
        (loss if accelerator.scaler is None else accelerator.scaler.scale(loss)).backward()
        return part.detach()

    def reduce(self) -> None:
        """Add up the gradients of all ranks, in the order of the parameters: the same bits at every start.

        After all ranks have theirs, not while they come: a rank that ran out of memory can still say so.
        """
        if self.ranks.world_size == 1:
            return
        for bucket in _buckets(self.trainable):
            for parameter in bucket:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            grads = [p.grad for p in bucket if p.grad is not None]
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            dist.all_reduce(flat)
            torch._foreach_copy_(grads, [part.view_as(g) for part, g in zip(_cut(flat, grads), grads, strict=True)])

    def clip(self, max_norm: float) -> float:
        """Scale the gradient down to ``max_norm``; its global norm before, the same on every rank."""
        scaler = self.ranks.accelerator.scaler
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        return float(nn.utils.clip_grad_norm_(self.trainable, max_norm))

    def update(self) -> None:
        """One step of the optimizer, or none where the fp16 scaler found an overflow; gradients are gone."""
        scaler = self.ranks.accelerator.scaler
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        self.optimizer.zero_grad()

    def drop(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad()
        scaler = self.ranks.accelerator.scaler
        if scaler is not None:
            scaler.update(scaler.get_scale())  # keep the scale, forget that it was divided out

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, every rank has all weights and may use them without the others; nothing is compiled."""
        with torch.compiler.set_stance("force_eager") if self.config.train.compile else nullcontext():
            yield

    def snapshot(self, copy: Copy = in_memory) -> Snapshot | None:
        """The trainable weights and the optimizer's state, whole, on rank 0, as ``copy`` gives them. All ranks take part."""
        return tensors.snapshot(self.module, self.optimizer, copy, keep=self.ranks.is_main)

    def load(self, checkpoint: Path) -> None:
        """Go on with the weights and the optimizer's state of a checkpoint, of whatever mode and number of ranks."""
        tensors.load_weights(checkpoint, self.module, every_trainable=True)
        tensors.load_optimizer(checkpoint, self.module, self.optimizer)


def compile_layers(module: nn.Module) -> None:
    """Have each repeated layer compiled when it is first called, for all lengths at once.

    Raises:
        ConfigError: the model has none.
    """
    found = layers(module)
    if not found:
        raise ConfigError(
            f"train.compile is true, {type(module).__name__} has no list of repeated layers to compile; use train.compile=false"
        )
    for layer in found:
        layer.compile(dynamic=True)  # else what is compiled would depend on which lengths came first


class Sharded(Engine):
    """FSDP2: of each weight, gradient and mean a part a rank. A layer is whole on a rank only while it computes."""

    mode = "fsdp"
    recovers = False

    @classmethod
    def wrap(cls, ranks: Ranks, module: nn.Module, config: Config) -> "Engine":
        """The model cut over the ranks, a layer at a time, so that none needs memory for the whole of it."""
        types = {p.dtype for p in module.parameters() if p.requires_grad}
        if len(types) > 1:
            found = " and ".join(sorted(str(t).removeprefix("torch.") for t in types))
            raise ConfigError(
                f"parallel.mode is fsdp, which wants one type of what trains, found {found}; use model.dtype=float32, or "
                "leave adapter.train_also empty, or use parallel.mode=ddp"
            )
        mesh = dist.device_mesh.init_device_mesh(ranks.accelerator.device.type, (ranks.world_size,))
        short = torch.bfloat16 if config.train.precision == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=short, reduce_dtype=torch.float32)
        for layer in layers(module):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        return cls(ranks, module, config)

    def accumulate(self, batches: Sequence[Batch], num_targets: int) -> list[Tensor]:
        """As above; the ranks add up their gradients layer by layer, each keeping its part alone."""
        # FSDP averages over the ranks; multiplying by their number undoes it.
        return [self._backward(batch, num_targets, self.ranks.world_size) for batch in batches]

    def reduce(self) -> None:
        """Nothing is left to add up."""

    def clip(self, max_norm: float) -> float:
        """As above, of the parts of all ranks together."""
        norm = nn.utils.clip_grad_norm_(self.trainable, max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Every weight stays whole, in the type it computes in: captions differ in length, and ranks could not wait
        for each other layer by layer.

        FSDP remembers every forward until a backward pass, to fetch ahead in that order. Those in here differ between ranks
        and have no backward pass; ranks that remembered them would fetch different layers in the next step, and wait for
        each other for ever. It has no public way to forget.
        """
        parts = [m for m in self.module.modules() if isinstance(m, FSDPModule)]
        for part in parts:
            part.unshard()
            part.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for part in parts:
                part.reshard()
                part.set_reshard_after_forward(part is not self.module, recurse=False)
                state = part._get_fsdp_state()
                state._comm_ctx.post_forward_order.clear()
                for group in state._fsdp_param_groups:
                    group._post_forward_indices.clear()


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Neighbours of one type, as many as fit in a bucket."""
    bucket: list[nn.Parameter] = []
    num_bytes = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        if bucket and (num_bytes + size > _BUCKET_BYTES or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(parameter)
        num_bytes += size
    if bucket:
        yield bucket


def _cut(flat: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    return flat.split([tensor.numel() for tensor in like])
