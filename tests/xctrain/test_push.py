"""A run's checkpoints in an S3 store of this machine, and the run on another machine that had none of it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import objectstore
import pytest
import runs
from small import audit_of, config_of, train_here
from test_checkpoint import content

from shards import remote as remotes
from shards.remote import Remote
from xctrain import push
from xctrain.checkpoint import Checkpoints
from xctrain.errors import CheckpointError, ConfigError, ResumeError, TrainError
from xctrain.push import Pusher
from xctrain.pushed import whole_steps


@pytest.fixture(scope="module")
def store() -> Iterator[objectstore.ObjectStore]:
    with objectstore.running() as running:
        yield running


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remotes, "FIRST_WAIT_S", 0.01)


@pytest.fixture
def address(store: objectstore.ObjectStore, request: pytest.FixtureRequest) -> str:
    return f"s3://{objectstore.BUCKET}/{request.node.name}"


def there(address: str) -> list[str]:
    return sorted(Remote(address).list())


def stop_at(run: Path, step: int) -> Any:
    return lambda: runs.last_step(run) >= step - 1


def test_run_goes_on_exactly_on_a_machine_that_has_nothing_of_it(
    drawn_shards: Path, tmp_path: Path, address: str
) -> None:
    first, other, straight = tmp_path / "first", tmp_path / "other", tmp_path / "straight"
    train_here(drawn_shards, first, stop_asked=stop_at(first, 7), checkpoint__push=address)
    shutil.rmtree(first)
    train_here(drawn_shards, other, train__resume=address, checkpoint__push=address)
    train_here(drawn_shards, straight)

    assert runs.trajectory(other) == runs.trajectory(straight)
    assert runs.weights(other, 10) == runs.weights(straight, 10)
    result = audit_of(other)
    assert result.ok
    assert result.evidence == "keys"  # of the steps on the first machine too
    assert whole_steps(there(address)) == [10, 7]
    # The same command again, which now finds the run here.
    assert train_here(drawn_shards, other, train__resume=address, checkpoint__push=address).step == 10


def test_start_without_a_run_here_goes_on_from_where_its_checkpoints_are_sent(
    drawn_shards: Path, tmp_path: Path, address: str
) -> None:
    run = tmp_path / "run"
    for until in (4, 7, 10):
        train_here(drawn_shards, run, stop_asked=stop_at(run, until), checkpoint__push=address)
        assert runs.last_step(run) == until
        weights = runs.weights(run, until)
        shutil.rmtree(run)
    train_here(drawn_shards, run)
    assert runs.weights(run, 10) == weights


def test_what_lies_there_is_the_kept_checkpoints_and_the_logs_up_to_them(
    drawn_shards: Path, tmp_path: Path, address: str
) -> None:
    changes = {"train__num_steps": 12, "train__save_every": 2, "train__keep": 2}
    train_here(drawn_shards, tmp_path, **changes, checkpoint__push=address)
    found = Remote(address)
    files = {p.name for p in (tmp_path / "checkpoints" / "step-00000012").iterdir()}
    expected = {f"step-{step:08d}/{name}" for step in (10, 12) for name in files}
    assert set(there(address)) == {"run.json", "metrics.jsonl", "keys-rank0.jsonl", *expected}
    for name in expected:
        assert found.read(name) == (tmp_path / "checkpoints" / name).read_bytes()
    assert (tmp_path / "keys-rank0.jsonl").read_bytes() == found.read("keys-rank0.jsonl")
    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(found.read("metrics.jsonl"))
    pushes = runs.events(tmp_path, "push")
    assert pushes[-1]["step"] == 12
    assert all(line["error"] is None for line in pushes)


def test_best_checkpoint_is_kept_there_and_comes_along(drawn_shards: Path, tmp_path: Path, address: str) -> None:
    checkpoints = Checkpoints(tmp_path / "a" / "checkpoints", 1, "cider")
    pusher = Pusher(tmp_path / "a", checkpoints, address)
    from dataclasses import replace

    for step, cider in ((5, 0.9), (10, 0.1), (15, 0.2)):
        checkpoints.save(replace(content(step), scores={"split": "val", "cider": cider}))
        pusher.offer(step, 12 * step, {})
        assert pusher.finish() is None
    assert whole_steps(there(address)) == [15, 5]
    changes = {"checkpoint__best": "cider", "eval__every": 5, "train__keep": 1, "train__resume": address}
    from xctrain.bring import fetch_run

    notes = fetch_run(config_of(drawn_shards, tmp_path / "b", **changes))
    assert notes[-1] == f"brought from {address}: step-00000015"
    brought = Checkpoints(tmp_path / "b" / "checkpoints", 1, "cider")
    assert brought.steps() == [15, 5]
    assert brought.best() == brought.path(5)


def test_half_a_push_is_no_checkpoint(drawn_shards: Path, tmp_path: Path, address: str) -> None:
    """Whichever object came last when the machine was lost, another one goes on from the checkpoint before."""
    run, other = tmp_path / "run", tmp_path / "other"
    train_here(drawn_shards, run, checkpoint__push=address)
    found = Remote(address)
    found.remove("step-00000010/files.json")
    left = [name for name in there(address) if name.startswith("step-00000010/")]
    while True:
        state = train_here(drawn_shards, other, stop_asked=lambda: True, train__resume=address)
        assert state.step == 6
        assert json.loads((other / "push.json").read_text())["from"] == address
        shutil.rmtree(other)
        if not left:
            break
        found.remove(left.pop())


@pytest.mark.parametrize("damage", ["cut", "flipped", "absent"])
def test_damaged_checkpoint_there_is_passed_over_for_the_older(
    drawn_shards: Path, tmp_path: Path, address: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train_here(drawn_shards, run, checkpoint__push=address)
    data = (run / "checkpoints" / "step-00000010" / "model.safetensors").read_bytes()
    file = tmp_path / "damaged"
    file.write_bytes(data[:-5] if damage == "cut" else bytes([*data[:-1], data[-1] ^ 1]))
    found = Remote(address)
    found.remove("step-00000010/model.safetensors")
    if damage != "absent":
        found.put("step-00000010/model.safetensors", file)
    from xctrain.bring import fetch_run

    config = config_of(drawn_shards, tmp_path / "other", train__resume=address)
    notes = fetch_run(config)
    assert notes[0].startswith(f"passed over {address}/step-00000010")
    assert "model.safetensors" in notes[0]
    assert [p.name for p in (tmp_path / "other" / "checkpoints").iterdir()] == ["step-00000005"]
    assert train_here(drawn_shards, tmp_path / "other", train__resume=address).step == 10
    assert runs.weights(tmp_path / "other", 10) == runs.weights(run, 10)


def test_store_that_is_down_stops_nothing_and_gets_all_when_it_is_back(
    drawn_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with objectstore.running() as store:
        address = f"s3://{objectstore.BUCKET}/run"
        changes = {"checkpoint__push": address, "train__save_every": 2, "train__num_steps": 8}
        train_here(drawn_shards, run, stop_asked=stop_at(run, 2), **changes)
        assert whole_steps(there(address)) == [2]
        store.kill()
        train_here(drawn_shards, run, **changes)
        said = capsys.readouterr().err
        assert f"checkpoint.push: {address}: " in said
        assert "tried again with the first checkpoint" in said
        assert f"warning: step-00000008 is not at {address}, " in said
        assert "training goes on, the next checkpoint tries again" in said
        last = runs.events(run, "push")[-1]
        assert (last["step"], last["failures"] > 0) == (8, True)
        assert "tries in a row failed" in last["error"]
        with pytest.raises(
            TrainError, match=rf"training is done, but its newest checkpoint is not at {address}: .*start a"
        ):
            push.push_rest(config_of(drawn_shards, run, **changes))
        store.start()
        push.push_rest(config_of(drawn_shards, run, **changes))
        assert whole_steps(there(address)) == [8, 6]
    assert runs.last_step(run) == 8


def test_address_of_another_run_is_refused_before_anything_is_trained(
    drawn_shards: Path, tmp_path: Path, address: str
) -> None:
    train_here(drawn_shards, tmp_path / "one", train__num_steps=2, checkpoint__push=address)
    train_here(drawn_shards, tmp_path / "two", train__num_steps=2)
    before = {name: Remote(address).read(name) for name in there(address)}
    longer = {"train__num_steps": 4, "train__resume_with": "train.num_steps"}
    with pytest.raises(ConfigError) as error:
        train_here(drawn_shards, tmp_path / "two", **longer, checkpoint__push=address)
    assert str(error.value) == (
        f"{address}: holds the checkpoints of another run (up to step-00000002); go on from them with train.resume={address} "
        "in a run.dir that holds no run, or choose another checkpoint.push"
    )
    assert {name: Remote(address).read(name) for name in there(address)} == before
    assert runs.last_step(tmp_path / "two") == 2


def test_address_with_something_else_is_refused(drawn_shards: Path, tmp_path: Path, address: str) -> None:
    (tmp_path / "file").write_text("mine")
    Remote(address).put("photos/a.jpg", tmp_path / "file")
    with pytest.raises(
        ConfigError, match=r"is not empty and holds no run \(it holds photos/a.jpg\); choose another ch"
    ):
        train_here(drawn_shards, tmp_path / "run", checkpoint__push=address)
    assert there(address) == ["photos/a.jpg"]


def test_run_folder_of_another_run_is_not_mixed_with_what_is_brought(
    drawn_shards: Path, tmp_path: Path, address: str
) -> None:
    train_here(drawn_shards, tmp_path / "one", train__num_steps=2, checkpoint__push=address)
    train_here(drawn_shards, tmp_path / "two", train__num_steps=2)
    with pytest.raises(
        ResumeError, match=rf"two: holds a run that was not brought from {address}; choose another run.dir"
    ):
        train_here(drawn_shards, tmp_path / "two", train__resume=address)


def test_address_without_a_checkpoint_is_refused(drawn_shards: Path, tmp_path: Path, address: str) -> None:
    with pytest.raises(
        CheckpointError, match=rf"train.resume is {address}, which holds no whole checkpoint; check the a"
    ):
        train_here(drawn_shards, tmp_path, train__resume=address)


def test_going_back_takes_the_later_checkpoints_there_with_the_next_save(
    drawn_shards: Path, tmp_path: Path, address: str
) -> None:
    changes = {"checkpoint__push": address, "train__save_every": 3, "train__num_steps": 9, "train__keep": 9}
    train_here(drawn_shards, tmp_path, **changes)
    assert whole_steps(there(address)) == [9, 6, 3]
    older = tmp_path / "checkpoints" / "step-00000003"
    train_here(drawn_shards, tmp_path, stop_asked=stop_at(tmp_path, 5), **changes, train__resume=older)
    assert whole_steps(there(address)) == [5, 3]


@pytest.mark.parametrize("where", ["data/copies", "https://example.org/runs", "s3://user:secret@bucket/run"])
def test_push_wants_an_address_that_takes_files_and_holds_no_secret(tmp_path: Path, where: str) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint.push( is|:)") as error:
        config_of(tmp_path, tmp_path, checkpoint__push=where)
    assert "secret" not in str(error.value)
