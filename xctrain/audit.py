"""Proof that a run trained on each sample of its order exactly once: from its position, its digest and its key logs."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shards.errors import DamagedSampleError, counted
from shards.hashing import slot_digest, text64
from shards.order import Ints
from shards.stream import Slot, Stream
from xctrain import resume
from xctrain.captions import choose_captions
from xctrain.errors import ConfigError
from xctrain.log import METRICS, read_lines, way_out
from xctrain.state import TrainState
from xctrain.trained import Trained

_CHUNK = 1 << 16  # positions looked at together


@dataclass(frozen=True)
class EpochAudit:
    """One epoch of one dataset in one segment, in slots. None: not known from a digest alone."""

    epoch: int  # of the dataset: in a mix each has its own
    segment: int
    source: str  # name of the dataset in a mix
    num_samples: int  # in the whole epoch, of which some may lie ahead or in another segment
    seen: int | None
    repeated: int | None
    skipped: int | None
    masked: int


@dataclass(frozen=True)
class SegmentAudit:
    """What a stretch of the run was made of, for people."""

    first_n: int
    first_step: int
    first_epoch: int
    num_samples: int
    global_batch: int
    begun: bool
    sources: tuple[str, ...]  # name, samples, repeat, samples left out


@dataclass(frozen=True)
class Audit:
    """What a run trained on, compared with manifest and order."""

    ok: bool
    evidence: str  # keys: every trained key was compared; digest: their sum was
    step: int
    samples_consumed: int
    digest_matches: bool
    epochs: tuple[EpochAudit, ...]
    segments: tuple[SegmentAudit, ...]
    findings: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """As ``audit --json`` prints it."""
        return asdict(self)


def audit(run: Trained) -> Audit:
    """Compare what was trained with what manifest and order say for every position below ``samples_consumed``."""
    state, order = run.state, run.order
    keys = read_all_keys(run)
    key64 = np.array([text64(key) for key in keys], dtype=np.uint64)
    masked = np.array(sorted({entry.n for entry in state.masked}), dtype=np.int64)
    logged, unlogged = read_steps(run)
    ends = np.array(sorted(logged), dtype=np.int64)
    by_keys = state.keys_from == 0
    times, misplaced = read_keys(run, keys) if by_keys else (None, [])
    counts: dict[tuple[int, int, int], Tally] = defaultdict(Tally)  # by segment, dataset and the dataset's epoch
    changed = []
    expected = 0
    for number, (_, first, end) in enumerate(state.spans()):
        for start in range(first, end, _CHUNK):
            ns = np.arange(start, min(start + _CHUNK, end))
            places = order.places(ns)
            digests = slot_digest(ns, key64[places.index])
            hidden = np.isin(ns, masked)
            digests[hidden] = 0
            sums = np.cumsum(digests, dtype=np.uint64)
            for n in ends[(ends > start) & (ends <= start + len(ns))].tolist():
                due = f"{(expected + int(sums[n - start - 1])) % 2**64:016x}"
                if logged[n]["digest"] != due:
                    changed.append(f"step {logged[n]['step']}: digest is {logged[n]['digest']}, due is {due}")
            expected += int(sums[-1])
            trained = np.array([times[n] for n in ns.tolist()]) if times is not None else 1 - hidden
            for part, epoch in np.unique(np.stack((places.part, places.epoch)), axis=1).T.tolist():
                inside = (places.part == part) & (places.epoch == epoch)
                counts[number, part, epoch].add(trained[inside], hidden[inside])
    matches = expected % 2**64 == state.digest
    findings = [] if matches else [f"digest is {state.digest:016x}, manifest and order give {expected % 2**64:016x}"]
    older = f"what is audited is the newest whole one, step {state.step}; start the run again to go on from there"
    damage = [*(f"{text}; {older}" for text in run.passed_over), *unlogged]
    if changed:
        damage.append(f"{METRICS}: {counted(len(changed), 'line')} changed, first {changed[0]}")
    findings += damage
    if not by_keys and state.keys_from is not None:
        findings.append(f"keys are logged from position {state.keys_from} on only; the digest covers the rest")
    findings += misplaced
    known = by_keys or matches
    epochs = tuple(
        EpochAudit(epoch, segment, source.name, source.num_samples, **tally.columns(known=known))
        for (segment, part, epoch), tally in sorted(counts.items())
        for source in [state.segments[segment].parts[part]]
    )
    ok = matches and not misplaced and not damage and all(e.repeated == 0 and e.skipped == 0 for e in epochs)
    return Audit(
        ok,
        "keys" if by_keys else "digest",
        state.step,
        state.samples_consumed,
        matches,
        epochs,
        tuple(_segments(state)),
        tuple(findings),
    )


@dataclass
class Tally:
    """Slots of one row of the audit."""

    seen: int = 0
    repeated: int = 0
    skipped: int = 0
    masked: int = 0

    def add(self, times: Ints, hidden: NDArray[np.bool_]) -> None:
        """Count slots that were trained so many times, each; hidden ones should not have been."""
        due = times[~hidden]
        self.seen += int((due > 0).sum())
        self.repeated += int((due[due > 0] - 1).sum() + times[hidden].sum())
        self.skipped += int((due == 0).sum())
        self.masked += int(hidden.sum())

    def columns(self, *, known: bool) -> dict[str, Any]:
        """By name; what a digest that does not match cannot tell is None."""
        values = asdict(self)
        return values if known else {**dict.fromkeys(values), "masked": self.masked}


def _segments(state: TrainState) -> Iterator[SegmentAudit]:
    for segment in state.segments:
        sources = []
        for source in segment.parts:
            name = f"{source.name}: " if source.name else ""
            times = f" x {source.repeat}" if source.repeat > 1 else ""
            left_out = f", {len(source.left_out)} left out" if source.left_out else ""
            sources.append(f"{name}{counted(source.num_samples, 'sample')}{times}{left_out}")
        yield SegmentAudit(
            segment.first_n,
            segment.first_step,
            segment.first_epoch,
            segment.num_samples,
            segment.global_batch,
            segment.first_n < state.samples_consumed,
            tuple(sources),
        )


def read_all_keys(run: Trained) -> list[str]:
    """The key of every sample, in the numbering of the order; of those with a damaged line nothing."""
    keys = []
    for index in range(len(run.data.reader)):
        try:
            keys.append(run.data.reader.key(index))
        except DamagedSampleError:
            keys.append("")
    return keys


def read_steps(run: Trained) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """The log's line of each step by its position, and findings: damaged lines, steps that are not there exactly once."""
    path = run.config.run.dir / METRICS
    if not path.exists():
        return {}, [f"{METRICS}: is missing"]
    first, saved, times, logged = None, 0, Counter[int](), {}
    damaged: list[str] = []
    for line in read_lines(path, damaged):
        if line["event"] == "start" and first is None:
            first = line["step"] if line.get("fork") else 0  # from another's checkpoint: it logs from there on
        saved = line["step"] if line["event"] == "save" else saved
        if line["event"] == "step" and line["samples_consumed"] <= run.state.samples_consumed:
            times[line["step"]] += 1
            logged[line["samples_consumed"]] = line
    findings = _damage(path, damaged)
    if saved > max(run.state.step, *resume.checkpoints_of(run.config).steps()):  # which a run that is saving moves on
        findings.append(
            f"checkpoints: the one of step {saved}, which {METRICS} tells of, is gone; what is audited is the newest there is"
        )
    due = range((first or 0) + 1, run.state.step + 1)
    for text, steps in (
        ("missing", [step for step in due if not times[step]]),
        ("there more than once", [step for step in times if times[step] > 1]),
        ("not of this run", [step for step in times if step not in due]),
    ):
        if steps:
            findings.append(f"{METRICS}: {counted(len(steps), 'step')} {text}, first step {steps[0]}")
    return logged, findings


