"""The training loop: one step is one global batch, one update or a stated reason and no update."""

import json
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from shards.hashing import slot_digest, text64
from xctrain import rng
from xctrain.checkpoint import Checkpoints, Content
from xctrain.collate import Batch
from xctrain.config import Config
from xctrain.errors import NotFiniteError, TrainError
from xctrain.loader import DAMAGED, SURPLUS, Loader
from xctrain.log import JsonLines
from xctrain.optim import learning_rate, set_learning_rate
from xctrain.ranks import Ranks
from xctrain.state import Masked, TrainState, due

_MAX_OVERFLOWS = 20  # halvings of the fp16 loss scale on one batch before it counts as not finite


@dataclass(frozen=True)
class Run:
    """The parts of a run on one rank, without methods."""

    config: Config
    ranks: Ranks
    model: nn.Module  # maps Batch to summed loss; wrapped for data-parallel training
    module: nn.Module  # the same, unwrapped
    optimizer: Any  # Accelerate's wrapper
    trainable: tuple[nn.Parameter, ...]
    loader: Loader
    num_steps: int
    end: int  # positions in the whole run
    checkpoints: Checkpoints
    log: JsonLines | None  # on rank 0
    keys: JsonLines | None  # on every rank, with train.log_keys
    world: dict[str, Any]
    model_id: str
    stop_asked: Callable[[], bool]
    evaluate: Callable[[TrainState], None] | None
    show: Callable[[TrainState, "StepMetrics"], None]


@dataclass(frozen=True)
class StepMetrics:
    """What one step gave. The same on every rank."""

    loss: float  # mean over the target tokens of the global batch
    grad_norm: float
    lr: float
    num_targets: int
    stop: bool  # some rank was asked to stop
    overflows: int = 0  # times the batch ran again at a lower fp16 scale


@dataclass(frozen=True)
class Consumed:
    """What a global batch held, over all ranks."""

    num_targets: int
    digest: int  # sum of slot_digest over the slots with loss
    samples: int  # slots without the surplus ones
    masked: tuple[Masked, ...]


def train(run: Run, state: TrainState) -> tuple[TrainState, bool]:
    """Step from ``state`` to the end. May be killed at any line and started again.

    Returns the last state and whether it stopped early because a signal asked for it; either way it is saved.
    """
    saved = state.samples_consumed
    began = time.perf_counter()
    for micro_batches, data_wait_s in run.loader.global_batches(start=state.samples_consumed):
        consumed = count_over_ranks(run, state, micro_batches)
        metrics = train_step(run, state, micro_batches, consumed)
        if metrics is None:
            state = skip_batch(run, state, micro_batches, consumed)
            continue
        state = state.advance(consumed.samples, consumed.digest, consumed.masked)  # the one line where progress moves
        log_step(run, state, micro_batches, metrics, time.perf_counter() - began, data_wait_s, consumed.samples)
        began = time.perf_counter()
        if run.evaluate and (due(state.step, run.config.eval.every) or state.samples_consumed == run.end):
            run.evaluate(state)
        if due(state.step, run.config.train.save_every) or metrics.stop:
            saved = save(run, state)
        if metrics.stop:
            return state, state.samples_consumed < run.end
    if saved != state.samples_consumed:
        save(run, state)
    return state, False


def train_step(run: Run, state: TrainState, micro_batches: Sequence[Batch], consumed: Consumed) -> StepMetrics | None:
    """One update from one global batch; None if loss or gradient are not finite and the policy is to skip.

    Raises:
        NotFiniteError: on every rank, before any update, if the policy is to raise.
    """
    lr = learning_rate(state.step, run.num_steps, run.config.optim)
    set_learning_rate(run.optimizer, lr)
    accelerator = run.ranks.accelerator
    for overflows in range(_MAX_OVERFLOWS + 1):
        losses = backward(run, micro_batches, consumed.num_targets)
        grad_norm = float(accelerator.clip_grad_norm_(run.trainable, run.config.optim.max_grad_norm))
        loss, stop = run.ranks.sum_floats([sum(losses), float(run.stop_asked())])
        overflow = accelerator.scaler is not None and np.isfinite(loss) and not np.isfinite(grad_norm)
        if not overflow or overflows == _MAX_OVERFLOWS:
            break
        run.optimizer.step()  # the scaler makes no update and lowers the scale; then the same batch runs again
        run.optimizer.zero_grad()
    if not np.isfinite(loss) or not np.isfinite(grad_norm):  # the same verdict on every rank: both are sums over ranks
        run.optimizer.zero_grad()
        refuse(run, state, micro_batches, losses, loss, grad_norm)
        return None
    run.optimizer.step()
    run.optimizer.zero_grad()
    return StepMetrics(loss, grad_norm, lr, consumed.num_targets, stop > 0, overflows)


