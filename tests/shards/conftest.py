"""Golden values, and small shard folders to read and to damage."""

import importlib.util
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from shards.manifest import Manifest, ShardEntry
from shards.sample import Sample
from shards.writer import ShardWriter

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="session")
def golden() -> Path:
    return GOLDEN


@pytest.fixture(scope="session")
def remake() -> ModuleType:
    """The script that writes the golden values, as a module."""
    spec = importlib.util.spec_from_file_location("remake_shards", GOLDEN / "remake_shards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sample(number: int) -> Sample:
    """A sample that is different for every number; its picture is not one."""
    meta = {"image_id": number, "width": 10 + number, "height": 20, "captions": [f"caption {number}", "ü"]}
    return Sample(f"{number:012d}", bytes([number % 256]) * (1 + number * 37), "jpg", meta)


@pytest.fixture(scope="session")
def make_sample() -> Callable[[int], Sample]:
    return sample


def write_dataset(folder: Path, sizes: Sequence[int], split: str = "train") -> Manifest:
    entries: list[ShardEntry] = []
    number = 0
    for i, size in enumerate(sizes):
        with ShardWriter(folder, f"{split}-{i:06d}", split) as writer:
            for _ in range(size):
                writer.write(sample(number))
                number += 1
        entries.append(writer.entry)
    manifest = Manifest(tuple(entries), {"seed": 1})
    manifest.save(folder)
    return manifest


@pytest.fixture(scope="session")
def make_dataset() -> Callable[[Path, Sequence[int]], Manifest]:
    return write_dataset


@pytest.fixture(scope="session")
def _dataset_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dataset")
    write_dataset(folder, [4, 3, 5])
    return folder


@pytest.fixture
def dataset(_dataset_once: Path, tmp_path: Path) -> Path:
    """A private copy of shards of 4, 3 and 5 samples, keys 000000000000 to 000000000011."""
    return Path(shutil.copytree(_dataset_once, tmp_path / "shards"))
