"""SIGKILL of real processes that train a small XComposer: a run goes on as if nothing had happened."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import runs
from safetensors.torch import load_file
from torch.testing import assert_close
from xcomposers import build_xcomposer

NUM_STEPS = 12


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_xcomposer(tmp_path_factory.mktemp("base") / "xcomposer")


def start(shards: Path, base: Path, run: Path, adapter: str, processes: int, **changes: Any) -> Any:
    """Real processes that train in a run folder, all dropout on unless ``changes`` say otherwise."""
    values: dict[str, Any] = {
        "model__family": "xcomposer",
        "model__path": base,
        "model__hd_num": 4,
        "model__gradient_checkpointing": True,
        "adapter__kind": adapter,
        "adapter__rank": 4,
        "adapter__dropout": 0.1,
        "adapter__compute": "float32",
        "optim__lr": 2e-3,
        "train__num_steps": NUM_STEPS,
        "train__save_every": 3,
        **changes,
    }
    command = [sys.executable, "-m", "xctrain", "launch", os.devnull, "--processes", str(processes)]
    return runs.start([*command, *runs.settings(shards, run, **values)])


@pytest.mark.parametrize(
    ("adapter", "processes"),
    [
        ("qlora", 3),
        *(
            pytest.param(adapter, processes, marks=pytest.mark.slow)
            for adapter in ("none", "lora", "qlora")
            for processes in (1, 3)
            if (adapter, processes) != ("qlora", 3)
        ),
    ],
)
def test_killed_run_of_xcomposer_is_bit_identical(
    drawn_shards: Path, tmp_path: Path, base: Path, adapter: str, processes: int
) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    runs.finish(start(drawn_shards, base, straight, adapter, processes))

    runs.kill_at(start(drawn_shards, base, killed, adapter, processes), killed, step=7, saved=True)
    runs.finish(start(drawn_shards, base, killed, adapter, processes))

    assert runs.trajectory(killed) == runs.trajectory(straight)
    assert len(runs.trajectory(killed)) == NUM_STEPS
    assert runs.key_files(killed) == runs.key_files(straight)
    assert runs.weights(killed, NUM_STEPS) == runs.weights(straight, NUM_STEPS)
    assert [line["previous_end"] for line in runs.events(killed, "start")] == [None, "killed"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_test_of_resume_passes_on_xcomposer(base: Path) -> None:
    files = ["tests/system/test_kill_and_resume.py", "tests/xctrain/test_resume.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--timeout", "1200", *files],
        cwd=runs.TESTS.parent,
        env={**os.environ, "XCTRAIN_TEST_XCOMPOSER": str(base)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout


def test_two_processes_save_the_adapter_that_one_saves(drawn_shards: Path, tmp_path: Path) -> None:
    base = build_xcomposer(tmp_path / "base", plora_dropout=0.0)
    saved = []
    for processes in (1, 2):
        run = tmp_path / f"run-{processes}"
        changes = {"adapter__dropout": 0.0, "optim__warmup_steps": 0, "optim__schedule": "constant"}
        runs.finish(start(drawn_shards, base, run, "lora", processes, **changes))
        saved.append(load_file(run / "checkpoints" / f"step-{NUM_STEPS:08d}" / "model.safetensors"))
        losses = [event["loss"] for event in runs.events(run, "step")]
        assert sum(losses[-4:]) < sum(losses[:4])

    one, two = saved
    assert {n: (t.shape, t.dtype) for n, t in one.items()} == {n: (t.shape, t.dtype) for n, t in two.items()}
    assert {name.rpartition(".lora_")[2] for name in one} == {"A.default.weight", "B.default.weight"}
    for name, weight in one.items():
        assert_close(two[name], weight, rtol=0, atol=1e-5)
