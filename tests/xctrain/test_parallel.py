"""Every parallel mode trains the same, survives SIGKILL bit by bit, and saves what any other mode goes on from."""

import os
import re
import sys
from collections.abc import Callable, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
from safetensors.numpy import load_file
from small import config_of, train_here
from tiny import open_tiny
from torch.distributed.tensor import DTensor

from xctrain.errors import ConfigError
from xctrain.ranks import join

NUM_STEPS = 12


def settings(shards: Path, run: Path, mode: str, **changes: Any) -> list[str]:
    return runs.settings(shards, run, parallel__mode=mode, train__num_steps=NUM_STEPS, train__save_every=3, **changes)


def same_runs(one: Path, other: Path) -> None:
    """They must not differ by a bit."""
    assert runs.trajectory(one) == runs.trajectory(other)
    assert len(runs.trajectory(one)) == NUM_STEPS
    assert runs.key_files(one) == runs.key_files(other)
    assert runs.weights(one, NUM_STEPS) == runs.weights(other, NUM_STEPS)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("mode", "processes"),
    [
        ("fsdp", 3),
        pytest.param("zero2", 3, marks=SLOW),
        *(pytest.param("fsdp", n, marks=SLOW) for n in (1, 2)),
        *(
            pytest.param(f"zero{stage}", n, marks=SLOW)
            for stage in (1, 2, 3)
            for n in (1, 2, 3)
            if (stage, n) != (2, 3)
        ),
    ],
)
def test_run_killed_twice_is_bit_identical(drawn_shards: Path, tmp_path: Path, mode: str, processes: int) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    runs.finish(runs.launcher(settings(drawn_shards, straight, mode), processes))

    for step in (4, 9):  # behind a checkpoint, and in the middle of one
        runs.kill_at(runs.launcher(settings(drawn_shards, killed, mode), processes), killed, step, saved=True)
    runs.finish(runs.launcher(settings(drawn_shards, killed, mode), processes))

    same_runs(killed, straight)
    assert [line["previous_end"] for line in runs.events(killed, "start")] == [None, "killed", "killed"]


