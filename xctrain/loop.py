"""The training loop: one step is one global batch, one update or a stated reason and no update."""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from shards.hashing import mix64, text64
from xctrain import rng
from xctrain.badbatch import accumulate, refuse, require_usable, skip_batch, with_smaller_micro_batches
from xctrain.best import Scores
from xctrain.checkpoint import Content
from xctrain.collate import Batch
from xctrain.errors import TrainError
from xctrain.flops import Work
from xctrain.loader import SURPLUS
from xctrain.optim import learning_rate, set_learning_rate
from xctrain.phase import enter
from xctrain.push import logs_of
from xctrain.run import Consumed, OutOfMemory, Run, StepMetrics
from xctrain.speed import Speed, max_memory_gb, worker_seconds
from xctrain.state import Masked, TrainState, due
from xctrain.tensors import Snapshot

_MAX_OVERFLOWS = 20  # halvings of the fp16 loss scale on one batch before it counts as not finite


def train(run: Run, state: TrainState) -> tuple[TrainState, bool]:
    """Step from ``state`` to the end. May be killed at any line and started again.

    Returns the last state and whether it stopped early because a signal asked for it; either way it is saved, but for a
    run that has not made a step.
    """
    if look(run, state):  # what is due before the first step, or was left by an earlier start
        finish_save(run)
        return state, True
    return _step_on(run, state)


def _step_on(run: Run, state: TrainState) -> tuple[TrainState, bool]:
    saved, stopped = state.samples_consumed, False
    began = time.perf_counter()
    batches = run.loader.global_batches(start=state.samples_consumed)
    for micro_batches, data_wait_s in batches:
        enter(f"step {state.step + 1}")
        consumed = count_over_ranks(run, micro_batches, data_wait_s)
        require_usable(run, state, consumed)
        metrics = train_step(run, state, micro_batches, consumed)
        if isinstance(metrics, OutOfMemory):
            batches.close()
            return _step_on(with_smaller_micro_batches(run, state, metrics), state)
        if metrics is None:
            state = skip_batch(run, state, micro_batches, consumed)
            continue
        state = state.advance(consumed.samples, consumed.digest, consumed.masked)  # the one line where progress moves
        log_step(run, state, micro_batches, metrics, consumed, time.perf_counter() - began)
        at_end = state.samples_consumed == run.end
        if due(state.step, run.config.train.save_every) or metrics.save or metrics.stop or at_end:
            saved = save(run, state)  # before anything is scored, which may take long
        elif metrics.saved:
            finish_save(run)
        stopped = (metrics.stop and not at_end) or look(run, state)
        if stopped:
            break
        began = time.perf_counter()  # scoring and saving are no part of a step
    if saved != state.samples_consumed:
        save(run, state)
    finish_save(run)
    return state, stopped


def look(run: Run, state: TrainState) -> bool:
    """Score and caption held-out pictures where that is due and not done yet, and save what is the best so far.

    Returns whether a signal asked to stop meanwhile; what is left is for the next start.
    """
    at_edge = state.samples_consumed in (0, run.end)
    if run.evaluate and (at_edge or due(state.step, run.config.eval.every)):
        scores = run.evaluate(state)
        if scores is None:
            return True
        if state.step and improves(run, state, scores):
            save(run, state, scores)
    if run.sample and (at_edge or due(state.step, run.config.watch.captions_every)):
        return not run.sample(state)
    return False


