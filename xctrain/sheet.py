"""The samples of one step as a page: each picture with its captions, so that a loss spike can be looked at."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from shards.atomic import write_file
from shards.errors import DamagedSampleError, counted
from xctrain.history import History, number
from xctrain.page import fill, thumbnail
from xctrain.trained import Trained

_THUMBNAIL_PX = 320


def write_sheet(run: Trained, rows: Sequence[Mapping[str, Any]], title: str, out: Path) -> None:
    """Write one HTML file that needs no network; ``rows`` are those of ``audit.batch_at``."""
    history = History.read(run.config.run.dir)
    masked = {entry.n: entry.reason for entry in run.state.masked}
    page = fill(
        "sheet.html",
        title=escape(f"{history.name}, {title}"),
        name=escape(history.name),
        step=escape(title),
        facts=escape(" · ".join(_facts(run, rows, history))),
        cards="".join(_card(run, row, masked.get(row["n"])) for row in rows),
    )
    write_file(out, page.encode())


def _facts(run: Trained, rows: Sequence[Mapping[str, Any]], history: History) -> list[str]:
    ns = [row["n"] for row in rows]
    epochs = sorted({run.state.segment_at(n).epoch_at(n) for n in ns})
    facts = [
        f"positions {min(ns):,} to {max(ns):,}",
        f"epoch {' and '.join(map(str, epochs))}",
        counted(len(rows), "sample"),
    ]
    sources = [row["source"] for row in rows if "source" in row]
    facts += [f"{name} {sources.count(name)}" for name in dict.fromkeys(sources)]
    line = next((e for e in history.steps if e.get("samples_consumed") == max(ns) + 1), None)
    if line is None:
        return [*facts, "not trained yet" if min(ns) >= run.state.samples_consumed else "not in the log"]
    for name, label in (("loss", "loss"), ("grad_norm", "gradient norm")):
        if (value := number(line.get(name))) is not None:
            facts.append(f"{label} {value:.4g}")
    return facts


def _card(run: Trained, row: Mapping[str, Any], masked: str | None) -> str:
    damaged = row.get("damaged")
    try:
        picture = "" if damaged else thumbnail(run.data.reader.read(row["index"]).image, _THUMBNAIL_PX)
    except DamagedSampleError as error:
        picture, damaged = "", str(error)
    image = f'<img src="{picture}" alt="" loading="lazy">' if picture else "no picture"
    chosen = "".join(f"<div>{_text(text)}</div>" for text in row["chosen"])
    others = "".join(f"<li>{_text(text)}</li>" for text in row["captions"] if text not in row["chosen"])
    source = f"{escape(row['source'])} · " if "source" in row else ""
    why = masked or damaged
    parts = [
        f'<div class="mono">{escape(row["key"])}<span>{source}position {row["n"]:,} · epoch {row["epoch"]}</span></div>',
        f'<div class="warn">no loss: {escape(why)}</div>' if why else "",
        f'<div class="after">{chosen}</div>' if chosen else "",
        f"<ul>{others}</ul>" if others else "",
    ]
    return f'<figure><div class="picture">{image}</div><figcaption>{"".join(parts)}</figcaption></figure>'


def _text(text: str) -> str:
    return escape(str(text).strip()) or "<i>nothing</i>"