def backward(run: Run, micro_batches: Sequence[Batch], num_targets: int) -> list[float]:
    """Gradients of the global batch's token mean; this rank's share of the loss, by micro-batch."""
    losses = []
    for i, batch in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        with nullcontext() if last else run.ranks.accelerator.no_sync(run.model):
            part = run.model(batch.to(run.ranks.accelerator.device)) / num_targets
            # DDP averages over the ranks; multiplying by their number undoes it.
            run.ranks.accelerator.backward(part * run.ranks.world_size)
        losses.append(part.detach())
    return [float(part) for part in losses]


def count_over_ranks(run: Run, state: TrainState, micro_batches: Sequence[Batch]) -> Consumed:
    """Targets, digest and masked slots of the global batch.

    Raises:
        TrainError: no slot has a target, or more samples are damaged than data.max_damaged allows.
    """
    slots = [
        (n, key, reason) for b in micro_batches for n, key, reason in zip(b.positions, b.keys, b.masked, strict=True)
    ]
    own = [Masked(n, key, reason) for n, key, reason in slots if reason and reason != SURPLUS]
    digest = sum(int(slot_digest(n, text64(key))) for n, key, reason in slots if not reason) % 2**64
    targets = sum(b.num_targets for b in micro_batches)
    surplus = sum(reason == SURPLUS for _, _, reason in slots)
    # The digest travels in halves, so that a sum over ranks cannot leave int64.
    num_targets, low, high, num_surplus, num_masked = run.ranks.sum_ints(
        [targets, digest % 2**32, digest >> 32, surplus, len(own)]
    )
    masked = tuple(sorted(run.ranks.gather(own), key=lambda m: m.n)) if num_masked else ()
    step = state.step + 1
    if masked:
        require_few_damaged(run, state, masked)
    if not num_targets:
        raise TrainError(
            f"step {step}: none of the {run.config.train.global_batch} samples has a target token "
            f"({num_masked} masked); look at it with `python -m xctrain batch {run.config.run.dir} --step {step}`",
            step=step,
            on_every_rank=True,
        )
    return Consumed(num_targets, (low + (high << 32)) % 2**64, run.config.train.global_batch - num_surplus, masked)


def require_few_damaged(run: Run, state: TrainState, masked: Sequence[Masked]) -> None:
    """Log damaged samples, and stop the run when there are more than ``data.max_damaged``."""
    if run.log:
        for entry in masked:
            run.log.write(event="masked", step=state.step, samples_consumed=entry.n, key=entry.key, reason=entry.reason)
    damaged = [m for m in (*state.masked, *masked) if m.reason.startswith(DAMAGED)]
    limit = run.config.data.max_damaged
    if len(damaged) > limit:
        raise TrainError(
            f"{run.config.data.shards}: {len(damaged)} samples are damaged, data.max_damaged is {limit}; the last is "
            f"{damaged[-1].key} ({damaged[-1].reason}); find them all with `python -m shards verify "
            f"{run.config.data.shards}` and build again",
            key=damaged[-1].key,
            on_every_rank=True,
        )


def refuse(
    run: Run, state: TrainState, micro_batches: Sequence[Batch], losses: Sequence[float], loss: float, grad_norm: float
) -> None:
    """Dump a batch that is not finite, then raise unless the policy is to skip it."""
    step = state.step + 1
    folder = run.config.run.dir / "not-finite" / f"step-{step:08d}-n{state.samples_consumed}"
    dump(folder, run.ranks.rank, micro_batches, losses)
    found = run.ranks.gather(
        [key for b, part in zip(micro_batches, losses, strict=True) if part != part for key in b.keys]
    )
    where = f"first of its micro-batch: {found[0]}" if found else "every micro-batch alone is finite"
    text = (
        f"step {step}: loss is {loss}, gradient norm is {grad_norm}; nothing was updated; {where}; the batch is in "
        f"{folder}, look at it with `python -m xctrain batch {run.config.run.dir} --step {step}`"
    )
    policy = run.config.train
    if policy.on_not_finite == "raise":
        raise NotFiniteError(
            f"{text}; lower optim.lr, or go on past it with train.on_not_finite=skip", step=step, on_every_rank=True
        )
    if state.skips_in_a_row + 1 > policy.max_skips:
        raise NotFiniteError(
            f"{text}; {state.skips_in_a_row} batches in a row were skipped, train.max_skips is {policy.max_skips}",
            step=step,
            on_every_rank=True,
        )


