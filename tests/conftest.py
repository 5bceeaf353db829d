"""Fixtures that every package's tests may use."""

import io
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from PIL import Image, ImageDraw

from shards import remote
from shards.manifest import Addition, Manifest
from shards.reader import SplitReader
from shards.sample import Sample
from shards.writer import ShardWriter

if TYPE_CHECKING:
    from objectstore import ObjectStore

# A shell starts what runs in its background with Ctrl-C ignored, and processes that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The committed lock file is tested; nothing here may ask the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# How long an example takes says nothing on a machine that does other work as well.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

COLORS = ("red", "green", "blue", "yellow", "black")


def drawn_sample(number: int, num_captions: int = 3) -> Sample:
    """A coloured shape and captions of unequal length; a pure function of its number."""
    rng = random.Random(number)
    color, shape, side = rng.choice(COLORS), rng.choice(("disc", "box")), rng.choice(("left", "right"))
    image = Image.new("RGB", (96, 64), "white")
    left = 6 if side == "left" else 54
    draw = ImageDraw.Draw(image)
    (draw.ellipse if shape == "disc" else draw.rectangle)([left, 14, left + 36, 50], fill=color)
    data = io.BytesIO()
    image.save(data, "PNG")
    captions = [
        f"a {color} {shape}",
        f"on the {side} there is a {color} {shape}",
        f"a {shape} that is {color} stands alone on the {side} side of a white picture",
    ]
    meta = {
        "image_id": number,
        "file_name": f"{number}.png",
        "width": 96,
        "height": 64,
        "captions": captions[:num_captions],
    }
    return Sample(f"{number:012d}", data.getvalue(), "png", meta)


def write_dataset(folder: Path, splits: dict[str, list[int]], first: int = 0) -> Manifest:
    """A shard folder with, for each split, shards of the given sizes; pictures are numbered from ``first`` on."""
    folder.mkdir(parents=True, exist_ok=True)
    entries, number = [], first
    for split, sizes in splits.items():
        for i, size in enumerate(sizes):
            with ShardWriter(folder, f"{split}-{i:06d}", split) as writer:
                for _ in range(size):
                    writer.write(drawn_sample(number))
                    number += 1
            entries.append(writer.entry)
    manifest = Manifest(tuple(entries))
    manifest.save(folder)
    return manifest


def add_shards(folder: Path, sizes: list[int], first: int = 5000, split: str = "train") -> Manifest:
    """Add shards to a dataset, as the build does: the old ones stay in front."""
    old = Manifest.load(folder)
    entries = []
    for i, size in enumerate(sizes):
        with ShardWriter(folder, f"{split}-{900 + first + i:06d}", split) as writer:
            for number in range(size):
                writer.write(drawn_sample(first + 100 * i + number))
        entries.append(writer.entry)
    manifest = Manifest((*old.shards, *entries), old.settings, (*old.additions, Addition(old.manifest_id)))
    manifest.save(folder)
    return manifest


def damage(shards: Path, *indices: int) -> list[str]:
    """Flip a byte of samples; their keys."""
    reader = SplitReader(shards, "train")
    keys = []
    for index in indices:
        shard, _ = reader.locate(index)
        meta = reader.meta(index)
        data = bytearray((shards / shard.name).read_bytes())
        data[meta.parts[0].offset + 40] ^= 255
        (shards / shard.name).write_bytes(data)
        keys.append(meta.key)
    return keys


@pytest.fixture(scope="session")
def drawn_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 training samples in 3 uneven shards and 12 held-out ones. Not to be changed: copy it first."""
    folder = tmp_path_factory.mktemp("drawn") / "shards"
    write_dataset(folder, {"train": [40, 40, 20], "val": [12]})
    return folder


@pytest.fixture(scope="module")
def store() -> Iterator["ObjectStore"]:
    """An S3 server of this machine, which the environment names; a bucket is in it."""
    import objectstore  # moto and s3fs are slow to import

    with objectstore.running() as running:
        yield running


@pytest.fixture
def quick_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits between tries are short."""
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.01)
