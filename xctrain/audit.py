"""Proof that a run trained on each sample of its order exactly once: from its position, its digest and its key logs."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from shards.errors import counted
from shards.hashing import slot_digest, text64
from shards.order import Order
from shards.reader import SplitReader
from shards.settings import load_settings
from shards.stream import Slot, Stream
from xctrain import checkpoint, resume
from xctrain.captions import choose_captions
from xctrain.config import Config
from xctrain.errors import ConfigError, RunError
from xctrain.log import METRICS, read_lines
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
    state: TrainState
    reader: SplitReader
    passed_over: tuple[str, ...]  # checkpoints that are newer and damaged, each with why


def open_run(run_dir: Path, shards: Path | None = None, *, begun: bool = False) -> Trained:
    """The newest whole checkpoint of a run folder, and its shards: in ``shards`` if given, else where the run read them.

    ``begun``: a run that has not saved yet will do, from its config.yaml.

    Raises:
        ConfigError: no such folder, or no shards there.
        RunError: no whole checkpoint, or the shards have changed since.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: there is no such run folder; give the run.dir of a run", path=run_dir)
    path, passed_over = checkpoint.Checkpoints(run_dir / "checkpoints", keep=1).newest_valid()
    source = path / checkpoint.CONFIG if path else run_dir / "config.yaml"
    if not path and not (begun and source.is_file() and not passed_over):
        why = f" ({passed_over[0]})" if passed_over else ""
        raise RunError(
            f"{run_dir}: has no whole checkpoint{why}; train first, or give another run folder", path=run_dir
        )
    config = load_settings(Config, source).moved_to(run_dir)
    reader = open_shards(config, config.data.split, shards)
    manifest_id = reader.manifest.manifest_id
    state = checkpoint.read_position(path)[0] if path else TrainState()
    if not state.segments:
        state = replace(state, segments=resume.next_segments(config, state, len(reader), manifest_id))
    saved = state.segments[-1].manifest_id
    if manifest_id != saved:
        raise RunError(
            f"{reader.folder}: its manifest_id is {manifest_id}, the run was trained on {saved}; "
            "put the data that the run was trained on back, or give their folder with --shards DIR",
            path=reader.folder,
        )
    return Trained(config, state, reader, tuple(passed_over))


def open_shards(config: Config, split: str, given: Path | None = None) -> SplitReader:
    """A split of the run's data: in ``given``, or where data.shards leads from here, or from where the run was started."""
    if given:
        return SplitReader(given, split)
    folder = config.data.shards
    started_in = _started_in(config.run.dir)
    if started_in and not folder.exists() and (Path(started_in) / folder).exists():
        folder = Path(started_in) / folder
    try:
        return SplitReader(folder, split)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; the path is the data.shards that the run {config.run.dir} was trained with: give another folder "
            "with --shards DIR",
            path=folder,
        ) from None


def _started_in(run_dir: Path) -> str | None:
    try:
        found = json.loads((run_dir / "environment.json").read_text(encoding="utf-8"))["started_in"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(found)


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
    logged, unlogged = read_steps(run)
    ends = np.array(sorted(logged), dtype=np.int64)
    changed = []
    expected = 0
    for segment, first, end in spans(state):
        order = Order(run.reader.shard_sizes, segment.order_settings)
        for start in range(first, end, _CHUNK):
            ns = np.arange(start, min(start + _CHUNK, end))
            digests = slot_digest(ns, key64[order.indices(ns)])
            if masked:
                digests[np.isin(ns, list(masked))] = 0
            sums = np.cumsum(digests, dtype=np.uint64)
            for n in ends[(ends > start) & (ends <= start + len(ns))].tolist():
                due = f"{(expected + int(sums[n - start - 1])) % 2**64:016x}"
                if logged[n]["digest"] != due:
                    changed.append(f"step {logged[n]['step']}: digest is {logged[n]['digest']}, due is {due}")
            expected += int(sums[-1])
    matches = expected % 2**64 == state.digest
    findings = [] if matches else [f"digest is {state.digest:016x}, manifest and order give {expected % 2**64:016x}"]
    damage = [*run.passed_over, *unlogged]
    if changed:
        damage.append(f"{METRICS}: {counted(len(changed), 'line')} changed, first {changed[0]}")
    findings += damage
    by_keys = state.keys_from == 0
    if not by_keys and state.keys_from is not None:
        findings.append(f"keys are logged from position {state.keys_from} on only; the digest covers the rest")
    times, misplaced = read_keys(run, keys) if by_keys else (None, [])
    findings += misplaced
    epochs = tuple(_epochs(state, masked, times, matches))
    ok = matches and not misplaced and not damage and all(e.repeated == 0 and e.skipped == 0 for e in epochs)
    return Audit(
        ok, "keys" if by_keys else "digest", state.step, state.samples_consumed, matches, epochs, tuple(findings)
    )


def read_steps(run: Trained) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """The log's line of each step by its position, and which steps up to the checkpoint are not there exactly once."""
    path = run.config.run.dir / METRICS
    if not path.exists():
        return {}, [f"{METRICS}: is missing"]
    first, times, logged = None, Counter[int](), {}
    for line in read_lines(path):
        if line["event"] == "start" and first is None:
            first = line["step"]  # a run that began from another's checkpoint logs from there on
        if line["event"] == "step" and line["samples_consumed"] <= run.state.samples_consumed:
            times[line["step"]] += 1
            logged[line["samples_consumed"]] = line
    findings = []
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
    ok = "OK: every sample" if hidden == "0" else f"OK, but {hidden} masked: every other sample"
    lines.append(f"{ok} of the order exactly once" if result.ok else "NOT OK: this run is not what its order says")
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
    number = max(i for i, s in enumerate(run.state.segments) if s.first_n <= n)
    segment, following = run.state.segments[number], run.state.segments[number + 1 :]
    order = Order(run.reader.shard_sizes, segment.order_settings)
    _, end = resume.run_length(run.config, run.state.segments, order)
    if n >= end:
        raise ConfigError(f"{name}: the run ends at position {end}, the batch would hold {n}")
    if following:
        end = following[0].first_n
    slots = Stream(order, segment.global_batch, end).step(n - (n - segment.first_n) % segment.global_batch)
    return [_sample(run, segment, slot) for slot in slots if not slot.surplus]


def _sample(run: Trained, segment: Segment, slot: Slot) -> dict[str, Any]:
    key, captions = run.reader.key(slot.index), run.reader.read_json(slot.index)["captions"]
    chosen = choose_captions(captions, run.config.data.captions, seed=segment.seed, epoch=slot.epoch, key=key)
    return {"n": slot.n, "epoch": slot.epoch, "key": key, "captions": captions, "chosen": chosen}


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
    segment = next(s for s in reversed(run.state.segments) if s.first_step < step)
    return segment.first_n + (step - 1 - segment.first_step) * segment.global_batch
