"""What the pages of runs share: style sheet, tables, small pictures. Everything that came from files is escaped."""

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from xctrain.history import number

THUMBNAIL_PX = 480


def fill(template: str, title: str, **parts: str) -> str:
    """A page: ``page.html``, which has the style sheet, around a template of this folder. Title and parts are HTML."""
    body = _read(template).substitute(title=title, **parts)
    return _read("page.html").substitute(title=title, body=body.rstrip())


def _read(template: str) -> Template:
    return Template(Path(__file__).with_name(template).read_text(encoding="utf-8"))


class Bad(int):
    """A count that should be 0."""


def table(title: str, note: str, heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A heading and a table; nothing where there are no rows."""
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    if not body:
        return ""
    head = "".join(f"<th>{h}</th>" for h in heads)
    inner = f'<div class="scroll tall"><table><tr>{head}</tr>{body}</table></div>'
    return f'<h2>{title} <small>{note}</small></h2><div class="card">{inner}</div>'


def cell(value: Any) -> str:
    """One cell of a table."""
    text = "–" if value is None else f"{value:,}" if isinstance(value, int) else escape(str(value))
    return f'<td class="bad">{text}</td>' if isinstance(value, Bad) else f"<td>{text}</td>"


def warnings(texts: Iterable[Any]) -> str:
    """A paragraph each."""
    return "".join(f'<p class="note warn">{escape(str(text))}</p>' for text in texts)


def figure(value: Any, digits: int = 3) -> str:
    """A score, or a dash where there is none."""
    read = number(value)
    return "–" if read is None else f"{read:,.{digits}f}"


def caption(line: Mapping[str, Any]) -> str:
    """What a line of captions says, as HTML; an untrained model says control characters too."""
    text = str(line.get("caption", "")).strip()
    return escape("".join(c if c.isprintable() else "·" for c in text)) or "<i>nothing</i>"


def picture(key: str, data: bytes | None) -> str:
    """A frame with a small picture, or words where it is absent or none."""
    source = thumbnail(data)
    image = f'<img src="{source}" alt="">' if source else "no picture"
    return f'<div class="picture" title="{escape(key)}">{image}</div>'


def references(line: Mapping[str, Any]) -> str:
    """What people said of the picture; nothing where that is not known."""
    found = line.get("references")
    said = "".join(f"<li>{escape(str(r).strip())}</li>" for r in (found if isinstance(found, list) else ()))
    return f"<div><span>people said</span><ul>{said}</ul></div>" if said else ""


def thumbnail(data: bytes | None, side_px: int = THUMBNAIL_PX) -> str:
    """A small JPEG as a data URL, empty where the bytes are no picture."""
    small = small_jpeg(data, side_px)
    return "data:image/jpeg;base64," + base64.b64encode(small).decode() if small else ""


def small_jpeg(data: bytes | None, side_px: int = THUMBNAIL_PX) -> bytes:
    """A small JPEG, empty where the bytes are no picture."""
    if not data:
        return b""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            image.draft("RGB", (side_px, side_px))
            small = image.convert("RGB")
        small.thumbnail((side_px, side_px))
        file = io.BytesIO()
        small.save(file, "JPEG", quality=82, optimize=True)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return b""
    return file.getvalue()