def train_step(
    run: Run, state: TrainState, micro_batches: Sequence[Batch], consumed: Consumed
) -> StepMetrics | OutOfMemory | None:
    """One update from one global batch; none if memory ran out on a rank; None if loss or gradient are not finite and
    the policy is to skip.

    Raises:
        NotFiniteError: on every rank, before any update, if the policy is to raise.
    """
    lr = learning_rate(state.step, run.num_steps, run.config.optim)
    engine, scaler = run.engine, run.ranks.accelerator.scaler
    set_learning_rate(engine.optimizer, lr)
    for overflows in range(_MAX_OVERFLOWS + 1):
        losses, too_large = accumulate(run, micro_batches, consumed.num_targets)
        asked = [run.stop_asked(), run.saver.due(), run.saver.ended(), too_large is not None]
        loss, stop, save_due, saved, out_of_memory = run.ranks.sum_floats([sum(losses), *asked])
        if out_of_memory:  # the same verdict on every rank, before the ranks wait for each other's gradients
            engine.drop()
            return next(filter(None, run.ranks.gather([too_large])))
        engine.reduce()
        grad_norm = engine.clip(run.config.optim.max_grad_norm)
        overflow = scaler is not None and np.isfinite(loss) and not np.isfinite(grad_norm)
        if not overflow or overflows == _MAX_OVERFLOWS:
            break
        engine.update()  # the scaler makes no update and lowers the scale; then the same batch runs again
    if not np.isfinite(loss) or not np.isfinite(grad_norm):  # the same verdict on every rank: both are sums over ranks
        engine.drop()
        refuse(run, state, micro_batches, losses, loss, grad_norm)
        return None
    engine.update()
    return StepMetrics(loss, grad_norm, lr, consumed.num_targets, overflows, stop > 0, save_due > 0, saved > 0)


def count_over_ranks(run: Run, micro_batches: Sequence[Batch], data_wait_s: float) -> Consumed:
    """Targets, digest, masked slots and work of the global batch, and how long its ranks waited for it."""
    slots = [
        (n, key, reason) for b in micro_batches for n, key, reason in zip(b.positions, b.keys, b.masked, strict=True)
    ]
    own = [(Masked(n, key, why), run.ranks.rank) for n, key, why in slots if why and why != SURPLUS]
    # The sum of slot_digest, which is for many slots: of a step's few, arrays would take five times as long.
    digest = sum(mix64(n, text64(key)) for n, key, reason in slots if not reason) % 2**64
    targets = sum(b.num_targets for b in micro_batches)
    surplus = sum(reason == SURPLUS for _, _, reason in slots)
    # The digest travels in halves, so that a sum over ranks cannot leave int64.
    work = sum((b.work for b in micro_batches), Work())
    num_targets, low, high, num_surplus, num_masked, waited_us, *worked = run.ranks.sum_ints(
        [targets, digest % 2**32, digest >> 32, surplus, len(own), round(data_wait_s * 1e6), *work]
    )
    gathered = sorted(run.ranks.gather(own), key=lambda found: found[0].n) if num_masked else []
    return Consumed(
        num_targets,
        digest=(low + (high << 32)) % 2**64,
        samples=run.config.train.global_batch - num_surplus,
        masked=tuple(entry for entry, _ in gathered),
        masked_on=tuple(rank for _, rank in gathered),
        work=Work(*worked),
        data_wait_s=waited_us / 1e6 / run.ranks.world_size,
    )


def log_step(
    run: Run,
    state: TrainState,
    micro_batches: Sequence[Batch],
    metrics: StepMetrics,
    consumed: Consumed,
    step_s: float,
) -> None:
    """One line of metrics on rank 0, and of trained keys on every rank that logs them."""
    if run.keys:
        for i, batch in enumerate(micro_batches):
            slots = [(n, k) for n, k, why in zip(batch.positions, batch.keys, batch.masked, strict=True) if not why]
            epochs = {n: state.segment_at(n).epoch_at(n) for n, _ in slots}
            for epoch in sorted({*epochs.values()}):  # two where a micro-batch straddles the seam
                inside = [(n, key) for n, key in slots if epochs[n] == epoch]
                run.keys.write(
                    step=state.step,
                    samples_consumed=state.samples_consumed,
                    micro=i,
                    epoch=epoch,
                    n=[n for n, _ in inside],
                    keys=[key for _, key in inside],
                )
    speed = Speed(
        step_s,
        consumed.data_wait_s,
        consumed.samples,
        consumed.num_targets,
        consumed.work,
        max_memory_gb(),
        run.utilisation(consumed.work, consumed.num_targets, step_s),
        *worker_seconds(micro_batches),
    )
    if run.log:
        run.log.write(
            event="step",
            step=state.step,
            samples_consumed=state.samples_consumed,
            time=time.time(),
            epoch=state.epochs_done,
            loss=metrics.loss,
            lr=metrics.lr,
            grad_norm=metrics.grad_norm,
            num_targets=metrics.num_targets,
            **speed.as_event(),
            digest=f"{state.digest:016x}",
            **({"sources": per_source(run, state, consumed.samples)} if len(state.segments[-1].parts) > 1 else {}),
            **({"overflows": metrics.overflows} if metrics.overflows else {}),
        )
        if (expected := run.spikes.expected(metrics.loss)) is not None:
            place = {"step": state.step, "samples_consumed": state.samples_consumed}
            run.log.write(event="spike", **place, loss=metrics.loss, expected=expected)
            print(
                f"step {state.step}: loss {metrics.loss:.3g}, the median of the steps before is {expected:.3g}; look at its "
                f"samples with `python -m xctrain batch {run.config.run.dir} --step {state.step}`",
                file=sys.stderr,
            )
    run.show(state, metrics, speed)


