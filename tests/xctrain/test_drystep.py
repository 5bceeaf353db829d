"""What happens before the first step: one caption, and the layers compiled if asked."""

import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import torch
from small import config_of, train_here
from tiny import TinyFamily, TinyModel, open_tiny

from xctrain.errors import ConfigError


class Restless(TinyFamily):
    """Draws from every generator while it writes captions."""

    def generate(self, images: Sequence[Any], max_new_tokens: int) -> list[str]:
        draws = (torch.rand(3), random.random(), np.random.random())
        assert draws
        return super().generate(images, max_new_tokens)


def open_restless(config: Any, *_: Any) -> tuple[TinyFamily, str]:
    torch.manual_seed(config.train.seed)
    return Restless(TinyModel(dropout=0.2)), "tiny"


def test_caption_before_training_moves_nothing(
    drawn_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_here(drawn_shards, tmp_path / "plain")
    train_here(drawn_shards, tmp_path / "restless", open_restless)

    assert capsys.readouterr().err.count("before this start trains, the model says: ") == 2
    assert runs.trajectory(tmp_path / "restless") == runs.trajectory(tmp_path / "plain")
    assert runs.weights(tmp_path / "restless", 10) == runs.weights(tmp_path / "plain", 10)


def test_caption_without_anything_to_read_is_said_to_be_nothing(
    drawn_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Silent(TinyFamily):
        def generate(self, images: Sequence[Any], max_new_tokens: int) -> list[str]:
            return [" \x00\n" for _ in images]

    train_here(drawn_shards, tmp_path, lambda *_: (Silent(TinyModel(dropout=0.0)), "tiny"), train__num_steps=1)
    assert "the model says: (nothing)\n" in capsys.readouterr().err


def test_model_that_cannot_write_captions_does_not_train(drawn_shards: Path, tmp_path: Path) -> None:
    class Mute(TinyFamily):
        def generate(self, images: Sequence[Any], max_new_tokens: int) -> list[str]:
            raise RuntimeError("no end token")

    with pytest.raises(RuntimeError, match="no end token"):
        train_here(drawn_shards, tmp_path, lambda *_: (Mute(TinyModel(dropout=0.0)), "tiny"))
    assert runs.events(tmp_path, "step") == []


def test_mode_that_cannot_write_one_says_why(drawn_shards: Path, tmp_path: Path) -> None:
    assert (
        "no caption is written before training with parallel.mode=fsdp, as weights may not fit whole; try one with `python -m "
        f"xctrain caption {tmp_path} IMAGE` after the first checkpoint"
    ) in runs.train(drawn_shards, tmp_path, parallel__mode="fsdp", train__num_steps=2)


def test_compiling_a_model_without_repeated_layers_is_refused(
    drawn_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        ConfigError, match=r"train\.compile is true, TinyModel has no list of repeated layers to compile"
    ):
        train_here(drawn_shards, tmp_path, open_tiny, train__compile=True)
    assert capsys.readouterr().err.count("compiling the model's repeated layers") == 1


def test_compiling_without_a_compiler_is_refused(
    drawn_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ConfigError, match=r"there is no compiler no-such-compiler, .*; install it \(apt-get install g\+\+\)"
    ):
        train_here(drawn_shards, tmp_path, open_tiny, train__compile=True)


def test_compiler_that_fails_is_an_error_in_words(
    drawn_shards: Path, tmp_path: Path, base_folders: Callable[[str], Path]
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    environment = {"CXX": str(broken), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    text = runs.finish(compiled(base_folders("llava"), drawn_shards, tmp_path / "run", 1, **environment), code=2)
    assert "error: train.compile is true, the layers of this model cannot be compiled: " in text
    assert "Traceback" not in text.rpartition("error: train.compile")[2]


@pytest.mark.parametrize("mode", ["fsdp", "zero2"])
def test_compiled_layers_are_refused_where_weights_come_and_go(tmp_path: Path, mode: str) -> None:
    with pytest.raises(ConfigError, match=rf"parallel.mode is {mode}, train.compile is true: weights that come and go"):
        config_of(tmp_path, tmp_path, parallel__mode=mode, train__compile=True)


def compiled(
    base: Path, shards: Path, run: Path, processes: int, compile: bool = True, adapter: str = "lora", **environment: str
) -> "runs.subprocess.Popen[str]":
    """A run of a Hugging Face model with adapters, captions scored on the way."""
    values = {"model__family": "hf", "model__path": base, "train__num_steps": 6, "train__save_every": 3}
    values |= {"train__compile": compile, "adapter__kind": adapter}
    values |= {"adapter__rank": 4, "adapter__dropout": 0.0, "adapter__compute": "float32", "train__log_keys": True}
    values |= {"eval__every": 3, "eval__num_images": 4, "eval__max_new_tokens": 3}
    arguments = runs.settings(shards, run, **values)
    command = [sys.executable, "-m", "xctrain", "launch", os.devnull, "--processes", str(processes), *arguments]
    return runs.start(["env", *(f"{name}={value}" for name, value in environment.items()), *command])


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_compiled_run_has_the_losses_of_a_plain_one_and_resumes_bit_by_bit(
    drawn_shards: Path, tmp_path: Path, base_folders: Callable[[str], Path], adapter: str
) -> None:
    base = base_folders("qwen")  # without dropout, which compiled code draws by itself
    plain, straight, killed = (tmp_path / name for name in ("plain", "straight", "killed"))
    runs.finish(compiled(base, drawn_shards, plain, 2, compile=False, adapter=adapter))
    runs.finish(compiled(base, drawn_shards, straight, 2, adapter=adapter), timeout_s=1200)
    runs.kill_at(compiled(base, drawn_shards, killed, 2, adapter=adapter), killed, step=4, saved=True)
    runs.finish(compiled(base, drawn_shards, killed, 2, adapter=adapter), timeout_s=1200)

    losses = [[line["loss"] for line in runs.events(run, "step")] for run in (straight, plain)]
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert losses[0] != losses[1]  # so it was compiled
    assert runs.trajectory(killed) == runs.trajectory(straight)
    assert runs.weights(killed, 6) == runs.weights(straight, 6)
