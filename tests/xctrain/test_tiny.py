"""The small LLaVA that is built on the spot."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from xctrain.collate import Row
from xctrain.modelconfig import ModelConfig
from xctrain.models import open_family
from xctrain.models.tiny import build_tiny

CAPTIONS = ["a red circle above a blue square", "a dog", "a red dog"]
SCRIPT = """
import sys
from pathlib import Path
from xctrain.models.tiny import build_tiny
build_tiny(Path(sys.argv[1]), sys.argv[3:], int(sys.argv[2]))
"""


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_same_seed_and_captions_give_the_same_bytes_in_any_process(tmp_path: Path) -> None:
    build_tiny(tmp_path / "here", CAPTIONS, seed=3)
    # Another hash seed, another order of the captions, another number of threads.
    environment = {**os.environ, "PYTHONHASHSEED": "77", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "there"), "3", *reversed(CAPTIONS)]
    subprocess.run(command, check=True, env=environment, cwd=Path(__file__).parents[2])

    assert hashes(tmp_path / "here") == hashes(tmp_path / "there")
    assert "model.safetensors" in hashes(tmp_path / "here")


def test_seed_changes_the_weights_and_captions_the_tokenizer(tmp_path: Path) -> None:
    build_tiny(tmp_path / "a", CAPTIONS, seed=0)
    build_tiny(tmp_path / "b", CAPTIONS, seed=1)
    build_tiny(tmp_path / "c", ["nothing in common"], seed=0)
    a, b, c = hashes(tmp_path / "a"), hashes(tmp_path / "b"), hashes(tmp_path / "c")

    assert {name for name in a if a[name] != b[name]} == {"model.safetensors"}
    assert a["tokenizer.json"] != c["tokenizer.json"]


def test_building_leaves_the_random_state_and_nothing_aside(tmp_path: Path) -> None:
    before = torch.get_rng_state()

    build_tiny(tmp_path / "tiny", CAPTIONS, seed=0)

    assert torch.equal(torch.get_rng_state(), before)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_what_a_killed_build_left_is_no_model_and_in_nobodys_way(tmp_path: Path) -> None:
    left = tmp_path / ".tiny.tmp"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")

    build_tiny(tmp_path / "tiny", CAPTIONS, seed=0)

    assert not left.exists()
    assert (tmp_path / "tiny" / "config.json").exists()


def test_dropout_is_on_so_that_exact_resume_means_something(
    base_folders: Callable[[str], Path], rows: list[Row]
) -> None:
    family = open_family(ModelConfig(), base_folders("llava"))
    batch = family.collator(rows)

    family.module.train()
    assert family.module(batch) != family.module(batch)
    family.module.eval()
    assert torch.equal(family.module(batch), family.module(batch))


@pytest.mark.parametrize("text", ["naïve café ☕", "日本語", "a\tb"])
def test_any_text_can_be_written(base_folders: Callable[[str], Path], text: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base_folders("llava"))

    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
