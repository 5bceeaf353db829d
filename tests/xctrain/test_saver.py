"""A save that goes on beside training: what it holds is the state at its begin, and how it ends is said."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import runs
import torch
from small import train_here
from test_checkpoint import content, updated

from xctrain import checkpoint, saver, tensors
from xctrain.checkpoint import Checkpoints, Content
from xctrain.errors import CheckpointError
from xctrain.hostmemory import available_bytes
from xctrain.saver import HostCopies, Saver


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", keep=2)


@pytest.fixture
def writer(checkpoints: Checkpoints) -> Iterator[Saver]:
    yield (found := Saver(checkpoints, asynchronous=True))
    assert not found.ended()  # every test has asked how its saves ended


def copied(writer: Saver, module: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Content:
    snapshot = tensors.snapshot(module, optimizer, writer.copy)
    assert snapshot is not None
    return replace(content(step), snapshot=snapshot)


def test_what_is_written_is_the_state_at_the_begin_however_training_moves_on(writer: Saver) -> None:
    module, optimizer = updated(5)
    other, others = updated(6)
    for step in (5, 10):  # the second save takes the memory of the first
        state = [p.detach().clone() for p in module.parameters()]
        means = [optimizer.state[p]["exp_avg"].clone() for p in module.parameters()]
        writer.begin(copied(writer, module, optimizer, step), time.perf_counter())
        for parameter in module.parameters():
            optimizer.state[parameter]["exp_avg"].fill_(7.0)
            optimizer.state[parameter]["step"].fill_(7.0)
            parameter.detach().fill_(float("nan"))
        saved = writer.finish()
        assert saved is not None
        tensors.load_weights(saved.path, other, every_trainable=True)
        tensors.load_optimizer(saved.path, other, others)
        for weight, mean, parameter in zip(state, means, other.parameters(), strict=True):
            assert torch.equal(parameter, weight)
            assert torch.equal(others.state[parameter]["exp_avg"], mean)
        tensors.load_weights(saved.path, module, every_trainable=True)


def test_memory_that_was_taken_before_is_used(writer: Saver) -> None:
    module, optimizer = updated(5)
    writer.prepare(tensors.shapes(module, ("exp_avg", "exp_avg_sq")))
    first = copied(writer, module, optimizer, 5).snapshot
    again = copied(writer, module, optimizer, 10).snapshot
    assert {**first.weights, **first.slots}.keys() > tensors.shapes(module, ("exp_avg", "exp_avg_sq")).keys()
    for name, tensor in {**first.weights, **first.slots}.items():
        assert {**again.weights, **again.slots}[name].data_ptr() == tensor.data_ptr()


def test_state_of_another_shape_gets_memory_of_its_own() -> None:
    copies = HostCopies()
    short, long = copies("a", torch.ones(3)), copies("a", torch.arange(4.0))
    assert copies.complete
    assert (short.tolist(), long.tolist()) == ([1.0] * 3, [0.0, 1.0, 2.0, 3.0])


def test_save_without_memory_for_a_copy_is_written_while_training_waits(
    writer: Saver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(saver, "_SPARE_BYTES", 2**60)
    monkeypatch.setattr(saver, "_SMALL_BYTES", 0)
    module, optimizer = updated(5)
    writer.begin(copied(writer, module, optimizer, 5), time.perf_counter())
    assert writer.ended()
    saved = writer.finish()
    assert saved is not None
    assert saved.blocked_s == saved.save_s
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("this machine has ")
    assert "GB of memory left, too little for a copy of the state: training waits while checkpoints are written" in line
    checkpoint.check(saved.path)


def test_failure_is_raised_once_and_the_next_save_is_free_of_it(checkpoints: Checkpoints, writer: Saver) -> None:
    checkpoints.save(content(5))
    writer.begin(content(10, value=float("inf")), time.perf_counter())
    with pytest.raises(CheckpointError, match=r"step-00000010: not saved: 1 weights hold values that are not finite"):
        writer.finish()
    assert writer.finish() is None
    writer.begin(content(11), time.perf_counter())
    saved = writer.finish()
    assert saved is not None
    assert saved.path == checkpoints.path(11)


def test_minutes_make_a_save_due_counted_from_the_one_before(drawn_shards: Path, tmp_path: Path) -> None:
    changes = {"train__save_every": None, "train__num_steps": 6}
    train_here(drawn_shards, tmp_path / "each", **changes, train__save_every_minutes=1e-9)
    train_here(drawn_shards, tmp_path / "none", **changes, train__save_every_minutes=60)
    train_here(drawn_shards, tmp_path / "steps", train__save_every=4, train__num_steps=6, train__save_every_minutes=60)
    saved = {name: [x["step"] for x in runs.events(tmp_path / name, "save")] for name in ("each", "none", "steps")}
    assert saved == {"each": [1, 2, 3, 4, 5, 6], "none": [6], "steps": [4, 6]}


def test_time_since_the_last_save_is_what_makes_one_due(checkpoints: Checkpoints) -> None:
    writer = Saver(checkpoints, asynchronous=True, every_s=0.2)
    assert not writer.due()
    time.sleep(0.25)
    assert writer.due()
    writer.begin(content(5), time.perf_counter())
    assert not writer.due()
    assert writer.finish() is not None


def test_memory_of_a_container_counts(tmp_path: Path) -> None:
    machine = available_bytes(tmp_path)  # no container
    assert machine > 2**27
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) > 2**27
    (tmp_path / "memory.max").write_text(f"{2**26}\n")
    (tmp_path / "memory.current").write_text(f"{2**25}\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 1000\n")
    assert available_bytes(tmp_path) == 2**25 + 1000
