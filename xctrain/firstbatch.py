"""What the model is given, to look at: the pictures as it sees them, and every token with the targets marked."""

import base64
import io
from collections.abc import Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from shards.atomic import write_file
from xctrain.loss import IGNORED

if TYPE_CHECKING:
    from PIL.Image import Image

    from xctrain.collate import Batch
    from xctrain.models import Family

NAME = "first-batch.html"
MAX_ROWS = 16
_SIDE_PX = 280
_FOLDED = 4  # equal tokens in a row, such as those of a picture, that are shown once with their number


def write_first_batch(folder: Path, family: "Family", batch: "Batch") -> Path:
    """Write the page of a micro-batch to a run folder, and return where it lies."""
    path = folder / NAME
    write_file(path, render(family, batch).encode("utf-8", "backslashreplace"))
    return path


def render(family: "Family", batch: "Batch") -> str:
    """The page; its first rows where there are many. Everything that came from the data is escaped."""
    num_rows = len(batch.labels)
    tokens, pictures = family.tokens(batch), family.pictures(batch)
    names = batch.keys if len(batch.keys) == num_rows else [""] * num_rows
    rows = [
        _row(name, pictures[i] if pictures else [], tokens[i], batch.labels[i].tolist())
        for i, name in enumerate(names[:MAX_ROWS])
    ]
    template = Template(Path(__file__).with_name("firstbatch.html").read_text(encoding="utf-8"))
    return template.substitute(
        rows="\n".join(rows),
        num_rows=f"{num_rows} rows" if num_rows <= MAX_ROWS else f"the first {MAX_ROWS} of {num_rows} rows",
        positions=f"{batch.positions[0]:,}",
        num_targets=f"{batch.num_targets:,}",
        num_tokens=f"{sum(len(text) for text in tokens):,}",
        padding=f"{num_rows * batch.labels.shape[1] - sum(len(text) for text in tokens):,}",
        pictures="" if pictures else "The model takes its pictures in pieces that cannot be drawn.",
    )


def _row(key: str, pictures: "Sequence[Image]", tokens: Sequence[str], labels: Sequence[int]) -> str:
    marked = list(zip(tokens, (label != IGNORED for label in labels), strict=False))  # labels go on over padding
    spans = []
    for (text, target), run in groupby(marked):
        times = len(list(run))
        shown = escape(text).replace("\n", "⏎<br>") or "·"
        kind = "target" if target else "given"
        if times < _FOLDED:
            spans += [f'<span class="{kind}">{shown}</span>'] * times
        else:
            spans.append(f'<span class="{kind}">{shown}<sub>×{times:,}</sub></span>')
    drawn = "".join(map(_drawn, pictures))
    num_targets = sum(target for _, target in marked)
    return (
        f"<section><h2>{escape(key)} <small>{len(tokens):,} tokens, {num_targets:,} of them targets</small></h2>"
        f'<div class="pictures">{drawn}</div><p class="tokens">{"".join(spans)}</p></section>'
    )


def _drawn(picture: "Image") -> str:
    """A picture at a size at which people see something; every pixel of a small one is a square."""
    width, height = picture.size
    enlarged = ' class="enlarged"' if max(width, height) < _SIDE_PX else ""
    return f'<img src="{_png(picture)}" alt="" title="{width} x {height}"{enlarged}>'


def _png(picture: "Image") -> str:
    small = picture.copy()
    small.thumbnail((_SIDE_PX, _SIDE_PX))
    data = io.BytesIO()
    small.save(data, "PNG")
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
