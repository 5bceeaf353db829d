"""Checkpoints are whole or not there, and the old one stands until the new one is."""

import json
import os
import resource
import shutil
import sys
import threading
from pathlib import Path

import pytest
import runs
import torch
from torch import nn

from shards.atomic import aside
from xctrain import checkpoint, rng, tensors
from xctrain.checkpoint import Checkpoints, Content
from xctrain.errors import CheckpointError
from xctrain.optim import make_optimizer
from xctrain.state import Segment, TrainState
from xctrain.trainconfig import OptimConfig

SEGMENT = Segment(0, 0, 0, 100, 12, "abc", "train", seed=7, fragment=32, window=64, lanes=4)


def content(step: int, value: float = 1.0) -> Content:
    """The checkpoint of a small model after one update."""
    module, optimizer = updated(step, value)
    state = TrainState(step=step, samples_consumed=12 * step, digest=step, segments=(SEGMENT,))
    world = {"world_size": 1, "threads": 1}
    snapshot = tensors.snapshot(module, optimizer)
    assert snapshot is not None
    return Content(state, snapshot, {}, [rng.capture()], "train: {num_steps: 9}\n", world, "tiny")


def updated(step: int, value: float = 1.0) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A small model and its optimizer after one update."""
    torch.manual_seed(step)
    module = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    optimizer = make_optimizer(module.parameters(), OptimConfig())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        module[0].bias.fill_(value)
    return module, optimizer


def whole_steps(checkpoints: Checkpoints) -> list[int]:
    found = []
    for step in checkpoints.steps():
        checkpoint.check(checkpoints.path(step))
        found.append(step)
    return found


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", keep=2)


def test_weights_and_optimizer_read_back_bit_by_bit(checkpoints: Checkpoints) -> None:
    (module, optimizer), (other, others) = updated(5), updated(6)
    path = checkpoints.save(content(5))
    tensors.load_weights(path, other, every_trainable=True)
    tensors.load_optimizer(path, other, others)
    for before, after in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(before, after)
        assert optimizer.state[before].keys() == others.state[after].keys()
        for slot, value in optimizer.state[before].items():
            assert torch.equal(value, others.state[after][slot])
    assert checkpoint.read_position(path)[0] == content(5).state


def test_nothing_in_a_checkpoint_is_pickled(checkpoints: Checkpoints) -> None:
    names = {path.name for path in checkpoints.save(content(5)).iterdir()}
    assert {Path(name).suffix for name in names} == {".safetensors", ".json", ".yaml"}


def test_files_have_the_mode_that_new_files_have(checkpoints: Checkpoints) -> None:
    before = os.umask(0o027)
    try:
        path = checkpoints.save(content(5))
    finally:
        os.umask(before)
    assert {oct(file.stat().st_mode & 0o777) for file in path.iterdir()} == {"0o640"}


def test_position_can_be_read_by_people(checkpoints: Checkpoints) -> None:
    _, position = checkpoint.read_position(checkpoints.save(content(9)))
    assert position["order"] == {"version": 1, "seed": 7, "fragment": 32, "window": 64, "lanes": 4}
    assert position["epoch"] == 1
    assert position["masked_counts"] == {}


def test_newest_are_kept_in_numeric_order(checkpoints: Checkpoints) -> None:
    for step in (9, 10, 99_999_999, 100_000_000):
        checkpoints.save(content(step))
    assert checkpoints.steps() == [100_000_000, 99_999_999]


def test_save_after_going_back_removes_the_past_that_was_left(checkpoints: Checkpoints) -> None:
    for step in (5, 10):
        checkpoints.save(content(step))
    checkpoints.go_back(5)
    assert checkpoints.newest_valid()[0] == checkpoints.path(5)
    checkpoints.save(content(7))
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["step-00000005", "step-00000007"]


def test_no_checkpoint_is_no_error(checkpoints: Checkpoints) -> None:
    assert checkpoints.newest_valid() == (None, [])


def test_checkpoints_of_a_run_that_is_saving_are_never_called_damaged(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(content(1))

    def save() -> None:
        for step in range(2, 150):
            checkpoints.save(content(step))

    saving = threading.Thread(target=save)
    saving.start()
    while saving.is_alive():
        path, passed_over = Checkpoints(tmp_path, keep=1).newest_valid()
        assert path
        assert not passed_over
    saving.join()


def test_checkpoints_that_are_held_stay_while_others_are_saved(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)

    def save() -> None:
        for step in range(1, 150):
            checkpoints.save(content(step))

    saving = threading.Thread(target=save)
    saving.start()
    while saving.is_alive():
        with checkpoints.hold(10**6) as steps:
            assert not steps or checkpoint.check(checkpoints.path(steps[-1])) is None
    saving.join()
    checkpoints.save(content(150))
    assert checkpoints.steps() == [150]


def test_start_gives_a_whole_checkpoint_the_name_that_a_kill_kept_from_it(checkpoints: Checkpoints) -> None:
    whole = checkpoints.save(content(5))
    older = checkpoints.path(4)
    checkpoints.finish_save()
    assert names_in(checkpoints.folder) == [whole.name]
    whole.rename(aside(whole))
    shutil.copytree(aside(whole), whole)  # damaged, and about to give way
    (whole / "files.json").unlink()
    shutil.copytree(aside(whole), aside(older))
    (aside(older) / "rng.json").unlink()  # a save that did not end
    checkpoints.finish_save()
    assert names_in(checkpoints.folder) == [aside(older).name, whole.name]
    assert checkpoints.newest_valid() == (whole, [])


def test_checkpoint_that_goes_while_it_is_read_is_chosen_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(content(1))
    chosen: list[Path] = []

    def choose() -> Path:
        chosen.append(checkpoints.path(checkpoints.steps()[0]))
        return chosen[-1]

    def read(path: Path) -> str:
        if len(chosen) < 3:
            checkpoints.save(content(1 + len(chosen)))
        return (path / "config.yaml").read_text()

    assert checkpoint.read_chosen(choose, read) == (checkpoints.path(3), "train: {num_steps: 9}\n")
    with pytest.raises(OSError, match="its own"):
        checkpoint.read_chosen(choose, raise_its_own)


def raise_its_own(_: Path) -> None:
    raise OSError("its own")


def files_of_a_checkpoint() -> list[str]:
    return [
        "config.yaml",
        "files.json",
        "model.safetensors",
        "optimizer.json",
        "optimizer.safetensors",
        "position.json",
    ]


@pytest.mark.parametrize("name", [*files_of_a_checkpoint(), "rng.json", "scaler.json"])
@pytest.mark.parametrize("damage", ["absent", "cut", "empty", "flipped", "longer"])
def test_damaged_file_is_passed_over_for_the_older_checkpoint(checkpoints: Checkpoints, name: str, damage: str) -> None:
    older, newest = checkpoints.save(content(5)), checkpoints.save(content(10))
    file = newest / name
    data = file.read_bytes()
    if damage == "absent":
        file.unlink()
    else:
        flipped = bytes([*data[:-1], data[-1] ^ 1])
        file.write_bytes({"cut": data[:-1], "empty": b"", "flipped": flipped, "longer": data + b"x"}[damage])

    path, notes = checkpoints.newest_valid()
    assert path == older
    [note] = notes
    if name == "files.json":
        assert note.endswith("step-00000010: files.json is missing or damaged, so the save did not end")
    elif damage == "absent":
        assert note.endswith(f"step-00000010: {name} is missing")
    elif damage == "flipped":
        assert f"step-00000010: {name} has sha256 " in note
        assert ", files.json says " in note
    else:
        assert note.endswith(f"{name} has {file.stat().st_size} bytes, files.json says {len(data)}")


def test_any_byte_of_the_list_of_files_may_be_damaged(checkpoints: Checkpoints) -> None:
    file = checkpoints.save(content(5)) / "files.json"
    data = file.read_bytes()
    for i in range(0, len(data), 7):
        file.write_bytes(data[:i] + bytes([data[i] ^ 0x15]) + data[i + 1 :])
        if not data[i : i + 1].isspace():  # one blank for another
            assert checkpoints.newest_valid()[0] is None, i


@pytest.mark.parametrize("text", ["{}", "[]", "3", '{"model.safetensors": 3}'])
def test_list_of_files_that_lists_too_little_is_damage(checkpoints: Checkpoints, text: str) -> None:
    (checkpoints.save(content(5)) / "files.json").write_text(text)
    assert checkpoints.newest_valid()[0] is None


def test_weights_that_are_not_finite_are_never_saved(checkpoints: Checkpoints) -> None:
    checkpoints.save(content(5))
    with pytest.raises(
        CheckpointError, match=r"step-00000010: not saved: 1 weights hold values that are not finite, f"
    ) as e:
        checkpoints.save(content(10, value=float("inf")))
    assert "first 0.bias" in str(e.value)
    assert whole_steps(checkpoints) == [5]


def test_failure_at_any_write_leaves_an_older_checkpoint(checkpoints: Checkpoints) -> None:
    """A real limit on file size fails the save at one file after the other, at any byte of it."""
    checkpoints.save(content(5))
    sizes = {path.stat().st_size for path in checkpoints.save(content(10)).iterdir()}
    shutil.rmtree(checkpoints.path(10))
    assert len(sizes) > 4
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in sorted({0, 1, *(size - 1 for size in sizes), *(size // 2 for size in sizes)}):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(CheckpointError) as error:
                checkpoints.save(content(10))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "step-00000010: cannot be written: " in str(error.value)
        assert "File too large" in str(error.value)
        assert "the newest whole checkpoint is step-00000005; make room, then start again" in str(error.value)
        assert checkpoints.newest_valid() == (checkpoints.path(5), [])
    checkpoints.save(content(10))
    assert whole_steps(checkpoints) == [10, 5]


KILLED_SAVE = """
import os, sys
sys.path[:0] = {paths!r}
from pathlib import Path
from test_checkpoint import content
from xctrain.checkpoint import Checkpoints

