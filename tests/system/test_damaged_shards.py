"""From a damaged disk to a refusal: verify names what is wrong, and training does not begin."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import damage

from shards.manifest import Manifest

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def damaged(drawn_shards: Path, tmp_path: Path) -> tuple[Path, str]:
    """The last shard cut by 1 KB, a byte flipped in another one; where, and the key that was hit."""
    folder = shutil.copytree(drawn_shards, tmp_path / "shards")
    [key] = damage(folder, 42)  # the third sample of the second shard
    last = folder / Manifest.load(folder).of_split("train")[-1].name
    os.truncate(last, last.stat().st_size - 1024)
    return folder, key


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *map(str, arguments)], cwd=PROJECT, capture_output=True, text=True, check=False
    )


def test_verify_names_every_damaged_shard_and_the_first_bad_key(damaged: tuple[Path, str]) -> None:
    folder, key = damaged
    done = run("shards", "verify", folder)
    assert done.returncode == 1
    assert f"train-000001.tar: {key}: crc32 of {key}.png is" in done.stdout
    assert "train-000002.tar: has" in done.stdout
    assert "train-000000" not in done.stdout
    assert "val-000000" not in done.stdout


def test_training_refuses_damaged_shards_before_a_model_is_there(damaged: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = damaged
    settings = [f"data.shards={folder}", f"run.dir={tmp_path / 'run'}"]
    done = run("xctrain", "train", "configs/demo.yaml", *settings, "train.num_steps=1")
    assert done.returncode in (1, 2)
    assert "train-000002.tar: has" in done.stderr
    assert "the manifest says" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "run").rglob("*.safetensors"))
    last = folder / "train-000002.tar"
    with last.open("ab") as file:
        file.write(bytes(1024))  # whole again: now only the flipped byte is wrong, which sizes do not show
    done = run("xctrain", "train", "configs/demo.yaml", *settings, "train.num_steps=1", "data.verify=full")
    assert done.returncode in (1, 2)
    assert "train-000001.tar" in done.stderr
    assert "Traceback" not in done.stderr
