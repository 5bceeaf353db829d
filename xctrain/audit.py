"""Proof that a run trained on each sample of its order exactly once: from its position, its digest and its key logs."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from shards.hashing import slot_digest, text64
from shards.order import Order
from shards.reader import SplitReader
from shards.settings import load_settings
from shards.stream import Slot, Stream
from xctrain import checkpoint, resume
from xctrain.config import Config
from xctrain.errors import RunError
from xctrain.log import read_lines
from xctrain.state import Segment, TrainState

_CHUNK = 1 << 16  # positions looked at together


@dataclass(frozen=True)
class EpochAudit:
    """One epoch of one segment, in slots. None: not known from a digest alone."""

    epoch: int
    segment: int
    seen: int | None
    repeated: int | None
    skipped: int | None
    masked: int


@dataclass(frozen=True)
class Audit:
    """What a run trained on, compared with manifest and order."""

    ok: bool
    evidence: str  # keys: every trained key was compared; digest: their sum was
    step: int
    samples_consumed: int
    digest_matches: bool
    epochs: tuple[EpochAudit, ...]
    findings: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """As ``audit --json`` prints it."""
        return asdict(self)


@dataclass(frozen=True)
class Trained:
    """A run as its newest whole checkpoint describes it, and the data it read."""

    config: Config
    path: Path
    state: TrainState
    reader: SplitReader


def open_run(run_dir: Path) -> Trained:
    """The newest whole checkpoint of a run folder, and its shards.

    Raises:
        RunError: no such folder, no whole checkpoint, or the shards have changed since.
    """
    if not run_dir.is_dir():
        raise RunError(f"{run_dir}: there is no such run folder; give the run.dir of a run", path=run_dir)
    path, passed_over = checkpoint.Checkpoints(run_dir / "checkpoints", keep=1).newest_valid()
    if path is None:
        why = f" ({passed_over[0]})" if passed_over else ""
        raise RunError(
            f"{run_dir}: has no whole checkpoint{why}; train first, or give another run folder", path=run_dir
        )
    config = load_settings(Config, path / checkpoint.CONFIG).moved_to(run_dir)
    state, _ = checkpoint.read_position(path)
    reader = SplitReader(config.data.shards, config.data.split)
    saved = state.segments[-1].manifest_id
    if reader.manifest.manifest_id != saved:
        raise RunError(
            f"{config.data.shards}: its manifest_id is {reader.manifest.manifest_id}, the run was trained on {saved}; "
            "put the data that the run was trained on back",
            path=config.data.shards,
        )
    return Trained(config, path, state, reader)


def spans(state: TrainState) -> Iterator[tuple[Segment, int, int]]:
    """Each segment with the positions [first, last) that were consumed in it."""
    ends = [s.first_n for s in state.segments[1:]] + [state.samples_consumed]
    for segment, end in zip(state.segments, ends, strict=True):
        yield segment, segment.first_n, end


def audit(run: Trained) -> Audit:
    """Compare what was trained with what manifest and order say for every position below ``samples_consumed``."""
    state = run.state
    keys = run.reader.keys()
    key64 = np.array([text64(key) for key in keys], dtype=np.uint64)
    masked = {entry.n for entry in state.masked}
    expected = 0
    for segment, first, end in spans(state):
        order = Order(run.reader.shard_sizes, segment.order_settings)
        for start in range(first, end, _CHUNK):
            ns = np.arange(start, min(start + _CHUNK, end))
            trained = ns[~np.isin(ns, list(masked))] if masked else ns
            expected += int(slot_digest(trained, key64[order.indices(trained)]).sum(dtype=np.uint64))
    matches = expected % 2**64 == state.digest
    findings = [] if matches else [f"digest is {state.digest:016x}, manifest and order give {expected % 2**64:016x}"]
    by_keys = state.keys_from == 0
    if not by_keys and state.keys_from is not None:
        findings.append(f"keys are logged from position {state.keys_from} on only; the digest covers the rest")
    times, misplaced = read_keys(run, keys) if by_keys else (None, [])
    findings += misplaced
    epochs = tuple(_epochs(state, masked, times, matches))
    ok = matches and not misplaced and all(e.repeated == 0 and e.skipped == 0 for e in epochs)
    return Audit(
        ok, "keys" if by_keys else "digest", state.step, state.samples_consumed, matches, epochs, tuple(findings)
    )


def read_keys(run: Trained, keys: Sequence[str]) -> tuple[Counter[int], list[str]]:
    """How often each position was trained by the logs of all ranks, and positions that held another key than the order's."""
    times: Counter[int] = Counter()
    findings: list[str] = []
    logged: dict[int, str] = {}
    masked = {entry.n for entry in run.state.masked}
    for path in sorted(run.config.run.dir.glob("keys-rank*.jsonl")):
        for line in read_lines(path):
            if line["samples_consumed"] > run.state.samples_consumed:
                continue  # after the checkpoint: not part of what is audited
            times.update(line["n"])
            logged.update(zip(line["n"], line["keys"], strict=True))
    for n in sorted(n for n in logged if n in masked or not 0 <= n < run.state.samples_consumed):
        findings.append(f"position {n}: trained on {logged[n]}, the checkpoint says that it was not trained")
    for segment, first, end in spans(run.state):
        order = Order(run.reader.shard_sizes, segment.order_settings)
        ns = np.array(sorted(n for n in logged if first <= n < end), dtype=np.int64)
        for n, index in zip(ns.tolist(), order.indices(ns).tolist(), strict=True):
            if logged[n] != keys[index]:
                findings.append(f"position {n}: trained on {logged[n]}, the order says {keys[index]}")
    return times, findings