left = int(sys.argv[2])
def count(event, args):
    global left
    if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir") and {folder!r} in str(args[0]):
        left -= 1
        if left < 0:
            os._exit(9)  # between two operations on the file system, as a SIGKILL would
parts = content(int(sys.argv[1]), value=2.0)
checkpoints = Checkpoints(Path({folder!r}), keep=1)
for n in range(1000):
    pid = os.fork()
    if pid == 0:
        left = n
        sys.addaudithook(count)
        checkpoints.save(parts)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    path, notes = checkpoints.newest_valid()
    assert path is not None, (n, notes)
    print(path.name, flush=True)
    if code == 0:
        break
    assert code == 9, code
"""


@pytest.mark.parametrize("step", [10, 5])
def test_kill_before_any_file_operation_leaves_a_whole_checkpoint(checkpoints: Checkpoints, step: int) -> None:
    """With one checkpoint kept, and also where the save replaces a state of the same step."""
    checkpoints.save(content(5))
    paths = [str(runs.TESTS.parent), str(runs.TESTS), str(runs.TESTS / "xctrain")]
    code = KILLED_SAVE.format(paths=paths, folder=str(checkpoints.folder))
    names = runs.finish(runs.start([sys.executable, "-c", code, str(step), "0"])).split()

    assert len(names) > 20
    assert names[0] == "step-00000005"
    assert names[-1] == f"step-{step:08d}"
    assert names_in(checkpoints.folder) == [f"step-{step:08d}"]
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    tensors.load_weights(checkpoints.path(step), model, every_trainable=True)
    assert model[0].bias.tolist() == [2.0, 2.0]


def test_too_little_space_is_said_before_anything_is_written(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.save(content(5))
    monkeypatch.setattr(checkpoint, "_SPARE_BYTES", 2**60)
    with pytest.raises(
        CheckpointError,
        match=r"step-00000010: needs \d+ MB of disk \([\d.]+ MB of weights, [\d.]+ MB of optimizer, and \d+ MB to spare "
        r"for logs\), \d+ MB are free; the newest whole",
    ):
        checkpoints.save(content(10))
    assert names_in(checkpoints.folder) == ["step-00000005"]


def test_other_weights_than_the_models_are_named(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(content(5))
    with pytest.raises(
        CheckpointError, match=r"holds 4 trainable weights, the model has 2; 6 names are on one side only"
    ):
        tensors.load_weights(path, nn.Linear(3, 2), every_trainable=True)


def test_other_shapes_than_the_models_are_named(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(content(5))
    model = nn.Sequential(nn.Linear(4, 2), nn.LayerNorm(2))
    with pytest.raises(CheckpointError, match=r"0.weight is \(2, 3\), the model has \(2, 4\)"):
        tensors.load_weights(path, model, every_trainable=True)


def test_optimizer_state_of_a_weight_that_does_not_train_is_refused(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(content(5))
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    model[1].bias.requires_grad_(False)
    optimizer = make_optimizer(model.parameters(), OptimConfig())
    with pytest.raises(CheckpointError, match=r"optimizer state for 1.bias, which does not train here"):
        tensors.load_optimizer(path, model, optimizer)


def test_files_are_listed_with_their_sizes(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(content(5))
    listed = json.loads((path / "files.json").read_text())
    assert {name: entry["bytes"] for name, entry in listed.items()} == {
        file.name: file.stat().st_size for file in path.iterdir() if file.name != "files.json"
    }
