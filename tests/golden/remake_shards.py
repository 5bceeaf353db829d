"""Writes the expected values of hash, order and shard format anew: python tests/golden/remake_shards.py

A difference to what is committed is a break (SHARD FORMAT or ORDER in the changelog): old datasets and runs would no
longer be read or continued. energon.idx is made by another tool, see compare_energon.py.
"""

import base64
import hashlib
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from shards.hashing import mix64, slot_digest, text64
from shards.manifest import Addition, Manifest, ShardEntry
from shards.mix import Mix, Part, Stretches
from shards.order import Order, OrderSettings
from shards.sample import Sample
from shards.stream import Stream
from shards.writer import ShardWriter

HERE = Path(__file__).parent

# One picture of 3 x 2 pixels in each encoding, fixed as bytes because encoders change between versions.
PICTURES = {
    "png": "iVBORw0KGgoAAAANSUhEUgAAAAMAAAACCAIAAAASFvFNAAAAHElEQVR4nGP4z8DA8J+BgeE/Cxcn56+T0exMLAA5QgVJkP6LNwAA"
    "AABJRU5ErkJggg==",
    "webp": "UklGRkYAAABXRUJQVlA4TDoAAAAvAkAAAC+goG0U6F7wrwhp2CCTtim96t/pFExB2zZMP8nxx7H5D/Af4kHaNrcDAgHKWPHANhH9j/EC",
    "jpg": "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAKBueIx4ZKCMgoy0qqC+8P//8Nzc8P//////////////////////////////////////"
    "////////////////////wAALCAACAAMBAREA/8QAHwAAAQUBAQEBAQEAAAAAAAAAAAECAwQFBgcICQoL/8QAtRAAAgEDAwIEAwUF"
    "BAQAAAF9AQIDAAQRBRIhMUEGE1FhByJxFDKBkaEII0KxwRVS0fAkM2JyggkKFhcYGRolJicoKSo0NTY3ODk6Q0RFRkdISUpTVFVW"
    "V1hZWmNkZWZnaGlqc3R1dnd4eXqDhIWGh4iJipKTlJWWl5iZmqKjpKWmp6ipqrKztLW2t7i5usLDxMXGx8jJytLT1NXW19jZ2uHi"
    "4+Tl5ufo6erx8vP09fb3+Pn6/9oACAEBAAA/AIm6/gP5Cv/Z",
}
CAPTIONS = (["A red dot.", "Ein roter Fleck, größer als der grüne."], ["两个点"], ["a", "b", "c"], ["The last one."])


def golden_samples() -> list[tuple[Sample, tuple[str, ...]]]:
    """Four samples with their flags, all encodings and non-ASCII captions among them."""
    result = []
    for number, (extension, captions) in enumerate(zip(("png", "webp", "jpg", "png"), CAPTIONS, strict=True)):
        key = f"{number * 1234567:012d}"
        meta = {
            "image_id": number * 1234567,
            "file_name": f"a.b {number} ü.{extension}",
            "width": 3,
            "height": 2,
            "captions": captions,
        }
        sample = Sample(key, base64.b64decode(PICTURES[extension]), extension, meta)
        result.append((sample, ("gray",) if extension == "jpg" else ()))
    return result


def write_folder(folder: Path) -> Manifest:
    """The golden dataset: a shard of three samples and one of one."""
    samples = golden_samples()
    entries = []
    for name, split, part in (("train-000000", "train", samples[:3]), ("val-000000", "val", samples[3:])):
        with ShardWriter(folder, name, split) as writer:
            for sample, flags in part:
                writer.write(sample, flags)
        entries.append(writer.entry)
    manifest = Manifest(tuple(entries), {"filters": {"min_side_px": 1}})
    manifest.save(folder)
    return manifest


def addition(built: Manifest) -> Manifest:
    """The golden dataset with one more shard, of which only the entry is there."""
    more = ShardEntry("train-000001.tar", "train", 2, 4096, "1" * 64, "2" * 64, "3" * 64)
    return Manifest((*built.shards, more), built.settings, (Addition(built.manifest_id, {"build": {"seed": 0}}),))


def hash_values() -> dict[str, Any]:
    """Values of every function in hashing.py."""
    inputs = [(), (0,), (1,), (-1,), (2**64 - 1,), (2**64,), (7, 0, 0), (7, 0, 1), (7, 1, 0), (-3, 5, 2**40, 11)]
    keys = ["", "000000391895", "größe"]
    digests = slot_digest(np.arange(100), np.array([text64(f"{i:012d}") for i in range(100)], np.uint64))
    return {
        "mix64": [[list(values), f"{mix64(*values):016x}"] for values in inputs],
        "text64": [[key, f"{text64(key):016x}"] for key in keys],
        "sum of slot digests": f"{int(digests.sum(dtype=np.uint64)):016x}",
    }


def order_values() -> list[dict[str, Any]]:
    """Orders of small splits in full, and of a large one as a hash."""
    cases = [
        ([10, 7, 0, 13], OrderSettings(seed=7, fragment=4, window=12, lanes=3)),
        ([3], OrderSettings(seed=7, fragment=32)),
        ([5, 5], OrderSettings(seed=-1, fragment=1, window=4, lanes=4)),
        ([1000] * 118, OrderSettings(seed=0, fragment=32)),
    ]
    values = []
    for sizes, settings in cases:
        order = Order(sizes, settings)
        indices = order.indices(np.arange(3 * order.num_samples))
        short = len(indices) < 1000
        values.append(
            {
                "shard_sizes": sizes if short else [sizes[0], len(sizes)],
                "seed": settings.seed,
                "fragment": settings.fragment,
                "window": settings.window,
                "lanes": settings.lanes,
                "three epochs": indices.tolist() if short else _sha256(indices),
                "step of 12 at 24": [slot.n for slot in Stream(order, 12).step(24)],
            }
        )
    return values


def mix_values() -> list[dict[str, Any]]:
    """A mix of three datasets, one of them without some samples, and what follows where one has grown."""
    parts = [Part((10, 7), 1, (3, 12)), Part((6,), 3, (), 17), Part((2, 2), 2, (), 23)]
    grown = [Part((10, 7, 4), 1), Part((6,), 3, (), 21), Part((2, 2), 2, (), 27)]
    settings = OrderSettings(seed=7, fragment=4, window=12, lanes=3)
    first = Mix(parts, settings)
    change = 2 * first.num_positions
    stretches = Stretches([(0, first), (change, Mix(grown, settings, base_n=change, base_epoch=2))])
    places = stretches.places(np.arange(stretches.position_of(Fraction(4))))
    columns = {name: getattr(places, name).tolist() for name in ("part", "epoch", "lane", "index")}
    return [{"epochs begin at": [stretches.position_of(Fraction(e)) for e in range(5)]}, columns]


def _sha256(indices: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(indices.astype("<i8").tobytes()).hexdigest()


if __name__ == "__main__":
    built = write_folder(HERE / "shards")
    (HERE / "addition.json").write_bytes(addition(built).to_json())
    (HERE / "hash.json").write_text(json.dumps(hash_values(), indent=1) + "\n")
    (HERE / "mix.json").write_text(json.dumps(mix_values(), separators=(",", ":")).replace("],", "],\n") + "\n")
    (HERE / "order.json").write_text(json.dumps(order_values(), separators=(",", ":")).replace("},", "},\n") + "\n")
