"""What a run did, as one HTML file that needs no network: curves, kills, scores, captions before and after, the audit."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from shards.atomic import write_file
from xctrain.best import best_step
from xctrain.charts import Chart, Line, Mark, finite, smooth, wide
from xctrain.gallery import gallery, note
from xctrain.history import Event, History, curve, number
from xctrain.page import figure, fill, table, warnings
from xctrain.proof import audit_table, verdict

SCORES = {
    "loss": "Loss",
    "bleu1": "BLEU-1",
    "bleu2": "BLEU-2",
    "bleu3": "BLEU-3",
    "bleu4": "BLEU-4",
    "rouge_l": "ROUGE-L",
    "cider": "CIDEr",
    "length_ratio": "Length ratio",
}
_SETTINGS = {
    "model": ("family", "path", "prompt"),
    "data": ("shards", "split", "captions"),
    "train": ("global_batch", "micro_batch", "num_steps", "epochs", "seed"),
    "optim": ("lr",),
    "order": ("fragment", "window", "lanes"),
}


def write_report(
    run_dir: Path,
    out: Path | None = None,
    *,
    audit: Mapping[str, Any] | None = None,
    images: Mapping[str, bytes] | None = None,
) -> Path:
    """Write the page to ``out``, ``run_dir/report.html`` unless given, and return where it lies.

    ``audit`` is what ``python -m xctrain audit --json`` prints, ``images`` the held-out pictures' files by key.
    """
    path = out or run_dir / "report.html"
    write_file(path, render(History.read(run_dir), audit, images or {}).encode())
    return path


def render(history: History, audit: Mapping[str, Any] | None, images: Mapping[str, bytes]) -> str:
    """The page. Everything that came from files is escaped."""
    return fill(
        "report.html",
        title=f"Run report: {escape(history.name)}",
        name=escape(history.name),
        subtitle=_subtitle(history),
        doubts=warnings(history.doubts()),
        tiles="".join(
            f'<div class="card tile"><b>{escape(b)}</b><span>{escape(s)}</span></div>' for b, s in tiles(history)
        ),
        verdict=verdict(audit),
        loss=wide(_loss_chart(history)),
        loss_legend=_legend(history),
        charts=_charts(history),
        scores=_scores(history),
        scores_note=_scores_note(history),
        gallery=gallery(history, images),
        gallery_note=note(history, images),
        starts=_starts(history),
        audit=audit_table(audit),
        settings=_settings(history),
    )


# What happened


def marks(starts: Sequence[Event]) -> list[Mark]:
    """A vertical line for each start after the first, at the step that it went on from."""
    found = []
    for start in starts[1:]:
        step, lost = number(start.get("step")) or 0, number(start.get("lost_steps")) or 0
        killed = start.get("previous_end") == "killed"
        ended = str(start.get("previous_end") or "ended")
        label = f"{ended} at {step + lost:g}" + (f", on from {step:g}" if lost else "")
        again = f", {lost:g} step{'' if lost == 1 else 's'} done again" if lost else ""
        on = f"on {start.get('world_size', '?')} processes"
        detail = f"{ended} at step {step + lost:g}; went on from step {step:g}{again}, {on}"
        found.append(Mark(step, label, "stop" if killed else "pause", detail))
    return found


def tiles(history: History) -> list[tuple[str, str]]:
    """The few numbers that say how it went."""
    last = history.steps[-1] if history.steps else {}
    shown = [(f"{int(number(last.get('step')) or 0):,}" if history.steps else "No", "steps")]
    samples = number(last.get("samples_consumed"))
    if samples is not None:
        epochs = number(last.get("epoch"))
        shown.append((f"{int(samples):,}", "samples" if epochs is None else f"samples, {epochs:.1f} epochs"))
    smoothed = smooth(history.curve("loss"), span_of(history))
    if smoothed:
        shown.append((f"{smoothed[-1][1]:.3f}", f"loss, from {finite(history.curve('loss'))[0][1]:.3f}"))
    for name in ("bleu4", "cider"):
        values = [v for v in (number(e.get(name)) for e in history.evals) if v is not None]
        if values:
            shown.append((f"{values[-1]:.3f}", SCORES[name] + (f", from {values[0]:.3f}" if len(values) > 1 else "")))
    kills = sum(s.get("previous_end") == "killed" for s in history.starts[1:])
    if kills:
        shown.append((str(kills), "kill survived" if kills == 1 else "kills survived"))
    return shown


def _subtitle(history: History) -> str:
    parts = [str(v) for v in (history.setting("model.path") or history.setting("model.family"),) if v]
    if history.starts:
        began = number(history.starts[0].get("time"))
        if began is not None:
            parts.append(f"begun {datetime.fromtimestamp(began, UTC):%Y-%m-%d %H:%M} UTC")
        worlds = dict.fromkeys(str(s.get("world_size", "?")) for s in history.starts)
        parts.append(f"on {', then '.join(worlds)} process{'' if list(worlds) == ['1'] else 'es'}")
    ended = {"done": "finished", "stopped": "stopped after saving"}
    if history.stops and (not history.steps or history.stops[-1].get("step") == history.steps[-1].get("step")):
        reason = str(history.stops[-1].get("reason", ""))
        parts.append(ended.get(reason, reason))
    return escape(" · ".join(p for p in parts if p)) or "No log yet."


# Curves


def span_of(history: History) -> int:
    return max(5, len(history.steps) // 40)


def _loss_chart(history: History) -> Chart:
    points = history.curve("loss")
    lines = [
        Line(points, "raw"),
        Line(smooth(points, span_of(history))),
        Line(curve(history.evals, "loss"), "held", dots=True),
    ]
    return Chart(lines, marks(history.starts))


def _legend(history: History) -> str:
    parts = ['<i class="key raw"></i>each step', '<i class="key"></i>smoothed']
    if curve(history.evals, "loss"):
        parts.append(f'<i class="key held"></i>held-out ({escape(_split(history))})')
    if len(history.starts) > 1:
        parts.append('<i class="key stop"></i>killed or stopped, and gone on from a checkpoint')
    return "".join(parts)


def _charts(history: History) -> str:
    span = span_of(history)
    waits = [
        (step, 100 * wait / whole)
        for (step, wait), (_, whole) in zip(history.curve("data_wait_s"), history.curve("step_s"), strict=False)
        if whole > 0
    ]
    norms, speeds = history.curve("grad_norm"), history.curve("samples_per_s")
    breaks = [Mark(m.step, "", m.style, m.detail) for m in marks(history.starts)]
    used = [(step, 100 * share) for step, share in history.curve("mfu")]
    charts = [
        ("Learning rate", "", Chart([Line(history.curve("lr"))], breaks, from_zero=True)),
        ("Gradient norm", "before clipping", Chart([Line(norms, "raw"), Line(smooth(norms, span))], breaks)),
        ("Speed", "samples a second", Chart([Line(speeds, "raw"), Line(smooth(speeds, span))], breaks, from_zero=True)),
        (
            "Waiting for data",
            "% of a step",
            Chart([Line(waits, "raw"), Line(smooth(waits, span))], breaks, from_zero=True),
        ),
    ]
    if used:
        curves = [Line(used, "raw"), Line(smooth(used, span))]
        charts.append(("Utilisation", "model FLOPs, % of the GPUs' peak", Chart(curves, breaks, from_zero=True)))
    return "".join(
        f'<div class="card"><h3>{title} <small>{unit}</small></h3>{chart.svg()}</div>' for title, unit, chart in charts
    )


# Scores and captions


def _split(history: History) -> str:
    return (
        str(history.evals[-1].get("split", "split")) if history.evals else str(history.setting("eval.split") or "split")
    )


def _scores_note(history: History) -> str:
    if not history.evals:
        return ""
    last = history.evals[-1]
    source = f" of {last['source']}" if last.get("source") else ""
    metric = history.setting("checkpoint.best")
    scores = {e["step"]: e for e in history.evals if isinstance(e.get("step"), int) and e["step"] > 0}
    best = best_step(scores, metric)
    kept = f", best by {SCORES.get(metric, metric)} and kept: step {best:,}" if best else ""
    return escape(f"{last.get('num_images', '?')} pictures of split {_split(history)}{source}{kept}")


def _scores(history: History) -> str:
    if not history.evals:
        return '<div class="card"><p class="sub">This run was not evaluated; eval.every=N scores a held-out split.</p></div>'
    names = [n for n in SCORES if any(n in e for e in history.evals)]
    rows = ["<tr><th>Step</th>" + "".join(f"<th>{SCORES[n]}</th>" for n in names) + "</tr>"]
    for event in history.evals:
        step = event.get("step", "?")
        style = ' class="last"' if event is history.evals[-1] and len(history.evals) > 1 else ""
        name = "untrained" if step == 0 else f"{step:,}" if isinstance(step, int) else str(step)
        cells = "".join(f"<td>{figure(event.get(n))}</td>" for n in names)
        rows.append(f"<tr{style}><td>{escape(name)}</td>{cells}</tr>")
    if len(history.evals) > 1:
        changes = (_change(n, history.evals[0].get(n), history.evals[-1].get(n)) for n in names)
        rows.append(f'<tr class="change"><td>change</td>{"".join(changes)}</tr>')
    for event in history.others:
        cells = "".join(f"<td>{figure(event.get(n))}</td>" for n in names)
        rows.append(
            f"<tr><td>{escape(str(event.get('source')))}, {escape(str(event.get('step', '?')))}</td>{cells}</tr>"
        )
    if history.blind:
        cells = "".join(f"<td>{figure(history.blind[-1].get(n))}</td>" for n in names)
        rows.append(f"<tr><td>shown blank pictures</td>{cells}</tr>")
    prompt = history.setting("model.prompt")
    how = (
        "BLEU and ROUGE-L from 0 to 1, CIDEr (CIDEr-D) from 0 to 10, on Penn Treebank words as in the COCO evaluation; "
        f"greedy captions{f', prompt “{prompt}”' if prompt else ''}"
    )
    last = history.evals[-1].get("warnings")
    body = f'<div class="scroll"><table>{"".join(rows)}</table></div>'
    doubts = warnings(last if isinstance(last, list) else ())
    return f'<div class="card">{body}{doubts}<p class="note">{escape(how)}</p></div>'


def _change(name: str, before: Any, after: Any) -> str:
    old, new = number(before), number(after)
    if old is None or new is None or name == "length_ratio":
        return "<td></td>"
    worse = new > old if name == "loss" else new < old
    style = ' class="worse"' if worse else ""
    return f"<td{style}>{new - old:+.3f}</td>"


# Starts, settings


def _starts(history: History) -> str:
    rows = []
    for start in history.starts:
        time, lost = number(start.get("time")), start.get("lost_steps")
        when = "?" if time is None else f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S}"
        resumed = start.get("resumed_from")
        began = "the beginning" if resumed is None else f"step {resumed}"
        rows.append([when, began, start.get("world_size", "?"), start.get("previous_end") or "–", lost or "–"])
    heads = ("Time (UTC)", "Went on from", "Processes", "Before that", "Steps done again")
    return table("Starts", "", heads, rows)


def _settings(history: History) -> str:
    names = [f"{section}.{field}" for section, fields in _SETTINGS.items() for field in fields]
    shown = [(name, history.setting(name)) for name in names]
    pairs = "".join(f"<dt>{n}</dt><dd>{escape(str(v))}</dd>" for n, v in shown if v is not None)
    parts = (
        [f'<div class="card"><dl>{pairs}</dl></div>']
        if pairs
        else ['<p class="sub">No config.yaml in the run folder.</p>']
    )
    for title, values in (("Whole config", history.config), ("Environment", history.environment)):
        if values:
            text = escape(json.dumps(values, indent=1, ensure_ascii=False, default=str))
            parts.append(f'<details><summary>{title}</summary><pre class="mono">{text}</pre></details>')
    return "".join(parts)
