"""Shards that were added to a dataset between two starts: a segment of their own, from the next epoch on."""

import json
import shutil
from pathlib import Path

import pytest
import runs
from conftest import add_shards
from epochs import batch_keys, by_epoch, keys_of, once
from small import audit_of, config_of, train_here

from shards.manifest import Manifest
from xctrain import __main__ as main
from xctrain.errors import ResumeError
from xctrain.start import make_plan


def test_added_shards_come_with_the_next_epoch_and_every_epoch_stays_whole(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train_here(shards, run, train__num_steps=4)
    old = keys_of(shards)
    add_shards(shards, [15, 7])
    new = keys_of(shards)
    capsys.readouterr()
    state = train_here(shards, run, train__num_steps=30, train__resume_with="train.num_steps")

    assert [(s.first_n, s.first_step, s.first_epoch, s.num_samples) for s in state.segments] == [
        (0, 0, 0, 100),
        (100, 8, 1, 122),
    ]
    said = "other data from epoch 1 on, at position 100: 122 samples instead of 100; until then its data stay what they were"
    assert said in capsys.readouterr().err
    assert said in runs.events(run, "start")[-1]["notes"]
    assert by_epoch(run, [0, 100, 222, 344]) == [once(old), once(new), once(new)]
    result = audit_of(run)
    assert (result.ok, result.evidence) == (True, "keys")
    assert [(e.epoch, e.segment, e.seen, e.repeated, e.skipped) for e in result.epochs] == [
        (0, 0, 100, 0, 0),
        (1, 1, 122, 0, 0),
        (2, 1, 122, 0, 0),
        (3, 1, 16, 0, 0),
    ]


def test_added_shards_change_nothing_before_their_epoch_however_often_the_run_starts(
    shards: Path, tmp_path: Path
) -> None:
    straight, run = tmp_path / "straight", tmp_path / "run"
    untouched = Path(shutil.copytree(shards, tmp_path / "untouched"))
    train_here(untouched, straight, train__num_steps=8)
    train_here(shards, run, train__num_steps=3)
    longer = {"train__resume_with": "train.num_steps"}
    for number, steps in enumerate((5, 6, 8)):
        add_shards(shards, [5], first=6000 + 1000 * number)
        state = train_here(shards, run, train__num_steps=steps, **longer)
        assert [(s.first_n, s.num_samples) for s in state.segments] == [(0, 100), (100, 100 + 5 * (number + 1))]
    first_epoch = [[slot for slot in step if slot[0] < 100] for step in runs.keys_by_step(run).values()]
    assert first_epoch == [[s for s in step if s[0] < 100] for step in runs.keys_by_step(straight).values()]
    assert audit_of(run).ok


def test_shards_added_right_at_an_epochs_end_come_at_once(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    length = {"train__num_steps": None, "train__resume_with": "train.epochs"}
    train_here(shards, run, **length, train__epochs=1)
    add_shards(shards, [20])
    capsys.readouterr()
    state = train_here(shards, run, **length, train__epochs=2)
    said = capsys.readouterr().err
    assert "position 100: 120 samples instead of 100; from here on" in said
    assert "19 steps in all instead of 17; the learning rate follows" in said
    assert state.samples_consumed == 220
    assert [(s.first_n, s.first_step, s.num_samples) for s in state.segments] == [(0, 0, 100), (100, 9, 120)]
    assert [e.seen for e in audit_of(run).epochs] == [100, 120]


def test_shards_added_to_another_split_leave_the_order_alone(shards: Path, tmp_path: Path) -> None:
    straight, run = tmp_path / "straight", tmp_path / "run"
    train_here(shards, straight, train__num_steps=14)
    train_here(shards, run, train__num_steps=4)
    add_shards(shards, [9], split="val")
    train_here(shards, run, train__num_steps=14, train__resume_with="train.num_steps")
    assert runs.keys_by_step(run) == runs.keys_by_step(straight)
    assert audit_of(run).ok


def test_growing_twice_with_another_global_batch_between_stays_proven(shards: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_here(shards, run, train__num_steps=4)
    add_shards(shards, [10])
    accepted = {"train__resume_with": "train.num_steps,train.global_batch,train.seed"}
    train_here(shards, run, train__num_steps=9, train__global_batch=20, **accepted)
    add_shards(shards, [10], first=7000)
    state = train_here(shards, run, train__num_steps=30, train__global_batch=8, train__seed=5, **accepted)
    assert [(s.first_n, s.num_samples, s.global_batch) for s in state.segments] == [
        (0, 100, 12),
        (48, 100, 20),
        (100, 110, 20),
        (148, 110, 8),
        (210, 120, 8),
    ]
    assert state.samples_consumed == 148 + 21 * 8
    keys = keys_of(shards)
    assert by_epoch(run, [0, 48, 100])[0] + by_epoch(run, [0, 48, 100])[1] == once(keys[:100])
    assert by_epoch(run, [210, 316])[0] <= once(keys)
    result = audit_of(run)
    assert result.ok
    assert sum(e.seen or 0 for e in result.epochs) == state.samples_consumed
    trained = runs.keys_by_step(run)
    assert {step: batch_keys(run, step) for step in trained} == trained


def test_dataset_that_lost_what_was_added_is_refused_once_it_was_trained_on(shards: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    before = Manifest.load(shards)
    train_here(shards, run, train__num_steps=4)
    after = add_shards(shards, [10])
    accepted = {"train__resume_with": "train.num_steps"}
    train_here(shards, run, train__num_steps=6, **accepted)
    before.save(shards)
    make_plan(config_of(shards, run, train__num_steps=6), 1)  # the added ones have not come yet
    after.save(shards)
    train_here(shards, run, train__num_steps=12, **accepted)
    before.save(shards)
    with pytest.raises(
        ResumeError, match=f"saved with manifest_id={after.manifest_id}, data.shards=.* these are other"
    ):
        make_plan(config_of(shards, run, train__num_steps=12), 1)


def test_added_shards_that_go_again_before_their_epoch_leave_no_trace(shards: Path, tmp_path: Path) -> None:
    straight, run = tmp_path / "straight", tmp_path / "run"
    length = {"train__num_steps": None, "train__epochs": 2}
    before = Manifest.load(shards)
    train_here(shards, straight, **length)
    train_here(shards, run, **length, stop_asked=lambda: runs.last_step(run) >= 3)
    add_shards(shards, [10])
    train_here(shards, run, **length, stop_asked=lambda: runs.last_step(run) >= 5)
    before.save(shards)
    assert audit_of(run).ok
    state = train_here(shards, run, **length)
    assert len(state.segments) == 1
    assert runs.keys_by_step(run) == runs.keys_by_step(straight)
    assert audit_of(run).ok


def test_pending_shards_are_in_the_position_file_and_in_the_table(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train_here(shards, run, train__num_steps=2)
    add_shards(shards, [10])
    train_here(shards, run, train__num_steps=4, train__resume_with="train.num_steps")
    capsys.readouterr()
    assert main.main(["audit", str(run)]) == 0
    text = capsys.readouterr().out
    assert "segment 1: from position 100, step 8, epoch 1: global batch 12, 110 samples, not reached yet\n" in text
    position = json.loads((run / "checkpoints" / "step-00000004" / "position.json").read_text())
    assert [s["num_samples"] for s in position["segments"]] == [100, 110]
