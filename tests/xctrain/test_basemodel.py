"""Where the base model lies and what names it."""

import shutil
from pathlib import Path

import pytest
from small import config_of

from shards.reader import SplitReader
from xctrain.basemodel import base_model, ensure_base_model, model_id
from xctrain.errors import ConfigError


def test_tiny_model_is_built_once_and_named_alike_wherever_it_lies(drawn_shards: Path, tmp_path: Path) -> None:
    config = config_of(drawn_shards, tmp_path / "run", train__seed=3)
    reader = SplitReader(drawn_shards, "train")
    ensure_base_model(config, reader)
    folder = tmp_path / "run" / "base-model"
    assert base_model(config) == folder
    written = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    ensure_base_model(config, reader)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == written

    moved = config_of(drawn_shards, tmp_path / "run", model__path=shutil.copytree(folder, tmp_path / "elsewhere"))
    assert model_id(moved) == model_id(config)
    (tmp_path / "elsewhere" / "config.json").write_text("{}")
    assert model_id(moved) != model_id(config)


def test_hub_model_is_named_by_its_revision(drawn_shards: Path, tmp_path: Path) -> None:
    changes = {"model__family": "hf", "model__path": "some/model", "model__revision": "abc"}
    assert model_id(config_of(drawn_shards, tmp_path, **changes)) == "some/model@abc"


def test_folder_that_is_not_there_is_named(drawn_shards: Path, tmp_path: Path) -> None:
    config = config_of(drawn_shards, tmp_path, model__family="hf", model__path=tmp_path / "nothing")
    with pytest.raises(
        ConfigError, match=r"model.path: .*nothing: there is no such folder; give a model folder or a hub"
    ):
        ensure_base_model(config, SplitReader(drawn_shards, "train"))