def dump(folder: Path, rank: int, micro_batches: Sequence[Batch], losses: Sequence[float]) -> None:
    """Write this rank's micro-batches with their losses, so that a bad one can be run again."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{i}.{name}": t.contiguous() for i, b in enumerate(micro_batches) for name, t in b.inputs.items()}
    tensors |= {f"{i}.labels": b.labels for i, b in enumerate(micro_batches)}
    save_file(tensors, folder / f"rank{rank}.safetensors")
    rows = [
        {"micro": i, "loss": repr(part), "n": b.positions, "keys": b.keys, "num_targets": b.num_targets}
        for i, (b, part) in enumerate(zip(micro_batches, losses, strict=True))
    ]
    (folder / f"rank{rank}.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")


def skip_batch(run: Run, state: TrainState, micro_batches: Sequence[Batch], consumed: Consumed) -> TrainState:
    """The state behind a batch that made no update: n moves on, step does not, its slots count as masked."""
    trained = [
        Masked(n, key, "not_finite")
        for b in micro_batches
        for n, key, reason in zip(b.positions, b.keys, b.masked, strict=True)
        if not reason
    ]
    masked = sorted((*run.ranks.gather(trained), *consumed.masked), key=lambda m: m.n)
    state = state.skip(consumed.samples, masked)
    if run.log:
        run.log.write(
            event="skip",
            step=state.step,
            samples_consumed=state.samples_consumed,
            reason="not_finite",
            keys=[m.key for m in masked],
        )
    return state


def log_step(
    run: Run,
    state: TrainState,
    micro_batches: Sequence[Batch],
    metrics: StepMetrics,
    step_s: float,
    data_wait_s: float,
    samples: int,
) -> None:
    """One line of metrics on rank 0, and of trained keys on every rank that logs them."""
    if run.keys:
        for i, batch in enumerate(micro_batches):
            slots = [s for s in zip(batch.positions, batch.keys, batch.masked, strict=True) if not s[2]]
            if slots:
                run.keys.write(
                    step=state.step,
                    samples_consumed=state.samples_consumed,
                    micro=i,
                    epoch=slots[0][0] // state.segments[-1].num_samples,
                    n=[n for n, _, _ in slots],
                    keys=[key for _, key, _ in slots],
                )
    if run.log:
        run.log.write(
            event="step",
            step=state.step,
            samples_consumed=state.samples_consumed,
            epoch=state.samples_consumed / state.segments[-1].num_samples,
            loss=metrics.loss,
            lr=metrics.lr,
            grad_norm=metrics.grad_norm,
            num_targets=metrics.num_targets,
            samples_per_s=samples / step_s,
            tokens_per_s=metrics.num_targets / step_s,
            step_s=step_s,
            data_wait_s=data_wait_s,
            max_memory_gb=max_memory_gb(),
            digest=f"{state.digest:016x}",
            **({"overflows": metrics.overflows} if metrics.overflows else {}),
        )
    run.show(state, metrics)


def max_memory_gb() -> float:
    """Most memory used so far: of the GPU, or of this process where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def save(run: Run, state: TrainState) -> int:
    """Checkpoint on rank 0, with the generators of all ranks; the position that is now safe.

    Raises:
        TrainError: on every rank, if rank 0 could not save.
    """
    generators = run.ranks.gather([rng.capture()])
    for log in (run.log, run.keys):
        if log:
            log.sync()
    run.ranks.barrier()  # what every rank trained on is durable before a checkpoint says so
    failure = None
    if run.ranks.is_main:
        began = time.perf_counter()
        try:
            path = run.checkpoints.save(_content(run, state, generators))
        except TrainError as error:
            failure = str(error)
        else:
            assert run.log
            run.log.write(
                event="save",
                step=state.step,
                samples_consumed=state.samples_consumed,
                path=path.name,
                save_s=time.perf_counter() - began,
            )
    failure = run.ranks.from_main(failure)
    if failure:
        raise TrainError(failure, step=state.step, on_every_rank=True)
    return state.samples_consumed


def _content(run: Run, state: TrainState, generators: Sequence[dict[str, Any]]) -> Content:
    scaler = run.ranks.accelerator.scaler
    return Content(
        state=state,
        module=run.module,
        optimizer=getattr(run.optimizer, "optimizer", run.optimizer),
        scaler=scaler.state_dict() if scaler else {},
        rng=generators,
        config_yaml=run.config.to_yaml(),
        world=run.world,
        model_id=run.model_id,
    )
