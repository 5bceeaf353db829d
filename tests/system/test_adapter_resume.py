"""SIGKILL of real processes that train an adapter: a run goes on as if nothing had happened."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
from safetensors.numpy import load_file

from xctrain.models.tiny import build_tiny

NUM_STEPS = 12
CAPTIONS = ("a red disc", "on the left there is a blue box", "a box that is green stands alone on the right side")

Process = Callable[[Path], "runs.subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "llava"
    build_tiny(folder, CAPTIONS, seed=0)
    return folder


def starter(shards: Path, base: Path, adapter: str, processes: int) -> Process:
    """Starts real processes that train an adapter in a run folder. All dropout is on."""
    changes: dict[str, Any] = {
        "model__family": "hf",
        "model__path": base,
        "model__gradient_checkpointing": True,
        "adapter__kind": adapter,
        "adapter__rank": 4,
        "adapter__dropout": 0.1,
        "adapter__compute": "float32",
        "train__num_steps": NUM_STEPS,
        "train__save_every": 3,
    }

    def start(run: Path) -> "runs.subprocess.Popen[str]":
        command = [sys.executable, "-m", "xctrain", "launch", os.devnull, "--processes", str(processes)]
        return runs.start([*command, *runs.settings(shards, run, **changes)])

    return start


@pytest.mark.parametrize(
    ("adapter", "processes"),
    [
        pytest.param("lora", 1, marks=pytest.mark.slow),
        ("qlora", 3),
        pytest.param("lora", 3, marks=pytest.mark.slow),
        pytest.param("qlora", 1, marks=pytest.mark.slow),
    ],
)
def test_killed_run_of_an_adapter_is_bit_identical(
    drawn_shards: Path, tmp_path: Path, base: Path, adapter: str, processes: int
) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    start = starter(drawn_shards, base, adapter, processes)
    text = runs.finish(start(straight))

    runs.kill_at(start(killed), killed, step=7, saved=True)
    runs.finish(start(killed))

    assert runs.trajectory(killed) == runs.trajectory(straight)
    assert len(runs.trajectory(killed)) == NUM_STEPS
    assert runs.key_files(killed) == runs.key_files(straight)
    assert runs.weights(killed, NUM_STEPS) == runs.weights(straight, NUM_STEPS)
    assert [line["previous_end"] for line in runs.events(killed, "start")] == [None, "killed"]
    table = dict(line.split()[:2] for line in text.splitlines() if line.startswith("model."))
    assert table == {"model.vision_tower": "0", "model.multi_modal_projector": "0", "model.language_model": "13,056"}
    holds_only_the_adapter(straight / "checkpoints" / f"step-{NUM_STEPS:08d}", base, share=0.05)


def holds_only_the_adapter(checkpoint: Path, base: Path, share: float) -> None:
    saved = load_file(checkpoint / "model.safetensors")
    assert {name.rpartition(".lora_")[2] for name in saved} == {"A.default.weight", "B.default.weight"}
    assert all((weight != 0).any() for weight in saved.values())
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (checkpoint, base)]
    assert sizes[0] < share * sizes[1]


@pytest.mark.parametrize("name", [pytest.param("hf-lora", marks=pytest.mark.slow), "hf-qlora"])
def test_shipped_config_trains_and_scores_a_small_model(
    drawn_shards: Path, tmp_path: Path, base: Path, name: str
) -> None:
    """As it is shipped, but for where things lie and how long it goes on."""
    config = runs.TESTS.parent / "configs" / f"{name}.yaml"
    where = [f"model.path={base}", f"data.shards={drawn_shards}", f"run.dir={tmp_path / 'run'}", "data.workers=0"]
    short = ["train.epochs=1.28", "eval.every=2", "eval.num_images=2", "eval.max_new_tokens=2"]

    command = [sys.executable, "-m", "xctrain", "launch", str(config), "--processes", "1", *where, *short]
    runs.finish(runs.start(command))

    assert [line["step"] for line in runs.events(tmp_path / "run", "step")] == [1, 2]
    assert [line["step"] for line in runs.events(tmp_path / "run", "eval")] == [0, 2]
    holds_only_the_adapter(tmp_path / "run" / "checkpoints" / "step-00000002", base, share=0.2)
