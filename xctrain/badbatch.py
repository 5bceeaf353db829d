"""Batches that cannot be trained on: damaged samples, no target token, a loss or gradient that is not finite."""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from xctrain.collate import Batch
from xctrain.errors import NotFiniteError, TrainError
from xctrain.loader import DAMAGED
from xctrain.run import Consumed, Run
from xctrain.state import Masked, TrainState
from xctrain.tensors import save_tensors

NOT_FINITE = "not_finite"  # reason of the slots of a skipped batch


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