def per_source(run: Run, state: TrainState, samples: int) -> dict[str, int]:
    """How many of the last step's slots each dataset of a mix served."""
    ns = np.arange(state.samples_consumed - samples, state.samples_consumed)
    counts: Counter[str] = Counter()
    for segment, inside in state.split(ns):
        numbers = np.bincount(run.loader.stream.order.places(inside).part, minlength=len(segment.parts))
        counts.update({source.name: number for source, number in zip(segment.parts, numbers.tolist(), strict=True)})
    return dict(counts)


def improves(run: Run, state: TrainState, scores: Scores) -> bool:
    """Whether scores that were just made are the best so far by ``checkpoint.best``. The same on every rank."""
    if not scores or run.config.checkpoint.best is None:
        return False
    return bool(run.ranks.from_main(run.ranks.is_main and run.saver.checkpoints.improves(state.step, scores)))


def save(run: Run, state: TrainState, scores: Scores | None = None) -> int:
    """Begin a checkpoint on rank 0, with the generators of all ranks; the position that it holds.

    Training may go on meanwhile; the checkpoint is whole after ``finish_save``.

    Raises:
        TrainError: on every rank, if rank 0 could not save, or could not end the save before this one.
    """
    finish_save(run)
    enter(f"saving step {state.step}")
    began = time.perf_counter()
    generators = run.ranks.gather([rng.capture()])
    snapshot = run.engine.snapshot(run.saver.copy)
    for log in (run.log, run.keys):
        if log:
            log.sync()
    run.ranks.barrier()  # what every rank trained on is durable before a checkpoint says so
    if snapshot is not None:
        run.saver.begin(_content(run, state, snapshot, generators, scores or {}), began)
    if not run.config.checkpoint.asynchronous:
        finish_save(run)
    return state.samples_consumed


def finish_save(run: Run) -> None:
    """Wait for the checkpoint that is being written, if there is one, and log it.

    Raises:
        TrainError: on every rank, if rank 0 could not save.
    """
    enter("waiting for the checkpoint to be written")
    failure = None
    try:
        if (saved := run.saver.finish()) and run.log:
            run.log.write(event="save", **{**asdict(saved), "path": saved.path.name})
        log_pushes(run)
    except (TrainError, OSError) as error:
        failure = str(error)
    failure = run.ranks.from_main(failure)
    if failure:
        raise TrainError(failure, on_every_rank=True)


def log_pushes(run: Run) -> None:
    """One line for each time that checkpoints were sent, or could not be, since this was last called."""
    if run.log and run.saver.pusher:
        for pushed in run.saver.pusher.news():
            run.log.write(event="push", **asdict(pushed))


def _content(
    run: Run, state: TrainState, snapshot: Snapshot, generators: Sequence[dict[str, Any]], scores: Scores
) -> Content:
    scaler = run.ranks.accelerator.scaler
    return Content(
        state=state,
        snapshot=snapshot,
        scaler=scaler.state_dict() if scaler else {},
        rng=generators,
        config_yaml=run.config.to_yaml(),
        world=run.world,
        model_id=run.model_id,
        scores=scores,
        logs=logs_of(run.config.run.dir) if run.saver.pusher else {},
    )
