"""How several runs ended, as a table; the best of figures that mean the same stands out."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from xctrain.best import scored_images
from xctrain.charts import Point, finite, smooth
from xctrain.history import Event, History, number
from xctrain.page import figure, warnings
from xctrain.report import SCORES, span_of


@dataclass(frozen=True)
class Compared:
    """One of the runs."""

    name: str
    style: str  # CSS class of its curves
    history: History
    audit: Mapping[str, Any] | None


@dataclass(frozen=True)
class Figure:
    """One figure of a run. ``rank``: the highest is best, none where there is no better; ``of``: what it was measured on."""

    text: str
    rank: float | None = None
    of: object = None


def end_figures(runs: Sequence[Compared]) -> str:
    """A table with a row for each run; the best of the figures that were measured on the same stands out."""
    columns: dict[str, list[Figure]] = {}
    for run in runs:
        for name, found in _row(run):
            columns.setdefault(name, []).append(found)
    shown = {name: column for name, column in columns.items() if any(found.text != "–" for found in column)}
    best = {name: best_text(column) for name, column in shown.items()}
    head = "<tr><th>Run</th>" + "".join(f"<th>{escape(name)}</th>" for name in shown) + "</tr>"
    rows = []
    for i, run in enumerate(runs):
        cells = []
        for name, column in shown.items():
            text = column[i].text
            style = ' class="best"' if text == best[name] else ""
            cells.append(f"<td{style}>{escape(text)}</td>")
        rows.append(f'<tr><td><i class="key {run.style}"></i>{escape(run.name)}</td>{"".join(cells)}</tr>')
    table = f'<table class="tight">{head}{"".join(rows)}</table>'
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in _not_compared(runs))
    body = f'<div class="scroll">{table}</div>{notes}{warnings(_warnings(runs))}'
    return f'<h2>In the end</h2><div class="card">{body}</div>'


def best_text(column: Sequence[Figure]) -> str | None:
    """How the best figure of a column reads; None where they were measured on different things, or are all equal."""
    ranked = [found for found in column if found.rank is not None and math.isfinite(found.rank)]
    if len({found.text for found in ranked}) < 2 or any(found.of != ranked[0].of for found in ranked):
        return None
    return max(ranked, key=lambda found: found.rank or 0.0).text


def _row(run: Compared) -> Iterator[tuple[str, Figure]]:
    """Heading and figure of each column."""
    history = run.history
    last: Event = history.steps[-1] if history.steps else {}
    scored = _scored(history)
    yield "Steps", Figure(figure(last.get("step"), 0))
    yield "Epochs", Figure(figure(last.get("epoch"), 1))
    losses = smooth(history.curve("loss"), span_of(history))
    if losses:
        value = losses[-1][1]
        yield "Loss", Figure(figure(value), -value, (_trained_on(history), _words(history)))
    else:
        yield "Loss", Figure("–")
    for name in ("loss", "bleu4", "cider", "rouge_l"):
        found, images = number(scored.get(name)), _images(history)
        if name == "loss":
            yield "Held-out loss", Figure(figure(found), None if found is None else -found, (images, _words(history)))
        else:
            yield SCORES[name], Figure(figure(found), found, images)
    speed = _median(history, "samples_per_s")
    yield "Samples/s", Figure(figure(speed, 1), speed, _machine(history))
    for heading, name, digits in (("Step, s", "step_s", 3), ("MFU", "mfu", 2)):
        yield heading, Figure(figure(_median(history, name), digits))
    waits = [y for _, y in waits_of(history, "step")]
    yield "Waiting", Figure(f"{statistics.mean(waits):.0f} %" if waits else "–")
    yield "GB", Figure(figure(last.get("max_memory_gb"), 2))
    yield "Processes", Figure(", ".join(_processes(history)) or "–")
    yield "Kills", Figure(str(sum(s.get("previous_end") == "killed" for s in history.starts[1:])))
    verdict = "not audited" if run.audit is None else "exactly once" if run.audit.get("ok") else "failed"
    yield "Audit", Figure(verdict)


def _scored(history: History) -> Event:
    return history.evals[-1] if history.evals else {}


def _images(history: History) -> tuple[Any, ...]:
    """What the newest scores were made on: split, dataset, how many, and the pictures' keys."""
    scored = _scored(history)
    count, step = scored.get("num_images"), scored.get("step")
    keys = list(history.captions.get(step, {})) if isinstance(step, int) else []
    return str(scored_images(scored)), *keys[: count if isinstance(count, int) else None]


def _trained_on(history: History) -> tuple[str, ...]:
    """What a loss of training is of: as much of the same data."""
    last: Event = history.steps[-1] if history.steps else {}
    settings = [history.setting(name) for name in ("data.shards", "data.split", "data.captions")]
    return tuple(map(str, (last.get("step"), last.get("samples_consumed"), *settings)))


def _words(history: History) -> tuple[str, ...]:
    """What decides which words a loss counts."""
    return tuple(str(history.setting(name)) for name in ("model.family", "model.path", "model.prompt"))


def _machine(history: History) -> tuple[Any, ...]:
    about = [str(history.environment.get(name)) for name in ("device", "platform", "cores", "gpu", "threads")]
    return *about, *_processes(history)


def _processes(history: History) -> list[str]:
    return list(dict.fromkeys(str(start.get("world_size", "?")) for start in history.starts))


def _not_compared(runs: Sequence[Compared]) -> Iterator[str]:
    """Why no best figure is marked."""
    for columns, of in (
        ("Scores were made on different pictures", lambda r: _images(r.history) if r.history.evals else None),
        ("Losses are of different steps, data or models", lambda r: (_trained_on(r.history), _words(r.history))),
        ("Samples/s are of different machines or numbers of processes", lambda r: _machine(r.history)),
    ):
        found = {of(run) for run in runs if run.history.steps} - {None}
        if len(found) > 1:
            yield f"{columns}: none is marked as best."


def _warnings(runs: Sequence[Compared]) -> Iterator[str]:
    """The doubts about the newest scores, each with the runs that have it."""
    named: dict[str, list[str]] = {}
    for run in runs:
        found = _scored(run.history).get("warnings")
        for text in found if isinstance(found, list) else ():
            named.setdefault(str(text), []).append(run.name)
    for text, names in named.items():
        yield f"{', '.join(names)}: {text}"


def _median(history: History, name: str) -> float | None:
    """Over the second half of the run, when caches are filled."""
    values = [y for _, y in finite(history.curve(name))]
    return statistics.median(values[len(values) // 2 :]) if values else None


def over(events: Sequence[Event], axis: str, name: str) -> list[Point]:
    """A field of log lines over their steps or samples."""
    pairs = ((number(e.get(axis)), number(e.get(name))) for e in events)
    return [(x, y) for x, y in pairs if x is not None and y is not None]


def waits_of(history: History, axis: str) -> list[Point]:
    """Waiting for data in % of each step."""
    whole = dict(over(history.steps, axis, "step_s"))
    return [(x, 100 * y / whole[x]) for x, y in over(history.steps, axis, "data_wait_s") if whole.get(x)]