def _epochs(
    state: TrainState, masked: set[int], times: Counter[int] | None, digest_matches: bool
) -> Iterator[EpochAudit]:
    for number, (segment, first, end) in enumerate(spans(state)):
        bounds = [
            first,
            *range((first // segment.num_samples + 1) * segment.num_samples, end, segment.num_samples),
            end,
        ]
        for start, stop in pairwise(bounds):
            if start == stop:
                continue
            hidden = sum(start <= n < stop for n in masked)
            due = stop - start - hidden
            if times is not None:
                counts = [times[n] for n in range(start, stop) if n not in masked]
                trained = sum(c > 0 for c in counts)
                repeated = sum(c - 1 for c in counts if c > 1) + sum(times[n] for n in masked if start <= n < stop)
                yield EpochAudit(start // segment.num_samples, number, trained, repeated, due - trained, hidden)
            else:
                none = 0 if digest_matches else None
                seen = due if digest_matches else None
                yield EpochAudit(start // segment.num_samples, number, seen, none, none, hidden)


def as_text(result: Audit) -> str:
    """The audit as a table."""
    lines = [f"step {result.step}, {result.samples_consumed} samples consumed, evidence: {result.evidence}"]
    lines.append(f"{'epoch':>6} {'segment':>8} {'seen':>10} {'repeated':>9} {'skipped':>9} {'masked':>8}")
    for e in result.epochs:
        cells = ["?" if v is None else str(v) for v in (e.seen, e.repeated, e.skipped, e.masked)]
        lines.append(f"{e.epoch:>6} {e.segment:>8} {cells[0]:>10} {cells[1]:>9} {cells[2]:>9} {cells[3]:>8}")
    totals = [[getattr(e, name) for e in result.epochs] for name in ("repeated", "skipped", "masked")]
    repeated, skipped, hidden = ("?" if None in t else str(sum(t)) for t in totals)
    lines.append(f"{repeated} repeated, {skipped} skipped, {hidden} masked")
    lines += result.findings
    lines.append(
        "OK: every sample of the order exactly once" if result.ok else "NOT OK: this run is not what its order says"
    )
    return "\n".join(lines)


def batch_of_step(run: Trained, step: int) -> list[tuple[Slot, str]]:
    """Slots and keys of a step, past or future; skipped batches move it as the run's log says.

    Raises:
        RunError: no such step.
    """
    if step < 1:
        raise RunError(f"step {step}: steps count from 1")
    n = _position_before(run, step)
    number = max(i for i, s in enumerate(run.state.segments) if s.first_n <= n)
    segment, following = run.state.segments[number], run.state.segments[number + 1 :]
    order = Order(run.reader.shard_sizes, segment.order_settings)
    _, end = resume.run_length(run.config, run.state.segments, order)
    if n >= end:
        raise RunError(f"step {step}: the run ends at position {end}, the step would begin at {n}")
    if following:
        end = following[0].first_n
    slots = Stream(order, segment.global_batch, end).step(n)
    return [(slot, run.reader.key(slot.index)) for slot in slots if not slot.surplus]


def _position_before(run: Trained, step: int) -> int:
    """Samples consumed before a step: as logged, else counted on from the newest checkpoint or the step's segment."""
    if step > run.state.step:
        return run.state.samples_consumed + (step - 1 - run.state.step) * run.state.segments[-1].global_batch
    from xctrain.log import METRICS

    before = 0
    for line in read_lines(run.config.run.dir / METRICS):
        if line.get("event") in ("step", "skip"):
            if line["event"] == "step" and line["step"] == step:
                return before
            before = line["samples_consumed"]
    segment = next(s for s in reversed(run.state.segments) if s.first_step < step)
    return segment.first_n + (step - 1 - segment.first_step) * segment.global_batch
