"""Several runs on one HTML page that needs no network: curves over each other, end figures, settings, captions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from shards.atomic import write_file
from xctrain.charts import Chart, Line, Mark, smooth, wide
from xctrain.endfigures import Compared, end_figures, over, waits_of
from xctrain.history import Event, History, number
from xctrain.page import caption, fill, picture, references, warnings
from xctrain.report import SCORES, marks, span_of

NUM_COLOURS = 8  # of the style sheet; further runs have them again, dashed
NUM_PICTURES = 12
_PLACES = ("run.dir",)  # settings that differ by necessity


def write_comparison(
    run_dirs: Sequence[Path], out: Path, audits: Sequence[Mapping[str, Any] | None], images: Mapping[str, bytes]
) -> Path:
    """Write the page of several runs to ``out``, and return it. ``audits``: of each run, as the report has them."""
    histories = [History.read(folder) for folder in run_dirs]
    styles = [f"s{i % NUM_COLOURS}{' again' if i >= NUM_COLOURS else ''}" for i in range(len(histories))]
    runs = [Compared(*found) for found in zip(names_of(run_dirs), styles, histories, audits, strict=True)]
    write_file(out, render(runs, images).encode())
    return out


def names_of(run_dirs: Sequence[Path]) -> list[str]:
    """The shortest ends of their paths that tell the runs apart."""
    paths = [path.resolve() for path in run_dirs]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len({*names}) == len({*paths}):
            return names
    raise AssertionError


def render(runs: Sequence[Compared], images: Mapping[str, bytes]) -> str:
    """The page."""
    sizes = {run.history.setting("train.global_batch") for run in runs}
    axis = "step" if len(sizes) == 1 else "samples_consumed"
    keys = _common_keys(runs, images)
    differing = list(differences(runs))
    return fill(
        "compare.html",
        title=escape(f"{len(runs)} runs compared"),
        subtitle=escape(" · ".join(dict.fromkeys(_model(run.history) for run in runs))),
        legend="".join(f'<span><i class="key {run.style}"></i>{escape(run.name)}</span>' for run in runs),
        doubts=warnings(doubt for run in runs for doubt in run.history.doubts()),
        figures=end_figures(runs),
        axis="steps" if axis == "step" else "samples, as the global batches differ",
        loss=wide(
            Chart(
                [Line(smooth(over(run.history.steps, axis, "loss"), span_of(run.history)), run.style) for run in runs],
                [mark for run in runs for mark in _marks(run, axis)],
            )
        ),
        charts="".join(_charts(runs, axis)),
        settings=_settings(runs, differing),
        settings_note=f"{len(differing)} of those in config.yaml and environment.json",
        gallery="".join(_card(runs, key, images.get(key)) for key in keys)
        or '<div class="card"><p class="sub">The runs have not captioned the same held-out pictures.</p></div>',
        gallery_note=f"the newest captions of the first {len(keys)} that all have captioned" if keys else "",
    )


def _model(history: History) -> str:
    return str(history.setting("model.path") or history.setting("model.family") or history.name)


def _marks(run: Compared, axis: str) -> Iterator[Mark]:
    """The run's kills and stops in its own colour."""
    starts = run.history.starts
    for mark, start in zip(marks(starts), starts[1:], strict=True):
        place = number(start.get(axis))
        if place is not None:
            label = str(start.get("previous_end") or "ended")
            yield replace(mark, step=place, label=label, style=run.style, detail=f"{run.name}: {mark.detail}")


def _charts(runs: Sequence[Compared], axis: str) -> Iterator[str]:
    def steps(name: str) -> list[Line]:
        return [Line(smooth(over(r.history.steps, axis, name), span_of(r.history)), r.style) for r in runs]

    def evals(name: str) -> list[Line]:
        return [Line(over(r.history.evals, axis, name), r.style, dots=True) for r in runs]

    breaks = [replace(mark, label="") for run in runs for mark in _marks(run, axis)]
    waits = [Line(smooth(waits_of(run.history, axis), span_of(run.history)), run.style) for run in runs]
    charts = [
        ("Held-out loss", "", evals("loss"), False),
        *((SCORES[name], "held-out", evals(name), True) for name in ("bleu4", "cider", "rouge_l")),
        ("Speed", "samples a second, smoothed", steps("samples_per_s"), True),
        ("Waiting for data", "% of a step, smoothed", waits, True),
        ("Utilisation", "model FLOPs, % of the GPUs' peak, smoothed", _percent(steps("mfu")), True),
        ("Gradient norm", "before clipping, smoothed", steps("grad_norm"), False),
        ("Learning rate", "", [Line(over(r.history.steps, axis, "lr"), r.style) for r in runs], True),
    ]
    for title, unit, lines, from_zero in charts:
        if any(line.points for line in lines):
            chart = Chart(lines, breaks, from_zero=from_zero).svg()
            yield f'<div class="card"><h3>{title} <small>{unit}</small></h3>{chart}</div>'


def _percent(lines: Sequence[Line]) -> list[Line]:
    return [replace(line, points=[(x, 100 * y) for x, y in line.points]) for line in lines]


# Settings


def differences(runs: Sequence[Compared]) -> Iterator[tuple[str, list[str | None]]]:
    """Settings, and what the environment was, that are not the same in all runs, with the value of each."""
    flat = [
        dict(flatten(run.history.config)) | {f"environment.{k}": v for k, v in flatten(run.history.environment)}
        for run in runs
    ]
    for name in dict.fromkeys(name for values in flat for name in values):
        found = [values.get(name) for values in flat]
        if len({*found}) > 1 and name not in _PLACES and not name.startswith("environment.command"):
            yield name.removeprefix("environment."), found


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as ``section.field`` and text."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)


def _settings(runs: Sequence[Compared], differing: Sequence[tuple[str, list[str | None]]]) -> str:
    if not differing:
        return '<div class="card"><p class="sub">None: the runs have the same config and environment.</p></div>'
    heads = "".join(f'<th><i class="key {run.style}"></i>{escape(run.name)}</th>' for run in runs)
    rows = []
    for name, values in differing:
        cells = "".join(f'<td class="text">{"–" if v is None else escape(v)}</td>' for v in values)
        rows.append(f'<tr><td class="mono">{escape(name)}</td>{cells}</tr>')
    table = f'<table class="settings"><tr><th>Setting</th>{heads}</tr>{"".join(rows)}</table>'
    return f'<div class="card"><div class="scroll">{table}</div></div>'


# Captions


def _newest(history: History) -> dict[str, tuple[int, Event]]:
    """The newest caption of each picture, and the step that it was written after."""
    return {key: (step, line) for step, lines in sorted(history.captions.items()) for key, line in lines.items()}


def _common_keys(runs: Sequence[Compared], images: Mapping[str, bytes]) -> list[str]:
    said = [_newest(run.history) for run in runs]
    keys = [key for key in (said[0] if said else ()) if all(key in other for other in said)]
    return ([key for key in keys if key in images] or keys)[:NUM_PICTURES]


def _card(runs: Sequence[Compared], key: str, data: bytes | None) -> str:
    parts = []
    for run in runs:
        step, line = _newest(run.history)[key]
        label = f'<span><i class="key {run.style}"></i>{escape(run.name)}, step {step}</span>'
        parts.append(f"<div>{label}{caption(line)}</div>")
    parts.append(references(_newest(runs[0].history)[key][1]))
    return f"<figure>{picture(key, data)}<figcaption>{''.join(parts)}</figcaption></figure>"
