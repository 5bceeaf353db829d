"""DeepSpeed ZeRO: a part of the optimizer on each rank (zero1), and of the gradients (zero2), and of the weights (zero3).

Its engine is driven directly: Accelerate's wrapper makes the update within `backward`, before anyone could refuse it.
"""

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from xctrain import tensors
from xctrain.collate import Batch
from xctrain.config import Config
from xctrain.errors import ConfigError
from xctrain.parallel import Engine
from xctrain.ranks import Ranks
from xctrain.tensors import Copy, Snapshot, in_memory

_MEANS = ("exp_avg", "exp_avg_sq")  # the optimizer's tensors that are cut; its third, the step, is a number


class Zero(Engine):
    """A model in DeepSpeed's hands from the moment it has an optimizer; before that, every rank holds all of it."""

    recovers = False

    def __init__(self, ranks: Ranks, module: nn.Module, config: Config) -> None:
        super().__init__(ranks, module, config)
        self.deepspeed = import_deepspeed()
        self.mode = config.parallel.mode
        self.stage = int(self.mode.removeprefix("zero"))
        self.engine: Any = None

    def use_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Cut the optimizer's state, and what else the stage cuts."""
        settings = {
            "train_micro_batch_size_per_gpu": self.config.train.micro_batch,
            "gradient_accumulation_steps": 1,  # told by hand which backward is a step's last
            "gradient_clipping": self.config.optim.max_grad_norm,
            "zero_optimization": {"stage": self.stage},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 2**62,
        }
        with quiet():
            self.deepspeed.init_distributed(dist_backend=torch.distributed.get_backend())
            self.engine, self.optimizer, _, _ = self.deepspeed.initialize(
                model=self.module, optimizer=optimizer, config=settings, dist_init_required=False
            )
        # As AdamW itself begins, but for all groups of weights now: DeepSpeed links only those it finds at its first step.
        parts = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups")[self.stage < 3]
        for part in getattr(self.optimizer, parts):
            means = {name: torch.zeros_like(part) for name in _MEANS}
            self.optimizer.optimizer.state[part] = {"step": torch.tensor(0.0, device=part.device), **means}
        if self.stage < 3:
            self.optimizer._lazy_init_hp_params_optimizer_state()
        assert self.engine.zero_optimization_stage() == self.stage

    def accumulate(self, batches: Sequence[Batch], num_targets: int) -> list[Tensor]:
        """As in the other modes; the ranks add up their gradients within."""
        if self.engine is None:
            return super().accumulate(batches, num_targets)
        accelerator, parts = self.ranks.accelerator, []
        for i, batch in enumerate(batches):
            self.engine.set_gradient_accumulation_boundary(i == len(batches) - 1)
            with quiet():
                with accelerator.autocast():
                    part = self.engine(batch.to(accelerator.device)) / num_targets
                # DeepSpeed averages over the ranks; multiplying by their number undoes it.
                self.engine.backward(part * self.ranks.world_size)
            parts.append(part.detach())
        return parts

    def reduce(self) -> None:
        """Nothing is left to add up."""

    def clip(self, max_norm: float) -> float:
        """The gradient's global norm; ``update`` scales it down."""
        assert max_norm == self.engine.gradient_clipping()
        if self.stage < 3:
            norm = float(self.optimizer.scaled_global_norm())
        else:
            norm = sum(float(part) ** 2 for part in self.optimizer._get_norm_groups()) ** 0.5
            if any(float(part) < 0 for part in self.optimizer._get_norm_groups()):
                norm = -1.0
        return norm if norm >= 0 else float("nan")  # DeepSpeed's sign of a norm that is not finite

    def update(self) -> None:
        """One step of the optimizer, each rank updating its part."""
        with quiet():
            self.engine.step()
        assert not self.optimizer.overflow  # the norm was finite, and DeepSpeed updates by the same norm

    def drop(self) -> None:
        """Forget the gradients."""
        if self.engine is None:
            self.module.zero_grad()
            return
        self.optimizer.zero_grad(set_to_none=True)
        if self.stage < 3:
            self.optimizer.micro_step_id = -1
            for group in self.optimizer.averaged_gradients:
                self.optimizer.averaged_gradients[group] = None
                self.optimizer.all_grad_tensors[group] = None
        else:
            self.optimizer.averaged_gradients = {}

    def snapshot(self, copy: Copy = in_memory) -> Snapshot | None:
        """The trainable weights and the optimizer's state, whole, on rank 0, as ``copy`` gives them. All ranks take part."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        weights: dict[str, Tensor] = {}
        slots: dict[str, Tensor] = {}
        [step] = {float(state["step"]) for state in self.optimizer.optimizer.state.values()}
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                continue
            parts = [safe_get_full_fp32_param(parameter)]
            parts += [safe_get_full_optimizer_state(parameter, mean) for mean in _MEANS]
            if self.ranks.is_main:
                keys = [name, *(f"{mean}:{name}" for mean in _MEANS)]
                weights[name], *means = (copy(key, part) for key, part in zip(keys, parts, strict=True))
                slots |= {**dict(zip(keys[1:], means, strict=True)), f"step:{name}": torch.tensor(step)}
        groups = [{"lr": group["lr"], "params": []} for group in self.optimizer.param_groups]
        return Snapshot(weights, slots, {"state": {}, "groups": groups}) if self.ranks.is_main else None

    def load(self, checkpoint: Path) -> None:
        """Go on with the weights and the optimizer's state of a checkpoint, of whatever mode and number of ranks."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        shapes = {n: getattr(p, "ds_shape", p.shape) for n, p in self.module.named_parameters()}
        weights = tensors.read_weights(checkpoint, self.module, shapes)
        slots = tensors.read_slots(checkpoint)
        steps = {float(value) for key, value in slots.items() if key.startswith("step:")}
        for name, parameter in self.module.named_parameters():
            if name not in weights:
                continue
            values = {None: weights[name]} | {mean: slots[f"{mean}:{name}"] for mean in _MEANS if slots}
            if self.stage == 3:
                self._load_part(parameter, values)
                continue
            with torch.no_grad():
                parameter.copy_(weights[name])
            for mean, value in values.items():
                if mean is None:
                    safe_set_full_fp32_param(parameter, value.to(parameter.device))
                else:
                    safe_set_full_optimizer_state(parameter, value.to(parameter.device), mean)
        for state in self.optimizer.optimizer.state.values():
            [step] = steps or {0.0}
            state["step"].fill_(step)

    def _load_part(self, parameter: Any, values: "dict[str | None, Tensor]") -> None:
        """Set this rank's part of a weight and of its means; the last rank's part is padded."""
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        size = parameter.ds_tensor.numel()
        for mean, value in values.items():
            flat = value.flatten().to(parameter.ds_tensor.device)
            flat = nn.functional.pad(flat, (0, size * self.ranks.world_size - flat.numel()))
            part = flat[size * self.ranks.rank : size * (self.ranks.rank + 1)]
            if mean is None:
                safe_set_local_fp32_param(parameter, part)
                parameter.ds_tensor.data.copy_(part)
                if parameter.data.numel():  # small ones stay whole on every rank
                    parameter.data.copy_(value)
            else:
                safe_set_local_optimizer_state(parameter, part, mean)


@contextmanager
def quiet() -> Iterator[None]:
    """DeepSpeed's prints, and torch's warnings about names that it calls, are of no use to a user."""
    with warnings.catch_warnings(), redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        yield


def import_deepspeed() -> Any:
    """The library, without its warnings.

    Raises:
        ConfigError: it is not installed.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        with quiet():
            import deepspeed
    except ImportError as error:
        raise ConfigError(
            f"parallel.mode=zero1, zero2 and zero3 need DeepSpeed, which cannot be imported: {error}; install it with "
            "`pip install 'xctrain[deepspeed]'`, or use parallel.mode=fsdp, which cuts the same and needs nothing more"
        ) from error
    warnings.filterwarnings(
        "ignore", message=r".*torch\.distributed\.\w+_tensor` is deprecated", category=FutureWarning
    )
    # On CPUs it would compile, for minutes at first use, a faster way for processes of one machine to talk.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
