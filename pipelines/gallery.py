"""Thumbnails for the report: kept samples out of the shards, rejected files out of the source."""

import base64
import io
import json
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import simplejpeg
from PIL import Image, ImageOps

from pipelines import jpeg
from pipelines.filters import Rejection
from pipelines.images import open_images
from pipelines.measure import FORMATS, to_rgb
from pipelines.plan import PlannedSplit
from pipelines.records import id_order
from shards.manifest import Manifest, ShardEntry

SIDE_PX = 320
MOST_ALIKE = 5  # pictures of a group beside the one that stays
Shard = list[Mapping[str, Any]]


@dataclass(frozen=True)
class Shown:
    """One picture of the gallery; ``thumbnail`` is a data URL, empty where nothing could be decoded."""

    thumbnail: str
    title: str
    detail: str
    tag: str = ""


def kept(folders: Mapping[str, Path], manifest: Manifest, number: int) -> list[Shown]:
    """The first samples of every shard in turn, until there are ``number``."""
    per_shard = [_samples(folders[entry.name], entry, number) for entry in manifest.shards[:number]]
    return list(islice((s for s in chain.from_iterable(zip_longest(*per_shard)) if s), number))


def _samples(folder: Path, entry: ShardEntry, number: int) -> Iterator[Shown]:
    """One by one, as most of them are not asked for."""
    with (folder / entry.meta_name).open("rb") as lines, (folder / entry.name).open("rb") as tar:
        for line in islice(lines, -(-number // 4)):
            image, meta = (_payload(tar, part) for part in json.loads(line)["parts"])
            about = json.loads(meta)
            size = f"{about['width']} x {about['height']}, {entry.split}"
            yield Shown(thumbnail(image, 1 << 62), about["captions"][0], size)


def _payload(tar: Any, part: Mapping[str, Any]) -> bytes:
    tar.seek(part["offset"])
    data: bytes = tar.read(part["bytes"])
    return data


def rejected(
    splits: Sequence[PlannedSplit], rejects: Sequence[Mapping[str, Any]], number: int, max_pixels: int
) -> list[Shown]:
    """Rejected records of every reason in turn, until there are ``number``."""
    by_reason: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in sorted(rejects, key=lambda row: (row["reason"], row["split"], id_order(row["image_id"]))):
        by_reason[row["reason"]].append(row)
    chosen = islice((r for r in chain.from_iterable(zip_longest(*by_reason.values())) if r), number)
    return [_shown(row, splits, max_pixels, row["reason"]) for row in chosen]


def groups(
    splits: Sequence[PlannedSplit], rows: Sequence[Sequence[Mapping[str, Any]]], max_pixels: int
) -> list[list[Shown]]:
    """Pictures of groups that look alike: the one that stays, then the first of those that gave way to it."""
    shown = []
    for first, *others in rows:
        group = [_shown(row, splits, max_pixels, "gave way") for row in others[:MOST_ALIKE]]
        shown.append([_shown(first, splits, max_pixels, f"stays for {len(others):,}"), *group])
    return shown


def _shown(row: Mapping[str, Any], splits: Sequence[PlannedSplit], max_pixels: int, tag: str) -> Shown:
    """A file of the source; ``open_images`` opens each place once."""
    split = next(split for split in splits if split.name == row["split"])
    files, place = open_images(split.sources[row.get("source", 0)].images), row.get("place", row["file_name"])
    data = b"" if isinstance(files.stamp(place), Rejection) else files.read(place)
    picture = "" if isinstance(data, Rejection) else thumbnail(data, max_pixels)
    return Shown(picture, row["file_name"], row["detail"] or f"image {row['image_id']}, {row['split']}", tag)


def thumbnail(data: bytes, max_pixels: int) -> str:
    """A small JPEG as data URL; of a damaged JPEG as much as can be decoded; empty where that is nothing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            small = _small(data, max_pixels)
    except Exception:  # noqa: BLE001 - decoders raise anything at all over damaged bytes
        return ""
    out = io.BytesIO()
    small.save(out, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()


def _small(data: bytes, max_pixels: int) -> Image.Image:
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        if image.width * image.height > max_pixels:
            raise ValueError("too large to show")
        if image.format == "JPEG" and image.mode == "RGB":
            jpeg.require_few_scans(data)
            # at the smallest of TurboJPEG's scales that is not too small, in both directions
            least = {
                f"min_{name}": side * SIDE_PX // max(image.size)
                for name, side in zip(("width", "height"), image.size, strict=True)
            }
            pixels = simplejpeg.decode_jpeg(data, "RGB", **least, min_factor=1, strict=False)
            picture = Image.fromarray(pixels)
        else:
            picture = to_rgb(ImageOps.exif_transpose(image))
    picture.thumbnail((SIDE_PX, SIDE_PX))
    return picture
