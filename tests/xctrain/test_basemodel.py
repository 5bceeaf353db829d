"""Where the base model lies and what names it."""

import resource
import shutil
import tarfile
from pathlib import Path

import pytest
from small import config_of, data_of

from xctrain.basemodel import base_model, ensure_base_model, model_id, open_family
from xctrain.errors import ConfigError, RunError


def test_tiny_model_is_built_once_and_named_alike_wherever_it_lies(drawn_shards: Path, tmp_path: Path) -> None:
    config = config_of(drawn_shards, tmp_path / "run", train__seed=3)
    data = data_of(drawn_shards)
    ensure_base_model(config, data)
    folder = tmp_path / "run" / "base-model"
    assert base_model(config) == folder
    written = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    ensure_base_model(config, data)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == written

    moved = config_of(drawn_shards, tmp_path / "run", model__path=shutil.copytree(folder, tmp_path / "elsewhere"))
    assert model_id(moved) == model_id(config)
    (tmp_path / "elsewhere" / "config.json").write_text("{}")
    assert model_id(moved) != model_id(config)


def test_tiny_model_is_built_of_the_captions_that_can_be_read(drawn_shards: Path, tmp_path: Path) -> None:
    shards = Path(shutil.copytree(drawn_shards, tmp_path / "shards"))
    path = shards / "train-000000.tar"
    with tarfile.open(path) as tar:
        at = next(member.offset_data for member in tar if member.name.endswith(".json"))
    path.write_bytes(path.read_bytes()[:at] + b"?" + path.read_bytes()[at + 1 :])
    config = config_of(shards, tmp_path / "run")
    ensure_base_model(config, data_of(shards))
    assert (tmp_path / "run" / "base-model" / "config.json").exists()


def test_hub_model_is_named_by_its_revision(drawn_shards: Path, tmp_path: Path) -> None:
    changes = {"model__family": "hf", "model__path": "some/model", "model__revision": "abc"}
    assert model_id(config_of(drawn_shards, tmp_path, **changes)) == "some/model@abc"


def test_folder_that_is_not_there_is_named(drawn_shards: Path, tmp_path: Path) -> None:
    config = config_of(drawn_shards, tmp_path, model__family="hf", model__path=tmp_path / "nothing")
    with pytest.raises(
        ConfigError, match=r"model.path: .*nothing: there is no such folder; give a model folder or a hub"
    ):
        ensure_base_model(config, data_of(drawn_shards))


@pytest.mark.parametrize("name", ["llava", "models/of/mine"])
def test_name_that_cannot_be_the_hubs_is_a_folder_that_is_not_there(
    drawn_shards: Path, tmp_path: Path, name: str
) -> None:
    config = config_of(drawn_shards, tmp_path, model__family="hf", model__path=name)
    with pytest.raises(
        ConfigError, match=rf"model.path: {name}: there is no such folder; give a model folder or a hub"
    ):
        ensure_base_model(config, data_of(drawn_shards))


def test_hub_name_is_asked_for_once(drawn_shards: Path, tmp_path: Path) -> None:
    config = config_of(drawn_shards, tmp_path, model__family="hf", model__path="nobody/nothing")
    with pytest.raises(
        ConfigError, match=r"nobody/nothing: there is no such folder, and the hub does not have it or can"
    ):
        ensure_base_model(config, data_of(drawn_shards))


def test_cut_weight_file_is_named(drawn_shards: Path, tmp_path: Path) -> None:
    config = config_of(drawn_shards, tmp_path / "run")
    ensure_base_model(config, data_of(drawn_shards))
    weights = tmp_path / "run" / "base-model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(
        ConfigError, match=rf"{weights}: cannot be read as weights: .*; fetch it again, or give another"
    ):
        open_family(config)


def test_full_disk_while_the_tiny_model_is_written_is_said(drawn_shards: Path, tmp_path: Path) -> None:
    config = config_of(drawn_shards, tmp_path / "run")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (100, 100_000):  # in a file of its own, and in the library's weights
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(
                RunError, match=r"base-model: the tiny model cannot be written: .*; make room, then start"
            ):
                ensure_base_model(config, data_of(drawn_shards))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    ensure_base_model(config, data_of(drawn_shards))
    assert (tmp_path / "run" / "base-model" / "config.json").exists()
