"""Where a run goes on from, and what the config must not change on the way."""

import hashlib
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import yaml
from conftest import write_dataset
from small import audit_of, config_of, train_here

from shards.errors import FormatError
from shards.order import Order, OrderSettings
from shards.reader import SplitReader
from xctrain import checkpoint
from xctrain.errors import CheckpointError, ConfigError, ResumeError
from xctrain.start import make_plan


@pytest.fixture(scope="module")
def trained(drawn_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 10 steps with checkpoints at 5 and 10. Not to be changed: copy it first."""
    run = tmp_path_factory.mktemp("trained") / "run"
    train_here(drawn_shards, run)
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def refused(shards: Path, run: Path, error: type[Exception] = ResumeError, **changes: Any) -> str:
    with pytest.raises(error) as caught:
        make_plan(config_of(shards, run, **changes), world_size=1)
    return str(caught.value)


CHANGES = [
    ("train__seed", 3, "train.seed=0", "train.seed=3"),
    ("train__global_batch", 24, "train.global_batch=12", "train.global_batch=24"),
    ("train__num_steps", 11, "train.num_steps=10", "train.num_steps=11"),
    ("order__fragment", 16, "order.fragment=8", "order.fragment=16"),
    ("order__window", 64, "order.window=32", "order.window=64"),
    ("order__lanes", 2, "order.lanes=4", "order.lanes=2"),
    ("optim__lr", 0.5, "optim.lr=0.001", "optim.lr=0.5"),
    ("optim__schedule", "linear", "optim.schedule=cosine", "optim.schedule=linear"),
    ("data__captions", "first", "data.captions=random", "data.captions=first"),
    ("model__prompt", "Say it.", "model.prompt=Describe the image.", "model.prompt=Say it."),
    ("model__max_length", 90, "model.max_length=None", "model.max_length=90"),
    ("model__freeze", "[head*]", "model.freeze=[]", "model.freeze=['head*']"),
    ("train__precision", "bf16", "train.precision=fp32", "train.precision=bf16"),
]


@pytest.mark.parametrize(("field", "value", "saved", "now"), CHANGES)
def test_changed_trajectory_is_refused_with_both_values(
    drawn_shards: Path, trained: Path, field: str, value: Any, saved: str, now: str
) -> None:
    text = refused(drawn_shards, trained, **{field: value})
    name = field.replace("__", ".")
    assert text.startswith(
        f"step-00000010: saved with {saved}, this run has {now}; set it to {saved.partition('=')[2]}, "
    )
    assert text.endswith(f"or accept the change with train.resume_with={name}, or choose another run.dir")


def test_field_that_a_checkpoint_is_too_old_for_had_its_default(drawn_shards: Path, run: Path) -> None:
    saved = run / "checkpoints" / "step-00000010" / checkpoint.CONFIG
    values = yaml.safe_load(saved.read_text())
    del values["train"]["compile"], values["model"]["freeze"]
    saved.write_text(yaml.safe_dump(values))
    listed = saved.with_name(checkpoint.FILES)
    sums = json.loads(listed.read_text())
    sums[saved.name] = {"bytes": saved.stat().st_size, "sha256": hashlib.sha256(saved.read_bytes()).hexdigest()}
    listed.write_text(json.dumps(sums))
    text = refused(drawn_shards, run, train__compile=True)
    assert "saved with train.compile=False, this run has train.compile=True" in text
    assert "model.freeze" not in text


def test_several_changes_are_named_together(drawn_shards: Path, trained: Path) -> None:
    text = refused(drawn_shards, trained, train__seed=3, optim__lr=0.5, train__resume_with="train.num_steps")
    assert "saved with train.seed=0, optim.lr=0.001, this run has train.seed=3, optim.lr=0.5; set them back" in text
    assert "train.resume_with=train.seed,optim.lr" in text


def test_what_is_free_may_change(drawn_shards: Path, trained: Path) -> None:
    free = {"train__micro_batch": 6, "data__workers": 3, "train__save_every": 2, "train__log_keys": False}
    plan = make_plan(config_of(drawn_shards, trained, eval__every=5, **free), world_size=2)
    assert plan.state.step == 10


def test_dataset_may_lie_elsewhere(drawn_shards: Path, trained: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(drawn_shards, tmp_path / "moved"))
    assert make_plan(config_of(moved, trained), world_size=1).state.step == 10


def test_start_that_may_change_the_last_bits_is_said(
    drawn_shards: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_here(drawn_shards, run, train__micro_batch=6)
    assert "step-00000010: saved with micro_batch 4, this start has 6\n" in capsys.readouterr().err


def test_other_dataset_is_refused_with_both_manifests(trained: Path, tmp_path: Path, drawn_shards: Path) -> None:
    other = write_dataset(tmp_path / "other", {"train": [40, 20], "val": [12]})
    saved = make_plan(config_of(drawn_shards, trained), 1).state.segments[0].manifest_id
    text = refused(tmp_path / "other", trained, train__resume_with="train.seed")
    assert f"step-00000010: saved with manifest_id={saved}, data.shards=" in text
    assert f"has {other.manifest_id}; these are other samples" in text


def test_other_split_is_refused(drawn_shards: Path, trained: Path) -> None:
    text = refused(drawn_shards, trained, data__split="val", train__resume_with="data.split")
    assert "step-00000010: saved with data.split=train, data.split=val has val; these are other samples" in text


def test_field_that_need_not_be_accepted_is_no_name_for_resume_with(drawn_shards: Path, trained: Path) -> None:
    text = refused(drawn_shards, trained, ConfigError, train__resume_with="train.sede")
    assert text == "train.resume_with: train.sede is not a field that must match; did you mean train.seed?"
    text = refused(drawn_shards, trained, ConfigError, train__resume_with="xyz")
    assert text.startswith("train.resume_with: xyz is not a field that must match; those are data.split, ")


def test_names_to_accept_are_checked_where_there_is_no_run_too(drawn_shards: Path, tmp_path: Path) -> None:
    text = refused(drawn_shards, tmp_path, ConfigError, train__resume_with="optim.rl")
    assert text == "train.resume_with: optim.rl is not a field that must match; did you mean optim.lr?"


def test_split_to_score_that_is_not_there_is_refused_with_both_ways_out(drawn_shards: Path, tmp_path: Path) -> None:
    text = refused(drawn_shards, tmp_path, ConfigError, eval__every=5, eval__split="test")
    assert "test" in text
    assert text.endswith(
        "; set eval.split to one of those, or eval.every=null and watch.captions_every=null to caption none"
    )


def test_run_folder_that_cannot_be_written_is_a_wrong_setting(drawn_shards: Path) -> None:
    arguments = runs.settings(drawn_shards, Path("/proc/run"))
    command = [sys.executable, "-m", "xctrain", "launch", os.devnull, "--processes", "1", *arguments]
    text = runs.finish(runs.start(command), code=2)
    assert "error: run.dir is /proc/run, which cannot be written to: No such file or directory; choose another" in text


def test_other_model_is_refused_by_its_name(drawn_shards: Path, run: Path) -> None:
    def other(*arguments: Any) -> tuple[Any, str]:
        from tiny import open_tiny

        from xctrain import resume

        config, _, plan = arguments
        resume.require_model(config, plan.point, "other")
        return open_tiny(*arguments)[0], "other"

    with pytest.raises(
        ResumeError, match=r"step-00000010: saved with the base model tiny, .* is other; use that model"
    ):
        train_here(drawn_shards, run, other)
    train_here(drawn_shards, run, other, train__resume_with=" train.seed, model.path ")


def test_accepted_seed_begins_a_segment_and_the_audit_still_proves_the_run(drawn_shards: Path, run: Path) -> None:
    changes = {"train__seed": 3, "train__num_steps": 30, "train__resume_with": "train.seed,train.num_steps"}
    plan = make_plan(config_of(drawn_shards, run, **changes), 1)
    assert "accepted: train.seed was 0, is 3" in plan.notes
    state = train_here(drawn_shards, run, **changes)

    assert [(s.seed, s.first_n, s.first_step, s.first_epoch) for s in state.segments] == [(0, 0, 0, 0), (3, 120, 10, 1)]
    result = audit_of(run)
    assert result.ok
    assert (result.evidence, result.step, result.samples_consumed) == ("keys", 30, 360)
    # The order changed within epoch 1: its two parts are each free of repeats.
    assert [(e.epoch, e.segment, e.seen) for e in result.epochs] == [
        (0, 0, 100),
        (1, 0, 20),
        (1, 1, 80),
        (2, 1, 100),
        (3, 1, 60),
    ]


def test_another_global_batch_goes_on_from_the_same_position(drawn_shards: Path, run: Path) -> None:
    changes = {
        "train__global_batch": 8,
        "train__num_steps": 15,
        "train__resume_with": "train.num_steps,train.global_batch",
    }
    state = train_here(drawn_shards, run, **changes)
    assert (state.step, state.samples_consumed) == (15, 160)
    assert audit_of(run).ok


@pytest.mark.parametrize(("stop_at", "epoch"), [(20, 2), (27, 3)])
def test_resume_in_a_later_epoch_goes_on_in_that_epochs_own_order(
    drawn_shards: Path, tmp_path: Path, stop_at: int, epoch: int
) -> None:
    run = tmp_path / "run"
    length = {"train__num_steps": 36}
    train_here(drawn_shards, run, stop_asked=lambda: runs.last_step(run) >= stop_at - 1, **length)
    state = make_plan(config_of(drawn_shards, run, **length), 1).state
    assert (state.step, state.samples_consumed, state.epoch) == (stop_at, 12 * stop_at, epoch)
    train_here(drawn_shards, run, **length)

    reader = SplitReader(drawn_shards, "train")
    order = Order(reader.shard_sizes, OrderSettings(0, fragment=8, window=32, lanes=4))
    ns = np.arange(12 * stop_at, 12 * (stop_at + 1))
    due = [(n, reader.key(i)) for n, i in zip(ns.tolist(), order.indices(ns).tolist(), strict=True)]
    trained = runs.keys_by_step(run)
    assert trained[stop_at + 1] == due
    assert [key for _, key in due] != [reader.key(i) for i in order.indices(ns % 100).tolist()]  # as epoch 0 has it
    assert [line["epoch"] for line in runs.events(run, "step")][stop_at] == 12 * (stop_at + 1) / 100
    slots = [slot for step in trained.values() for slot in step]
    assert all(sorted(k for n, k in slots if n // 100 == e) == sorted(reader.keys()) for e in range(4))


def test_impossible_number_of_processes_names_the_possible_ones(drawn_shards: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"train.global_batch is 12, which is not processes \(5\) x train.micro_batch"
    ) as e:
        make_plan(config_of(drawn_shards, tmp_path / "new"), world_size=5)
    assert "with these, 1, 3 processes are possible" in str(e.value)


def test_shard_that_was_cut_is_found_before_a_model_is_loaded(drawn_shards: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(drawn_shards, tmp_path / "damaged"))
    tar = damaged / "train-000002.tar"
    size = tar.stat().st_size
    tar.write_bytes(tar.read_bytes()[:-1024])
    text = refused(damaged, tmp_path / "run", FormatError)
    assert f"train-000002.tar: has {size - 1024} bytes, the manifest says {size}" in text


def test_flipped_byte_is_found_beforehand_by_a_full_check(drawn_shards: Path, tmp_path: Path) -> None:
    from xctrain.errors import RunError

    damaged = Path(shutil.copytree(drawn_shards, tmp_path / "damaged"))
    flip_byte(damaged / "train-000001.tar", 2000)
    make_plan(config_of(damaged, tmp_path / "run"), 1)
    text = refused(damaged, tmp_path / "run", RunError, data__verify="full")
    assert re.search(r"2 findings, first: train-000001.tar: .*; see `python -m shards verify", text)


def flip_byte(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_half_written_newest_checkpoint_is_passed_over(drawn_shards: Path, run: Path) -> None:
    newest = run / "checkpoints" / "step-00000010"
    (newest / "files.json").unlink()
    plan = make_plan(config_of(drawn_shards, run), 1)
    assert plan.state.step == 5
    [note] = plan.notes
    assert note == f"passed over {newest}: files.json is missing or damaged, so the save did not end"


def contents(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}


def test_run_whose_every_checkpoint_is_damaged_does_not_start_over(drawn_shards: Path, run: Path) -> None:
    folder = run / "checkpoints"
    for path in folder.iterdir():
        (path / "rng.json").unlink()
    before = contents(run)
    text = refused(drawn_shards, run)
    newer, older = (f"{folder}/step-{step:08d}: rng.json is missing" for step in (10, 5))
    assert text == (
        f"{folder}: every checkpoint (2) is damaged: {newer}; {older}. Nothing was touched; restore one of them, or choose "
        f"another run.dir, or move {run} away to start over"
    )
    assert contents(run) == before


def test_run_whose_checkpoints_are_gone_does_not_start_over(drawn_shards: Path, run: Path) -> None:
    shutil.rmtree(run / "checkpoints")  # or on a disk that is not there
    before = contents(run)
    assert refused(drawn_shards, run) == (
        f"{run / 'checkpoints'}: holds no checkpoint, though the run's log tells of one at step 10. Nothing was touched; put "
        f"the checkpoints back, or choose another run.dir, or move {run} away to start over"
    )
    assert contents(run) == before
    run.rename(run.with_name("moved"))
    assert make_plan(config_of(drawn_shards, run), 1).point is None


def test_kill_within_the_first_save_starts_over(drawn_shards: Path, run: Path) -> None:
    folder = run / "checkpoints"
    shutil.rmtree(folder / "step-00000005")
    (folder / "step-00000010").rename(folder / ".step-00000010.tmp")
    (folder / ".step-00000010.tmp" / "files.json").unlink()
    log = run / "metrics.jsonl"
    log.write_text("".join(line for line in log.read_text().splitlines(True) if '"event":"save"' not in line))
    plan = make_plan(config_of(drawn_shards, run), 1)
    assert (plan.point, plan.notes) == (None, ())


def test_never_refuses_a_folder_with_a_checkpoint(drawn_shards: Path, trained: Path) -> None:
    text = refused(drawn_shards, trained, train__resume="never")
    assert text.startswith(
        f"{trained}: holds a run (its newest checkpoint is step-00000010), train.resume=never starts"
    )


def test_never_refuses_a_folder_with_a_log(drawn_shards: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    text = refused(drawn_shards, tmp_path, train__resume="never")
    assert "holds a run (it has a metrics.jsonl)" in text
    assert ResumeError.exit_code == 2


def test_never_starts_in_a_folder_without_a_run(drawn_shards: Path, tmp_path: Path) -> None:
    assert make_plan(config_of(drawn_shards, tmp_path, train__resume="never"), 1).point is None


def test_run_folder_that_is_a_file_or_a_dataset_is_refused(drawn_shards: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    text = refused(drawn_shards, tmp_path / "file", ConfigError)
    assert text == f"run.dir is {tmp_path}/file, which is no folder; choose another"
    text = refused(drawn_shards, drawn_shards, ConfigError)
    assert text == f"run.dir is {drawn_shards}, which is a shard folder (it holds manifest.json); choose another"


def test_path_of_nothing_is_refused(drawn_shards: Path, tmp_path: Path) -> None:
    text = refused(drawn_shards, tmp_path, ConfigError, train__resume="runs/step-7")
    assert text == "train.resume is runs/step-7, there is no such folder; give a checkpoint's folder, auto or never"


def test_path_of_a_damaged_checkpoint_is_refused_and_not_replaced_by_another(drawn_shards: Path, run: Path) -> None:
    newest = run / "checkpoints" / "step-00000010"
    (newest / "rng.json").write_text("x")
    size = "files.json says"
    text = refused(drawn_shards, run, CheckpointError, train__resume=newest)
    assert f"{newest}: rng.json has 1 bytes, {size}" in text


def test_folder_of_a_run_is_no_checkpoint_but_names_one(drawn_shards: Path, trained: Path) -> None:
    newest = trained / "checkpoints" / "step-00000010"
    for folder in (trained, trained / "checkpoints"):
        text = refused(drawn_shards, trained, ConfigError, train__resume=folder)
        assert text == f"train.resume is {folder}, which is a folder of checkpoints; give one of them, such as {newest}"


def test_going_back_to_an_older_checkpoint_leaves_one_history(
    drawn_shards: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older = run / "checkpoints" / "step-00000005"

    class StopError(Exception):
        pass

    def stop() -> bool:
        raise StopError

    # Killed before it saved anything: the next start must not find the future that was given up, whose logs are gone.
    with pytest.raises(StopError):
        train_here(drawn_shards, run, stop_asked=stop, train__resume=older)
    assert runs.last_step(run) == 5
    assert f"{run}/checkpoints/step-00000010: is now set-aside-step-00000010, as the run" in capsys.readouterr().err
    assert make_plan(config_of(drawn_shards, run), 1).state.step == 5
    given_up = run / "checkpoints" / "set-aside-step-00000010"
    checkpoint.check(given_up)
    assert "is not a checkpoint that it can go back to" in refused(drawn_shards, run, train__resume=given_up)
    train_here(drawn_shards, run)
    assert not given_up.exists()
    assert [line.get("source") for line in runs.events(run, "start")] == [None, str(older), str(older)]
    assert [line["step"] for line in runs.events(run, "step")] == list(range(1, 11))
    assert audit_of(run).ok


def test_start_says_which_steps_are_trained_again(drawn_shards: Path, run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step-00000010")
    train_here(drawn_shards, run)
    notes = runs.events(run, "start")[-1]["notes"]
    assert notes == ["the last start was killed at step 10; the 5 steps after step 5 are trained again"]


def test_another_runs_checkpoint_may_be_gone_on_from(drawn_shards: Path, trained: Path, tmp_path: Path) -> None:
    fork = tmp_path / "fork"
    state = train_here(drawn_shards, fork, train__resume=trained / "checkpoints" / "step-00000005")
    assert state.step == 10
    assert state.keys_from == 60
    result = audit_of(fork)
    assert (result.ok, result.evidence) == (True, "digest")
    assert [line["fork"] for line in runs.events(fork, "start")] == [True]
    assert runs.weights(fork, 10) == runs.weights(trained, 10)


def test_two_runs_are_never_mixed_in_one_folder(drawn_shards: Path, trained: Path, run: Path, tmp_path: Path) -> None:
    path = trained / "checkpoints" / "step-00000005"
    before = contents(run)
    text = refused(drawn_shards, run, train__resume=path)
    assert text.startswith(
        f"{run}: holds a run, train.resume={path} is not a checkpoint that it can go back to; choose"
    )
    assert contents(run) == before


def test_fork_that_was_killed_before_it_saved_does_not_start_at_zero(
    drawn_shards: Path, trained: Path, tmp_path: Path
) -> None:
    fork, path = tmp_path / "fork", trained / "checkpoints" / "step-00000005"
    train_here(drawn_shards, fork, train__resume=path)
    shutil.rmtree(fork / "checkpoints")
    assert f"{fork}: began from {path} and has no checkpoint of its own yet; go on" in refused(drawn_shards, fork)
    assert train_here(drawn_shards, fork, train__resume=path).step == 10
    assert [line["step"] for line in runs.events(fork, "step")] == [6, 7, 8, 9, 10]


def test_logged_keys_count_as_proof_only_if_all_of_them_are(drawn_shards: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_here(drawn_shards, run, train__log_keys=False, train__num_steps=5)
    more = {"train__num_steps": 10, "train__resume_with": "train.num_steps"}
    state = train_here(drawn_shards, run, **more)
    assert state.keys_from == 60
    result = audit_of(run)
    assert (result.ok, result.evidence) == (True, "digest")
    assert result.findings == ("keys are logged from position 60 on only; the digest covers the rest",)