@pytest.mark.parametrize("second", ["fsdp", pytest.param("zero3", marks=SLOW), pytest.param("zero1", marks=SLOW)])
def test_any_mode_goes_on_from_ddp_and_on_other_numbers_of_processes(
    drawn_shards: Path, tmp_path: Path, second: str
) -> None:
    straight, moved = tmp_path / "straight", tmp_path / "moved"
    whole = {"model__prompt": "no dropout"}
    runs.finish(runs.launcher(settings(drawn_shards, straight, "ddp", **whole), 1))
    changed = {**whole, "train__resume_with": "parallel.mode"}
    for mode, processes, until in (("ddp", 2, 4), (second, 3, 8)):
        runs.kill_at(runs.launcher(settings(drawn_shards, moved, mode, **changed), processes), moved, until, saved=True)
    runs.finish(runs.launcher(settings(drawn_shards, moved, second, **changed), 2))

    assert runs.keys_by_step(moved) == runs.keys_by_step(straight)
    losses = [[line["loss"] for line in runs.events(run, "step")] for run in (moved, straight)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    notes = runs.events(moved, "start")[2]["notes"]
    assert [note for note in notes if not note.endswith("are trained again")] == []
    assert f"accepted: parallel.mode was ddp, is {second}" in runs.events(moved, "start")[1]["notes"]


@pytest.mark.parametrize(
    ("mode", "processes"), [("fsdp", 3), ("zero2", 2), *(pytest.param(f"zero{s}", 3, marks=SLOW) for s in (1, 2, 3))]
)
def test_gradient_of_a_step_is_the_same_in_every_mode(
    drawn_shards: Path, tmp_path: Path, mode: str, processes: int
) -> None:
    changes = {"model__prompt": "no dropout", "optim__max_grad_norm": 1e9, "train__num_steps": 1}
    train_here(drawn_shards, tmp_path / "one", **changes, train__micro_batch=12)
    shared = {**changes, "train__micro_batch": 6 // processes, "parallel__mode": mode}
    runs.train(drawn_shards, tmp_path / "shared", processes, **shared)
    one, other = (runs.gradient(tmp_path / run, step=1, beta1=0.9) for run in ("one", "shared"))
    norm = np.linalg.norm(one)
    assert norm > 0.1
    assert np.linalg.norm(other - one) / norm < 1e-6


@pytest.mark.parametrize(
    "mode", ["fsdp", *(pytest.param(mode, marks=SLOW) for mode in ("ddp", "zero1", "zero2", "zero3"))]
)
def test_batch_that_is_not_finite_on_one_rank_updates_none(drawn_shards: Path, tmp_path: Path, mode: str) -> None:
    changes = {"train__num_steps": 4, "train__on_not_finite": "skip", "train__save_every": 1, "train__keep": 9}
    arguments = runs.settings(drawn_shards, tmp_path, parallel__mode=mode, **changes)
    command = [sys.executable, str(runs.TESTS / "xctrain" / "small.py"), "13", *arguments]
    code = f"import sys; from xctrain.launch import launch; sys.exit(launch({command!r}, 3))"
    runs.finish(runs.start([sys.executable, "-c", code]))

    [skip] = runs.events(tmp_path, "skip")
    assert (skip["step"], skip["samples_consumed"]) == (1, 24)
    assert [(line["step"], line["samples_consumed"]) for line in runs.events(tmp_path, "step")] == [
        (1, 12),
        (2, 36),
        (3, 48),
    ]
    # Position 12's update is missing, and those behind it start from the weights of step 1.
    first, second = (load_file(tmp_path / "checkpoints" / f"step-0000000{i}" / "model.safetensors") for i in (1, 2))
    assert all(np.isfinite(weight).all() for weight in second.values())
    assert any((first[name] != second[name]).any() for name in first)


@pytest.mark.parametrize(
    ("mode", "cut"),
    [
        ("fsdp", "wgm"),
        ("zero2", "gm"),
        *(pytest.param(*zero, marks=SLOW) for zero in (("zero1", "m"), ("zero3", "wgm"))),
    ],
)
def test_mode_that_was_asked_for_is_the_one_that_runs(drawn_shards: Path, tmp_path: Path, mode: str, cut: str) -> None:
    """Each of three ranks holds a third of what the mode cuts, and all of what it does not."""
    command = [sys.executable, __file__, *settings(drawn_shards, tmp_path, mode), "train.processes=3"]
    code = f"import sys; from xctrain.launch import launch; sys.exit(launch({command!r}, 3))"
    text = runs.finish(runs.start([sys.executable, "-c", code]))
    held = re.findall(r"held (\d+) (\d+) (\d+) (\d+)", text)  # two ranks may share a line of the screen
    assert len(held) == 3
    for weights, gradients, means, whole in (map(int, numbers) for numbers in held):
        for kind, share in zip("wgm", (weights / whole, gradients / whole, means / whole / 2), strict=True):
            assert (0.3 < share < 0.36) if kind in cut else (share == 1), (kind, share)


def test_ranks_with_different_base_models_do_not_train(drawn_shards: Path, tmp_path: Path) -> None:
    command = [sys.executable, __file__, "apart", *settings(drawn_shards, tmp_path, "ddp"), "train.processes=2"]
    code = f"import sys; from xctrain.launch import launch; sys.exit(launch({command!r}, 2))"
    text = runs.finish(runs.start([sys.executable, "-c", code]), code=1)
    assert "error: the ranks hold different weights before the first step (their sums are " in text
    assert "see that model.path is the same model on every node" in text


@pytest.mark.parametrize("mode", ["fsdp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"adapter__kind": "qlora"}, "adapter.kind is qlora: weights in 4 bits cannot be cut"),
        ({"train__precision": "fp16"}, "train.precision is fp16: each process would see"),
    ],
)
def test_pair_that_cannot_work_is_refused(tmp_path: Path, mode: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"parallel.mode is {mode}, {text}"):
        config_of(tmp_path, tmp_path, parallel__mode=mode, **changes)


def test_evaluation_within_a_zero3_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"parallel.mode is zero3, eval.every is 5: DeepSpeed makes the processes wait .* use eval.every=null and",
    ):
        config_of(tmp_path, tmp_path, parallel__mode="zero3", eval__every=5)


def test_two_types_of_what_trains_are_refused(drawn_shards: Path, tmp_path: Path) -> None:
    def mixed(*arguments: Any) -> Any:
        family, name = open_tiny(*arguments)
        family.module.get_submodule("mix").bfloat16()
        return family, name

    with pytest.raises(ConfigError, match="which wants one type of what trains, found bfloat16 and float32; use"):
        train_here(drawn_shards, tmp_path, mixed, parallel__mode="fsdp")


def test_launcher_that_asks_for_another_mode_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match=r"parallel.mode is ddp, the launcher's config file asks for fsdp; set"):
        join(config_of(tmp_path, tmp_path))


def real(
    base: Path, shards: Path, run: Path, processes: int, mode: str, **changes: Any
) -> "runs.subprocess.Popen[str]":
    """A run of a Hugging Face model, captions scored on the way. All dropout that there is is on."""
    values = {"model__family": "hf", "model__path": base, "train__num_steps": 6, "train__save_every": 3, **changes}
    values |= {
        "eval__every": None if mode == "zero3" else 3,
        "eval__num_images": 5,
        "eval__micro_batch": 1,
        "eval__max_new_tokens": 3,
    }
    arguments = runs.settings(shards, run, parallel__mode=mode, **values)
    return runs.start(
        [sys.executable, "-m", "xctrain", "launch", os.devnull, "--processes", str(processes), *arguments]
    )


