"""A split is captioned in a fixed order, each image once."""

import json
import shutil
from pathlib import Path

import pytest
import runs
import torch
from small import config_of, data_of, train_here
from tiny import TinyFamily, TinyModel

from shards.reader import SplitReader
from xctrain.errors import RunError
from xctrain.evalconfig import EvalConfig
from xctrain.evaluate import Evaluation, as_event, evaluate, write_captions
from xctrain.ranks import Ranks, join


@pytest.fixture
def ranks(drawn_shards: Path, tmp_path: Path) -> Ranks:
    return join(config_of(drawn_shards, tmp_path))


def result_of(shards: Path, ranks: Ranks, **settings: object) -> Evaluation:
    torch.manual_seed(5)
    family = TinyFamily(TinyModel(dropout=0.5))
    config = EvalConfig.model_validate({"max_new_tokens": 3, **settings})
    result = evaluate(family, data_of(shards, config.split).datasets[0], config, ranks)
    assert result
    return result


def test_a_few_pictures_are_captioned_on_the_way_and_drawn_on_a_page(drawn_shards: Path, tmp_path: Path) -> None:
    settings = {"watch__captions_every": 4, "watch__num_captions": 3, "eval__max_new_tokens": 2}
    run = tmp_path / "run"
    train_here(drawn_shards, run, **settings)
    lines = {
        path.stem: [json.loads(line)["key"] for line in path.read_text().splitlines()]
        for path in (run / "samples").glob("*.jsonl")
    }
    keys = SplitReader(drawn_shards, "val").keys()[:3]
    assert lines == dict.fromkeys([f"step-{step:08d}" for step in (0, 4, 8, 10)], keys)
    page = (run / "samples.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 3
    assert "<span>after step 10</span>" in page
    assert "<summary>2 on the way</summary>" in page
    assert not list(run.glob("captions/*"))
    train_here(drawn_shards, run, train__resume=str(run / "checkpoints/step-00000005"), **settings)
    assert {path.stem for path in (run / "samples").glob("*.jsonl")} == lines.keys()


def test_captions_on_the_way_change_nothing_of_the_training(drawn_shards: Path, tmp_path: Path) -> None:
    train_here(drawn_shards, tmp_path / "with", watch__captions_every=3, eval__max_new_tokens=2)
    train_here(drawn_shards, tmp_path / "without")
    assert runs.trajectory(tmp_path / "with") == runs.trajectory(tmp_path / "without")


def test_every_image_is_captioned_once_whatever_the_batch(drawn_shards: Path, ranks: Ranks) -> None:
    whole = result_of(drawn_shards, ranks)
    assert [c.key for c in whole.captions] == SplitReader(drawn_shards, "val").keys()
    assert all(len(c.references) == 3 for c in whole.captions)
    cut = result_of(drawn_shards, ranks, micro_batch=5)
    assert cut.captions == whole.captions
    assert cut.scores == whole.scores
    assert cut.loss == pytest.approx(whole.loss)


def test_first_images_only(drawn_shards: Path, ranks: Ranks) -> None:
    result = result_of(drawn_shards, ranks, num_images=4)
    assert [c.key for c in result.captions] == SplitReader(drawn_shards, "val").keys()[:4]
    assert as_event(result)["num_images"] == 4


def test_generators_and_mode_end_as_they_were(drawn_shards: Path, ranks: Ranks) -> None:
    family = TinyFamily(TinyModel(dropout=0.5))
    before = torch.get_rng_state()
    evaluate(family, data_of(drawn_shards, "val").datasets[0], EvalConfig(num_images=2, max_new_tokens=1), ranks)
    assert torch.equal(torch.get_rng_state(), before)
    assert family.module.training


def test_blank_pictures_are_gray(drawn_shards: Path, ranks: Ranks) -> None:
    seen = result_of(drawn_shards, ranks)
    blind = result_of(drawn_shards, ranks, blank=True)
    assert len({c.caption for c in blind.captions}) == 1
    assert blind.loss != seen.loss


def test_damaged_image_is_an_error_and_not_a_score(drawn_shards: Path, ranks: Ranks, tmp_path: Path) -> None:
    shards = Path(shutil.copytree(drawn_shards, tmp_path / "shards"))
    tar = shards / "val-000000.tar"
    data = bytearray(tar.read_bytes())
    data[600] ^= 1
    tar.write_bytes(data)
    key = SplitReader(shards, "val").key(0)
    with pytest.raises(RunError, match=f"{key}: cannot be scored: damaged: val-000000.tar: .*; build the split again"):
        result_of(shards, ranks)


def test_captions_are_one_json_line_an_image(drawn_shards: Path, ranks: Ranks, tmp_path: Path) -> None:
    result = result_of(drawn_shards, ranks, num_images=2)
    write_captions(tmp_path / "a" / "captions.jsonl", result.captions)
    lines = [json.loads(line) for line in (tmp_path / "a" / "captions.jsonl").read_text().splitlines()]
    assert [line["key"] for line in lines] == [c.key for c in result.captions]
    assert set(lines[0]) == {"key", "caption", "references"}