def read_keys(run: Trained, keys: Sequence[str]) -> tuple[Counter[int], list[str]]:
    """How often each position was trained by the logs of all ranks, and positions that held another key than the order's."""
    times: Counter[int] = Counter()
    findings: list[str] = []
    logged: dict[int, str] = {}
    masked = {entry.n for entry in run.state.masked}
    for path in sorted(run.config.run.dir.glob("keys-rank*.jsonl")):
        damaged: list[str] = []
        for line in read_lines(path, damaged):
            if line["samples_consumed"] > run.state.samples_consumed:
                continue  # after the checkpoint: not part of what is audited
            times.update(line["n"])
            logged.update(zip(line["n"], line["keys"], strict=True))
        findings += _damage(path, damaged)
    for n in sorted(n for n in logged if n in masked or not 0 <= n < run.state.samples_consumed):
        findings.append(f"position {n}: trained on {logged[n]}, the checkpoint says that it was not trained")
    ns = np.array(sorted(n for n in logged if 0 <= n < run.state.samples_consumed), dtype=np.int64)
    for n, index in zip(ns.tolist(), run.order.places(ns).index.tolist(), strict=True):
        if logged[n] != keys[index]:
            findings.append(f"position {n}: trained on {logged[n]}, the order says {keys[index]}")
    return times, findings


def _damage(path: Path, damaged: Sequence[str]) -> list[str]:
    """One finding for the damaged lines of a log."""
    more = f", and {counted(len(damaged) - 1, 'line')} more" if len(damaged) > 1 else ""
    return [f"{damaged[0]}{more}; {way_out(path)}"] if damaged else []


