"""Held-out pictures with what the model said of them on the way, for the report and for a page that grows while training."""

from collections.abc import Mapping
from html import escape
from pathlib import Path

from shards.atomic import write_file
from xctrain.history import Event, History
from xctrain.log import SAMPLES
from xctrain.page import caption, fill, picture, references, small_jpeg

NAME = "samples.html"
NUM_PICTURES = 12


def write_samples(run_dir: Path, images: Mapping[str, bytes]) -> Path:
    """Write the page of the captions so far, ``RUN/samples.html``, and small pictures for the trackers."""
    for key, data in images.items():
        small = run_dir / SAMPLES / f"{key}.jpg"
        if not small.exists():
            write_file(small, small_jpeg(data))
    history = History.read(run_dir)
    steps = sorted(history.captions)
    page = fill(
        "samples.html",
        title=f"Captions on the way: {escape(history.name)}",
        name=escape(history.name),
        subtitle=escape(
            f"what the model says of {len(images)} held-out pictures, up to step {steps[-1] if steps else 0:,}"
        ),
        gallery=gallery(history, images),
    )
    path = run_dir / NAME
    write_file(path, page.encode())
    return path


def shown_keys(history: History, images: Mapping[str, bytes]) -> list[str]:
    """The pictures that a page shows: those whose file is there, else all that were captioned."""
    found = dict.fromkeys(key for step in sorted(history.captions, reverse=True) for key in history.captions[step])
    return ([key for key in found if key in images] or list(found))[:NUM_PICTURES]


def note(history: History, images: Mapping[str, bytes]) -> str:
    """How many there are, and how they were chosen."""
    shown = len(shown_keys(history, images))
    return f"the first {shown}, not chosen" if shown else ""


def gallery(history: History, images: Mapping[str, bytes]) -> str:
    """A card for each picture: the newest caption, the first one, those between on demand, and what people said."""
    keys = shown_keys(history, images)
    if not keys:
        return '<div class="card"><p class="sub">No captions of held-out pictures yet.</p></div>'
    return "".join(_card(history, key, images.get(key)) for key in keys)


def _card(history: History, key: str, data: bytes | None) -> str:
    said: list[tuple[int, Event]] = [(n, c[key]) for n, c in sorted(history.captions.items()) if key in c]
    (last, after), before = said[-1], said[0] if len(said) > 1 else None
    parts = [f'<div class="after"><span>after step {last}</span>{caption(after)}</div>']
    if between := "".join(f"<li><span>step {n}</span> {caption(line)}</li>" for n, line in said[1:-1]):
        parts.append(f"<details><summary>{len(said) - 2} on the way</summary><ul>{between}</ul></details>")
    if before is not None:
        when = "before training" if before[0] == 0 else f"after step {before[0]}"
        parts.append(f'<div class="before"><span>{when}</span>{caption(before[1])}</div>')
    parts.append(references(after))
    return f"<figure>{picture(key, data)}<figcaption>{''.join(parts)}</figcaption></figure>"
