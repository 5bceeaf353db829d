"""Batches that cannot be trained on: damaged samples, no target token, a loss or gradient that is not finite."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from tqdm import tqdm

from xctrain.collate import Batch
from xctrain.errors import NotFiniteError, TrainError
from xctrain.loader import DAMAGED
from xctrain.loss import IGNORED
from xctrain.memory import is_out_of_memory
from xctrain.run import Consumed, OutOfMemory, Run
from xctrain.state import Masked, TrainState
from xctrain.tensors import save_tensors

NOT_FINITE = "not_finite"  # reason of the slots of a skipped batch


def accumulate(run: Run, batches: Sequence[Batch], num_targets: int) -> tuple[list[float], OutOfMemory | None]:
    """This rank's losses of its micro-batches, whose gradients are there then, or what it had no memory for.

    Raises:
        TrainError: it had none, in a mode where the others are in the middle of an exchange with this rank by now.
    """
    try:
        return [float(part) for part in run.engine.accumulate(batches, num_targets)], None
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    key, tokens = max(map(largest_of, batches), key=lambda found: found[1])
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if run.engine.recovers:
        return [], OutOfMemory(run.ranks.rank, key, tokens)
    raise TrainError(
        f"{key}: out of memory on rank {run.ranks.rank} at a batch whose largest sample this is, with {tokens} tokens; with "
        f"parallel.mode={run.engine.mode} the ranks cannot go on from there together: lower train.micro_batch "
        f"({run.loader.micro_batch}) and start again, the newest checkpoint goes on with it",
        key=key,
    )


def largest_of(batch: Batch) -> tuple[str, int]:
    """The sample with the most tokens, and their number: up to its last target."""
    columns = torch.arange(1, batch.labels.shape[1] + 1)
    tokens = ((batch.labels != IGNORED) * columns).amax(dim=1).tolist()
    row = tokens.index(max(tokens))
    return batch.keys[row * len(batch.keys) // len(tokens)], tokens[row]  # a slot may have several rows


def with_smaller_micro_batches(run: Run, state: TrainState, found: OutOfMemory) -> Run:
    """The run with micro-batches of half the size, twice as many a step, and a line that says so.

    Raises:
        TrainError: on every rank: they hold one sample each already.
    """
    step, size = state.step + 1, run.loader.micro_batch
    share = run.config.train.global_batch // run.ranks.world_size
    where = f"step {step}: out of memory on rank {found.rank}; the largest sample there is {found.key}, {found.tokens} tokens"
    if size == 1:
        raise TrainError(
            f"{where}, alone in its micro-batch; set model.gradient_checkpointing=true, lower model.max_length for a build "
            "without it, or use parallel.mode=fsdp",
            key=found.key,
            step=step,
            on_every_rank=True,
        )
    smaller = max(n for n in range(1, size // 2 + 1) if share % n == 0)
    if run.log:
        tqdm.write(
            f"{where}; the same batch runs again in micro-batches of {smaller}, not {size}, and so will the rest of this run; "
            f"start it with train.micro_batch={smaller} from now on",
            file=sys.stderr,
        )
        run.log.write(
            event="out_of_memory",
            step=step,
            samples_consumed=state.samples_consumed,
            **asdict(found),
            micro_batch=smaller,
        )
    return replace(run, loader=replace(run.loader, micro_batch=smaller))


def require_usable(run: Run, state: TrainState, consumed: Consumed) -> None:
    """Log the damaged samples of a global batch, and require that there are few of them and some target tokens.

    Raises:
        TrainError: on every rank: more than ``data.max_damaged`` in the whole run, more than
            ``data.max_damaged_in_a_row`` behind one another, or no slot has a target.
    """
    if run.log:
        for entry, rank in zip(consumed.masked, consumed.masked_on, strict=True):
            tqdm.write(f"masked, no loss at position {entry.n}: {entry.key}: {entry.reason}", file=sys.stderr)
            run.log.write(
                event="masked",
                step=state.step + 1,
                samples_consumed=state.samples_consumed + consumed.samples,
                n=entry.n,
                key=entry.key,
                reason=entry.reason,
                rank=rank,
            )
    if consumed.masked:
        _require_little_damage(run, (*state.masked, *consumed.masked))
    if not consumed.num_targets:
        step = state.step + 1
        raise TrainError(
            f"step {step}: none of the {consumed.samples} samples has a target token "
            f"({len(consumed.masked)} masked); look at it with `python -m xctrain batch {run.config.run.dir} "
            f"--position {state.samples_consumed}`",
            step=step,
            on_every_rank=True,
        )


def _require_little_damage(run: Run, masked: Sequence[Masked]) -> None:
    data = run.config.data
    damaged = [m for m in masked if m.reason.startswith(DAMAGED) and m.key not in run.known_damage]
    number, row = len({m.key for m in damaged}), longest_row([m.n for m in damaged])
    if number > data.max_damaged:
        found = f"{number} samples are damaged, data.max_damaged is {data.max_damaged}"
    elif row > data.max_damaged_in_a_row:
        found = f"{row} samples in a row are damaged, data.max_damaged_in_a_row is {data.max_damaged_in_a_row}"
    else:
        return
    last = damaged[-1]
    folders = [str(source.path) for source in data.sources.values()]
    raise TrainError(
        f"{', '.join(folders)}: {found}; the last is {last.key} ({last.reason}); find them all with `python -m shards verify "
        f"{folders[0] if len(folders) == 1 else 'DIR'}` and build again, or list them with its --quarantine FILE and go on "
        "with data.quarantine=FILE",
        key=last.key,
        on_every_rank=True,
    )


def longest_row(ns: Sequence[int]) -> int:
    """Most positions behind one another among rising ones."""
    longest = row = 0
    for before, n in zip([None, *ns], ns, strict=False):
        row = row + 1 if before is not None and n == before + 1 else 1
        longest = max(longest, row)
    return longest


def refuse(
    run: Run, state: TrainState, micro_batches: Sequence[Batch], losses: Sequence[float], loss: float, grad_norm: float
) -> None:
    """Dump a batch that is not finite, then raise unless the policy is to skip it."""
    step = state.step + 1
    folder = run.config.run.dir / "not-finite" / f"step-{step:08d}-n{state.samples_consumed}"
    dump(folder, run.ranks.rank, micro_batches, losses)
    found = run.ranks.gather(
        [key for b, part in zip(micro_batches, losses, strict=True) if not math.isfinite(part) for key in b.keys]
    )
    where = f"first of its micro-batch: {found[0]}" if found else "every micro-batch alone is finite"
    text = (
        f"step {step}: loss is {loss}, gradient norm is {grad_norm}; nothing was updated; {where}; the batch is in "
        f"{folder}, look at it with `python -m xctrain batch {run.config.run.dir} --position {state.samples_consumed}`"
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
    save_tensors(tensors, folder / f"rank{rank}.safetensors")
    rows = [
        {"micro": i, "loss": repr(part), "n": b.positions, "keys": b.keys, "num_targets": b.num_targets}
        for i, (b, part) in enumerate(zip(micro_batches, losses, strict=True))
    ]
    (folder / f"rank{rank}.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")


def skip_batch(run: Run, state: TrainState, micro_batches: Sequence[Batch], consumed: Consumed) -> TrainState:
    """The state behind a batch that made no update: n moves on, step does not, its slots count as masked."""
    trained = [
        Masked(n, key, NOT_FINITE)
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
            reason=NOT_FINITE,
            keys=[m.key for m in masked],
        )
    return state