FAST = [("qwen", "fsdp", "none", "fp32", 3)]  # of all pairs that can work; the others are minutes each
WORKING = [*product(("ddp", "fsdp", "zero2"), ("none", "lora")), ("ddp", "qlora"), ("zero3", "none"), ("zero3", "lora")]
CASES = [
    (kind, mode, adapter, precision, processes)
    for (mode, adapter), kind, precision, processes in product(WORKING, ("llava", "qwen"), ("fp32", "bf16"), (1, 2, 3))
]


@pytest.mark.parametrize(
    ("kind", "mode", "adapter", "precision", "processes"),
    [pytest.param(*case, marks=() if case in FAST else SLOW) for case in CASES],
)
def test_small_models_resume_bit_by_bit(
    drawn_shards: Path,
    tmp_path: Path,
    base_folders: Callable[[str], Path],
    kind: str,
    mode: str,
    adapter: str,
    precision: str,
    processes: int,
) -> None:
    changes = {"adapter__kind": adapter, "train__precision": precision, "adapter__rank": 4, "adapter__dropout": 0.1}
    changes |= {"model__gradient_checkpointing": True, "adapter__compute": "float32"}
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    runs.finish(real(base_folders(kind), drawn_shards, straight, processes, mode, **changes))
    runs.kill_at(real(base_folders(kind), drawn_shards, killed, processes, mode, **changes), killed, step=4, saved=True)
    runs.finish(real(base_folders(kind), drawn_shards, killed, processes, mode, **changes))

    assert runs.trajectory(killed) == runs.trajectory(straight)
    assert len(runs.trajectory(killed)) == 6
    assert runs.weights(killed, 6) == runs.weights(straight, 6)
    scored = [[line["loss"] for line in runs.events(run, "eval")] for run in (killed, straight)]
    assert scored[0] == scored[1]
    if mode == "zero3":
        return
    assert len(scored[0]) == 3
    assert scored[0][2] < scored[0][0]


def held(tensor: Any) -> int:
    """Numbers that this rank holds of a tensor."""
    return int((tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel())


def show_held(argv: Sequence[str]) -> int:
    """One rank: print how many numbers it holds of weights, gradients and means, and how many there are."""
    from shards.settings import load_settings
    from xctrain.config import Config
    from xctrain.start import make_plan, start

    config = load_settings(Config, None, argv)
    ranks = join(config)
    plan = make_plan(config, ranks.world_size)
    family, name = open_tiny(config, ranks, plan)
    run = start(config, ranks, plan, family, name, stop_asked=lambda: False, show=lambda *_: None)
    engine = run.engine
    [(micro_batches, _)] = islice(run.loader.global_batches(0), 1)
    engine.accumulate(micro_batches, 100)
    engine.reduce()
    whole = sum(getattr(p, "ds_numel", p.numel()) for p in engine.trainable)
    weights = sum(held(getattr(p, "ds_tensor", p)) for p in engine.trainable)
    if config.parallel.mode.startswith("zero"):
        # DeepSpeed's own place for its part; before stage 2 gradients stay with their weights as well.
        kept = [g for group in engine.optimizer.averaged_gradients.values() for g in group]
        gradients = sum(map(held, kept)) if engine.stage > 1 else sum(held(p.grad) for p in engine.trainable)
    else:
        gradients = sum(held(p.grad) for p in engine.trainable)
    engine.clip(1.0)
    engine.update()
    optimizer = engine.optimizer.optimizer if config.parallel.mode.startswith("zero") else engine.optimizer
    means = [s[m] for s in optimizer.state.values() for m in ("exp_avg", "exp_avg_sq")]
    os.write(1, f"held {weights} {gradients} {sum(map(held, means))} {whole}\n".encode())  # in one piece
    ranks.barrier()
    ranks.close()
    return 0


def train_apart(argv: Sequence[str]) -> int:
    """One rank: train a model that is another one on each."""
    from shards.settings import load_settings
    from xctrain.config import Config
    from xctrain.session import train_rank

    def open_model(config: Config, ranks: Any, plan: Any) -> Any:
        train = config.train.model_copy(update={"seed": ranks.rank})
        return open_tiny(config.model_copy(update={"train": train}), ranks, plan)

    return train_rank(load_settings(Config, None, argv[1:]), open_model)


if __name__ == "__main__":
    from shards import cli

    cli.run_and_exit(train_apart if "apart" in sys.argv else show_held)
