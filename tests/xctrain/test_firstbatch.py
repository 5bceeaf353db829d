"""The page of the first batch: what the model is given, as it is given."""

import re
from collections.abc import Callable
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import runs
from conftest import drawn_sample
from PIL import Image
from small import train_here
from xcomposers import build_xcomposer

from xctrain.collate import Batch, Row
from xctrain.firstbatch import NAME, render
from xctrain.loss import IGNORED
from xctrain.modelconfig import ModelConfig
from xctrain.models import Family
from xctrain.models.hf import HfFamily
from xctrain.models.xcomposer import XComposerFamily


@pytest.fixture(params=["llava", "qwen", "idefics", "xcomposer"])
def family(request: pytest.FixtureRequest, base_folders: Callable[[str], Path], tmp_path: Path) -> Family:
    config = ModelConfig(prompt="Describe <it>.")
    if request.param == "xcomposer":
        return XComposerFamily.open(config, build_xcomposer(tmp_path / "base"))
    return HfFamily.open(config, base_folders(request.param))


def batch_of(family: Family) -> Batch:
    """Two rows of different lengths and picture sizes."""
    samples = [drawn_sample(number) for number in (1, 2)]
    images = [samples[0].open_image(), samples[1].open_image().resize((60, 96))]
    captions = ["a red disc", "on the left there is a blue box"]
    return family.collator([Row(n, 0, f"key-{n}", images[n], (captions[n],)) for n in (0, 1)])


def test_tokens_are_those_of_the_rows_and_targets_spell_the_caption(family: Family) -> None:
    batch = batch_of(family)

    for texts, labels, caption in zip(
        family.tokens(batch), batch.labels, ["a red disc", "on the left there is a blue box"], strict=True
    ):
        assert len(texts) <= len(labels)
        assert (labels[len(texts) :] == IGNORED).all()
        targets = "".join(text for text, label in zip(texts, labels, strict=False) if label != IGNORED)
        assert caption in targets


def test_page_marks_targets_and_escapes_the_prompt(family: Family) -> None:
    page = render(family, batch_of(family))

    given, targets = (
        "".join(unescape(text) for text in re.findall(rf'<span class="{kind}">(.*?)(?:<sub>.*?</sub>)?</span>', page))
        for kind in ("given", "target")
    )
    assert "Describe" in given
    assert "<it>" not in page
    assert "blue" in targets
    assert "blue" not in given
    assert "key-1" in page


def test_picture_is_what_the_model_sees(base_folders: Callable[[str], Path], tmp_path: Path) -> None:
    llava = HfFamily.open(ModelConfig(), base_folders("llava"))
    batch = batch_of(llava)
    [[seen], _] = llava.pictures(batch)
    expected = drawn_sample(1).open_image().resize(seen.size, Image.Resampling.BICUBIC)  # its processor does not crop
    assert np.abs(np.asarray(seen, float) - np.asarray(expected, float)).mean() < 1

    xcomposer = XComposerFamily.open(
        ModelConfig(family="xcomposer", path="base", hd_num=4), build_xcomposer(tmp_path / "base")
    )
    batch = batch_of(xcomposer)
    for [seen], row in zip(xcomposer.pictures(batch), batch.inputs["grids"].tolist(), strict=True):
        assert seen.size == (row[1] * 56, row[0] * 56)
    tiled = xcomposer.collator.encoder.tile([drawn_sample(1).open_image()])[0]
    assert np.array_equal(np.asarray(xcomposer.pictures(batch)[0][0]), np.asarray(tiled))


def test_every_start_writes_the_page_and_moves_nothing(drawn_shards: Path, tmp_path: Path) -> None:
    train_here(drawn_shards, tmp_path / "run")
    train_here(drawn_shards, tmp_path / "stopped", stop_asked=lambda: True)
    first = (tmp_path / "stopped" / NAME).read_text()
    train_here(drawn_shards, tmp_path / "stopped")

    assert "from position 0 on" in first
    assert "from position 12 on" in (tmp_path / "stopped" / NAME).read_text()
    assert runs.weights(tmp_path / "stopped", 10) == runs.weights(tmp_path / "run", 10)
