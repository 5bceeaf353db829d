"""What a config may say."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines.config import BuildConfig
from pipelines.download_config import DownloadConfig
from shards.settings import load_settings, validate
from xctrain.config import Config, trajectory_fields
from xctrain.errors import ConfigError
from xctrain.trainconfig import TrainConfig


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_settings(Config, None, overrides)
    assert error.value.exit_code == 2
    return str(error.value)


def test_unknown_key_names_the_nearest_known_one() -> None:
    text = refused("train.num_steps=5", "optim.learning_rate=1", "train.sede=3")
    assert "train.sede is not a setting; did you mean train.seed?" in text
    assert "optim.learning_rate is not a setting" in text


def test_unknown_section_names_the_nearest_known_one() -> None:
    assert "trian is not a setting; did you mean train?" in refused("train.num_steps=5", "trian.seed=3")


def test_setting_of_another_section_is_named() -> None:
    assert "order.seed is not a setting; did you mean train.seed?" in refused("train.num_steps=5", "order.seed=3")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "train is missing; write that section in the file, or give train."),
        (b"- a\n", "holds a list, expected `section:` blocks"),
        (b"\xff\xfe\x00", "cannot be read as a YAML file: is no text in UTF-8; give the path of one, see configs/"),
        (None, "cannot be read as a YAML file: Is a directory; give the path of one, see configs/"),
    ],
)
def test_file_that_is_no_config_is_named_with_what_to_do(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "config.yaml"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_settings(Config, path, [])
    assert str(error.value).startswith(f"{path}: {message}")


def test_list_of_patterns_needs_no_quotes() -> None:
    config = load_settings(Config, None, ["train.epochs=1", "model.freeze=[*.vision.*, *]"])
    assert config.model.freeze == ("*.vision.*", "*")


@pytest.mark.parametrize("address", ["runs/copy", "file:///data/runs", "https://host/runs"])
def test_address_that_takes_no_files_is_no_place_for_checkpoints(address: str) -> None:
    text = refused("train.num_steps=5", f"checkpoint.push={address}")
    assert f"checkpoint.push is {address}, expected an address that takes files, such as s3://bucket/runs/name" in text


def test_both_lengths_are_refused() -> None:
    text = refused("train.num_steps=5", "train.epochs=2")
    assert "train.num_steps or train.epochs: both are set; give exactly one" in text


def test_neither_length_is_refused() -> None:
    text = refused("train.seed=5")
    assert "train.num_steps or train.epochs: neither is set; give exactly one" in text


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("train.global_batch=0", "train.global_batch is 0, expected greater than 0"),
        ("optim.beta2=1", "optim.beta2 is 1, expected less than 1"),
        ("train.num_steps=1e30", "train.num_steps is 1e+30, expected a smaller whole number, or null"),
        ("data.shards=null", "data.shards is None, expected a path or an address or a mapping"),
        (f"data.workers={'a' * 5000}", "aaa... (5002 characters), expected 'auto' or a whole number"),
        ("data.captions=some", "data.captions is 'some', expected 'random', 'first' or 'all'"),
    ],
)
def test_value_out_of_range_is_named_with_what_was_expected(override: str, text: str) -> None:
    assert text in refused("train.num_steps=5", override)


def settings_of(model: Any, *sections: str) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        yield (*sections, name)
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if hasattr(part, "model_fields"):
                yield from settings_of(part, *sections, name)


@pytest.mark.parametrize("model", [Config, BuildConfig, DownloadConfig])
@pytest.mark.parametrize(
    "value",
    [None, "1e30", 1e30, "9" * 5000, True, [], [[]], {"a": None}, {"a": {"b": 1}}, {1: 2}, float("nan"), b"x", "\0"],
)
def test_a_wrong_value_is_said_in_our_words_and_not_in_the_librarys(model: Any, value: Any) -> None:
    for *sections, name in settings_of(model):
        values = {name: value}
        for section in reversed(sections):
            values = {section: values}
        said = ""
        try:
            validate(model, values, "file")
        except ConfigError as error:
            said = str(error)
        assert not re.search(r"Input|nable|function-|instance|Keys|lax|pydantic", said)


def test_powers_of_ten_are_numbers_in_a_file_and_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("train: {num_steps: 1e3}\noptim: {lr: 2e-4}\nmodel: {prompt: '1e3'}\n")
    config = load_settings(Config, path)
    assert (config.train.num_steps, config.optim.lr, config.model.prompt) == (1000, 2e-4, "1e3")
    assert load_settings(Config, None, ["train.num_steps=1e3"]).train.num_steps == 1000
    assert "train.num_steps is 1.5, expected a whole number" in refused("train.num_steps=15e-1")


def test_hf_family_needs_a_path() -> None:
    assert "model.path is empty" in refused("train.num_steps=5", "model.family=hf")


def test_yaml_of_a_config_reads_back_as_the_same_config(tmp_path: Path) -> None:
    config = load_settings(Config, None, ["train.epochs=1.5", "optim.lr=3e-5", "model.freeze=[a.*]", "run.dir=/x/ü"])
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert load_settings(Config, path) == config


def test_what_is_free_on_resume_is_not_among_the_trajectory() -> None:
    names = set(trajectory_fields(Config(train=TrainConfig(num_steps=1))))
    free = {"train.micro_batch", "train.processes", "data.workers", "data.shards", "run.dir", "train.save_every"}
    assert not names & (free | {"train.log_keys", "eval.every", "train.keep", "model.path"})
    must_match = {"train.seed", "train.global_batch", "train.num_steps", "train.epochs", "order.window", "optim.lr"}
    assert names >= must_match | {"data.split", "data.captions", "model.prompt", "train.precision", "model.freeze"}


def test_every_setting_has_a_description() -> None:
    for section in Config.model_fields.values():
        for name, field in section.annotation.model_fields.items():  # type: ignore[union-attr]
            assert field.description, name


def test_shards_may_lie_at_an_address_but_secrets_stay_out_of_the_config(tmp_path: Path) -> None:
    for address in ("s3://bucket/shards", "gs://bucket/shards", "https://host/shards"):
        config = load_settings(Config, None, [f"data.shards={address}", "train.num_steps=1"])
        assert config.data.shards == address
        (tmp_path / "config.yaml").write_text(config.to_yaml())
        assert load_settings(Config, tmp_path / "config.yaml") == config
    mixed = load_settings(Config, None, ["data.shards.a=s3://bucket/a", "data.shards.b=data/b", "train.num_steps=1"])
    assert [source.path for source in mixed.data.sources.values()] == ["s3://bucket/a", Path("data/b")]
    for address in ("https://me:secret@host/shards", "https://host/shards?token=secret"):
        with pytest.raises(ConfigError, match=r"https://host/shards has a user, password or query") as error:
            load_settings(Config, None, [f"data.shards={address}", "train.num_steps=1"])
        assert "secret" not in str(error.value)
