"""A contact sheet of a shard folder: one HTML file with pictures and captions, which needs no network."""

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from shards.errors import DamagedSampleError, counted
from shards.manifest import Manifest
from shards.reader import SplitReader
from shards.sample import Sample

SIDE_PX = 320


@dataclass(frozen=True)
class Sheet:
    """The page, the keys on it in order, and what was found damaged."""

    html: str
    keys: tuple[str, ...]
    damaged: tuple[str, ...]


def contact_sheet(folder: Path, manifest: Manifest, splits: Sequence[str], number: int) -> Sheet:
    """``number`` samples of each split, or all if there are fewer, spread evenly over its shards."""
    keys: list[str] = []
    damaged: list[str] = []
    sections = []
    for split in splits:
        reader = SplitReader(folder, split, manifest)
        shown = min(number, len(reader))
        figures = "".join(_figures(reader, [i * len(reader) // shown for i in range(shown)], keys, damaged))
        note = f"{shown:,} of {counted(len(reader), 'sample')} in {counted(len(reader.shards), 'shard')}"
        sections.append(f'<h2>{escape(split)} <small>{note}</small></h2><div class="gallery">{figures}</div>')
    template = Template(Path(__file__).with_name("preview.html").read_text(encoding="utf-8"))
    html = template.substitute(
        name=escape(folder.resolve().name), manifest_id=manifest.manifest_id[:16], sections="".join(sections)
    )
    return Sheet(html, tuple(keys), tuple(damaged))


def _figures(reader: SplitReader, indices: Sequence[int], keys: list[str], damaged: list[str]) -> Iterator[str]:
    for index in indices:
        key = reader.key(index)
        keys.append(key)
        try:
            sample = reader.read(index)
            picture = f'<img src="{_thumbnail(sample)}" alt="" loading="lazy">'
        except DamagedSampleError as error:
            damaged.append(str(error))
            yield _figure(key, "damaged", f'<p class="bad">{escape(str(error))}</p>', [])
            continue
        meta = reader.meta(index)
        about = ", ".join(
            [f"{meta.width} x {meta.height}", sample.extension, *(f for f in meta.flags if f != "converted")]
        )
        yield _figure(key, picture, f'<span class="sub">{escape(about)}</span>', sample.captions)


def _figure(key: str, picture: str, about: str, captions: Sequence[str]) -> str:
    lines = "".join(f"<li>{escape(caption)}</li>" for caption in captions)
    return (
        f'<figure><div class="picture">{picture}</div><figcaption><span class="key">{escape(key)}</span>{about}'
        f"<ul>{lines}</ul></figcaption></figure>"
    )


def _thumbnail(sample: Sample) -> str:
    """A small JPEG as data URL."""
    image = sample.open_image()
    image.thumbnail((SIDE_PX, SIDE_PX))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()