def as_text(result: Audit) -> str:
    """The audit as a table."""
    lines = [f"step {result.step}, {result.samples_consumed} samples consumed, evidence: {result.evidence}"]
    width = max(len(e.source) for e in result.epochs) if result.epochs else 0
    heads = f"{'source':<{max(6, width)}} " if width else ""
    lines.append(
        f"{heads}{'epoch':>6} {'segment':>8} {'seen':>10} {'of':>10} {'repeated':>9} {'skipped':>9} {'masked':>8}"
    )
    for e in result.epochs:
        cells = ["?" if v is None else str(v) for v in (e.seen, e.repeated, e.skipped, e.masked)]
        source = f"{e.source:<{max(6, width)}} " if width else ""
        lines.append(
            f"{source}{e.epoch:>6} {e.segment:>8} {cells[0]:>10} {e.num_samples:>10} {cells[1]:>9} {cells[2]:>9} {cells[3]:>8}"
        )
    if len(result.segments) > 1:
        for number, s in enumerate(result.segments):
            when = f"from position {s.first_n}, step {s.first_step}, epoch {s.first_epoch}"
            ahead = "" if s.begun else ", not reached yet"
            lines.append(f"segment {number}: {when}: global batch {s.global_batch}, {'; '.join(s.sources)}{ahead}")
    totals = [[getattr(e, name) for e in result.epochs] for name in ("repeated", "skipped", "masked")]
    repeated, skipped, hidden = ("?" if None in t else str(sum(t)) for t in totals)
    lines.append(f"{repeated} repeated, {skipped} skipped, {hidden} masked")
    lines += result.findings
    ok = "OK: every sample" if hidden == "0" else f"OK, but {hidden} masked: every other sample"
    lines.append(f"{ok} of the order exactly once" if result.ok else "NOT OK: what stands above is not as it should be")
    return "\n".join(lines)


def batch_of_step(run: Trained, step: int) -> list[dict[str, Any]]:
    """The samples of a step, past or future; skipped batches move it as the run's log says.

    Raises:
        ConfigError: no such step.
    """
    if step < 1:
        raise ConfigError(f"step {step}: steps count from 1")
    return batch_at(run, _position_before(run, step), f"step {step}")


def batch_at(run: Trained, n: int, name: str) -> list[dict[str, Any]]:
    """The samples of the global batch that holds position ``n``, trained or skipped; ``name`` is what was asked for.

    Raises:
        ConfigError: the run ends before it.
    """
    if n < 0:
        raise ConfigError(f"{name}: positions count from 0")
    segments, order = run.state.segments, run.order
    num_steps, end = resume.run_length(run.config, segments, order)
    if n >= end:
        raise ConfigError(f"{name}: the run ends after step {num_steps}, at position {end}; the batch would hold {n}")
    first = max(
        s.first_batch_n for s in segments if s.first_batch_n <= n
    )  # where the batches around n are counted from
    size = next(s.global_batch for s in segments if s.first_batch_n == first)
    end = min([s.first_batch_n for s in segments if s.first_batch_n > first], default=end)
    slots = Stream(order, size, end).step(n - (n - first) % size)
    return [_sample(run, slot) for slot in slots if not slot.surplus]


def _sample(run: Trained, slot: Slot) -> dict[str, Any]:
    segment, reader = run.state.segment_at(slot.n), run.data.reader
    source = segment.parts[slot.part].name
    place = {"n": slot.n, "epoch": slot.epoch, **({"source": source} if source else {})}
    try:
        key, captions = reader.key(slot.index), reader.read_json(slot.index)["captions"]
    except DamagedSampleError as error:
        return {
            **place,
            "index": slot.index,
            "key": error.key or "?",
            "captions": [],
            "chosen": [],
            "damaged": str(error),
        }
    chosen = choose_captions(captions, run.config.data.captions, seed=segment.seed, epoch=slot.epoch, key=key)
    return {**place, "index": slot.index, "key": key, "captions": captions, "chosen": chosen}


def _position_before(run: Trained, step: int) -> int:
    """Samples consumed before a step: as logged, else counted on from the log's end or checkpoint, or in its segment."""
    before, reached = 0, 0
    for line in read_lines(run.config.run.dir / METRICS):
        if line.get("event") in ("start", "step", "skip"):
            if line["event"] == "step" and line["step"] == step:
                return int(before)
            before, reached = line["samples_consumed"], line["step"]
    if reached < run.state.step:
        before, reached = run.state.samples_consumed, run.state.step
    if step > reached:
        return int(before) + (step - 1 - reached) * run.state.segments[-1].global_batch
    segment = next(s for s in reversed(run.state.segments) if s.first_step < step and s.first_batch_n == s.first_n)
    return segment.first_n + (step - 1 - segment.first_step) * segment.global_batch
