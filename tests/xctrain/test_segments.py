"""Data that change between two starts: shards added, samples left out, datasets mixed. From the next epoch on, audited."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import runs
from conftest import add_shards, damage, write_dataset
from small import audit_of, config_of, train_here

from shards.__main__ import main as shards_main
from shards.manifest import Manifest
from shards.reader import SplitReader
from xctrain import __main__ as main
from xctrain.errors import ConfigError, ResumeError, TrainError
from xctrain.start import make_plan


@pytest.fixture
def shards(drawn_shards: Path, tmp_path: Path) -> Path:
    """A copy of 100 samples that a test may change."""
    return Path(shutil.copytree(drawn_shards, tmp_path / "shards"))


def by_epoch(run: Path, bounds: list[int]) -> list[Counter[str]]:
    """Keys that were trained on between positions, how often each."""
    slots = [slot for step in runs.keys_by_step(run).values() for slot in step]
    return [Counter(key for n, key in slots if start <= n < stop) for start, stop in pairwise(bounds)]


def keys_of(shards: Path) -> list[str]:
    return SplitReader(shards, "train").keys()


def once(keys: list[str]) -> Counter[str]:
    return Counter(keys)


# Shards that were added


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


def batch_keys(run: Path, step: int) -> list[tuple[int, str]]:
    from xctrain import audit

    return sorted((row["n"], row["key"]) for row in audit.batch_of_step(audit.open_run(run), step))


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


# Samples that are left out


@pytest.fixture
def listed(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Path, list[str]]:
    """The list that verify writes of three damaged samples, and their keys."""
    keys = damage(shards, 3, 44, 90)
    path = tmp_path / "quarantine.json"
    assert shards_main(["verify", str(shards), "--quarantine", str(path)]) == 1
    assert f"{path}: 3 samples to leave out of training with data.quarantine={path}\n" in capsys.readouterr().err
    return path, keys


def test_verify_lists_damaged_samples_with_reasons(listed: tuple[Path, list[str]]) -> None:
    path, keys = listed
    samples = json.loads(path.read_text())["samples"]
    assert [(s["key"], s["shard"], s["sample"]) for s in samples] == [
        (keys[0], "train-000000.tar", 3),
        (keys[1], "train-000001.tar", 4),
        (keys[2], "train-000002.tar", 10),
    ]
    assert all("crc32 of " in s["reason"] for s in samples)


def test_listed_samples_are_left_out_of_the_order(shards: Path, listed: tuple[Path, list[str]], tmp_path: Path) -> None:
    path, keys = listed
    run = tmp_path / "run"
    whole = {"data__quarantine": path, "data__verify": "full", "data__max_damaged": 0}
    state = train_here(shards, run, **whole, train__num_steps=None, train__epochs=2)
    kept = [key for key in keys_of(shards) if key not in keys]
    assert (state.samples_consumed, state.masked) == (194, ())
    assert by_epoch(run, [0, 97, 194]) == [once(kept)] * 2
    [segment] = state.segments
    assert segment.num_samples == 97
    assert segment.quarantine_id
    assert [e.seen for e in audit_of(run).epochs] == [97, 97]


def test_damage_that_is_not_listed_is_still_found_by_a_full_check(
    shards: Path, listed: tuple[Path, list[str]], tmp_path: Path
) -> None:
    from xctrain.errors import RunError

    damage(shards, 45)
    with pytest.raises(RunError, match=r"1 findings, first: train-000001.tar: 000000000045: crc32 of"):
        make_plan(config_of(shards, tmp_path / "run", data__quarantine=listed[0], data__verify="full"), 1)


def test_list_is_identity_of_the_data_and_its_change_must_be_accepted(
    shards: Path, listed: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, keys = listed
    run = tmp_path / "run"
    train_here(shards, run, train__num_steps=4)
    with pytest.raises(
        ResumeError,
        match=r"saved with data.quarantine=none, this run has data.quarantine=3 samples \([0-9a-f]{12}\); give the list that "
        r"the run had, or accept the change with train.resume_with=data.quarantine, or choose another run.dir",
    ):
        make_plan(config_of(shards, run, data__quarantine=path, train__num_steps=4), 1)

    accepted = {"train__num_steps": 17, "train__resume_with": "data.quarantine,train.num_steps"}
    state = train_here(shards, run, data__quarantine=path, **accepted)
    assert "at position 100: 97 samples instead of 100, 3 left out; until then" in capsys.readouterr().err
    everything = keys_of(shards)
    assert sorted(m.key for m in state.masked) == sorted(keys)  # in the epoch that was under way
    assert by_epoch(run, [0, 100, 197]) == [once([k for k in everything if k not in keys])] * 2
    assert [(e.epoch, e.segment, e.seen, e.masked) for e in audit_of(run).epochs] == [
        (0, 0, 97, 3),
        (1, 1, 97, 0),
        (2, 1, 7, 0),
    ]
    with pytest.raises(ResumeError, match=r"saved with data.quarantine=3 samples .* this run has data.quarantine=none"):
        make_plan(config_of(shards, run, train__num_steps=17), 1)


def test_listed_damage_does_not_stop_the_epoch_under_way(
    shards: Path, listed: tuple[Path, list[str]], tmp_path: Path
) -> None:
    path, _ = listed
    run = tmp_path / "run"
    with pytest.raises(
        TrainError, match=r"or list them with its --quarantine FILE and go on with data.quarantine=FILE"
    ):
        train_here(shards, run, data__max_damaged=1, train__save_every=1, train__num_steps=None, train__epochs=2)
    accepted = {"train__resume_with": "data.quarantine", "data__max_damaged": 0}
    state = train_here(shards, run, data__quarantine=path, train__num_steps=None, train__epochs=2, **accepted)
    assert state.samples_consumed == 197
    assert audit_of(run).ok


def test_list_with_the_same_samples_and_other_reasons_is_the_same(
    shards: Path, listed: tuple[Path, list[str]], tmp_path: Path
) -> None:
    path, _ = listed
    run = tmp_path / "run"
    train_here(shards, run, data__quarantine=path)
    values = json.loads(path.read_text())
    for sample in values["samples"]:
        sample["reason"] = "blurred"
    path.write_text(json.dumps(values))
    make_plan(config_of(shards, run, data__quarantine=path), 1)


def change(values: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**values, "samples": [{**values["samples"][0], **fields}]}


LISTS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (
        lambda v: change(v, key="000000000007"),
        "sample 3 of train-000000.tar is 000000000003, the list says 000000000007",
    ),
    (
        lambda v: change(v, sample=400),
        r"sample 400 of train-000000.tar \(000000000003\) is not in .*; the list is of another",
    ),
    (lambda v: change(v, shard="x.tar"), r"sample 3 of x.tar \(000000000003\) is not in "),
    (lambda v: change(v, sample="3"), "sample of entry 1 is '3'"),
    (lambda v: change(v, extra=1), "entry 1 is not {key, shard, sample, reason}"),
    (lambda v: {**v, "format_version": 9}, "expected format xctrain-quarantine, version 1"),
    (lambda v: [], "is not a list of samples to leave out"),
]


@pytest.mark.parametrize(("forge", "text"), LISTS)
def test_list_that_is_not_of_this_dataset_is_refused(
    shards: Path, listed: tuple[Path, list[str]], tmp_path: Path, forge: Callable[[dict[str, Any]], Any], text: str
) -> None:
    path, _ = listed
    path.write_text(json.dumps(forge(json.loads(path.read_text()))))
    with pytest.raises(ConfigError, match=text):
        make_plan(config_of(shards, tmp_path / "run", data__quarantine=path), 1)


def test_absent_list_says_what_writes_it(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"none.json: cannot be read: .*; `python -m shards verify DIR --quarantine .*` writ"
    ):
        make_plan(config_of(shards, tmp_path / "run", data__quarantine=tmp_path / "none.json"), 1)


def test_damaged_line_of_the_sample_list_can_be_left_out(shards: Path, tmp_path: Path) -> None:
    path = shards / "train-000001.meta.jsonl"
    data = bytearray(path.read_bytes())
    data[2 * len(data) // 40 + 3] ^= 255
    path.write_bytes(data)
    out = tmp_path / "quarantine.json"
    assert shards_main(["verify", str(shards), "--quarantine", str(out)]) == 1
    assert [(s["key"], s["sample"]) for s in json.loads(out.read_text())["samples"]] == [(None, 2)]
    length = {"train__num_steps": None, "train__epochs": 1}
    state = train_here(shards, tmp_path / "run", data__quarantine=out, data__verify="full", **length)
    assert (state.samples_consumed, state.masked) == (99, ())
    assert audit_of(tmp_path / "run").ok


def test_damage_in_a_row_stops_the_run_however_much_is_allowed(shards: Path, tmp_path: Path) -> None:
    damage(shards, *range(60))
    with pytest.raises(TrainError, match=r"\d+ samples in a row are damaged, data.max_damaged_in_a_row is 2"):
        train_here(shards, tmp_path / "run", data__max_damaged=100, data__max_damaged_in_a_row=2)


def test_masked_slots_name_their_rank(shards: Path, tmp_path: Path) -> None:
    damage(shards, 3)
    train_here(shards, tmp_path / "run")
    assert [line["rank"] for line in runs.events(tmp_path / "run", "masked")] == [0]


# Datasets that are mixed


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """14 samples in two shards, and a held-out split."""
    write_dataset(tmp_path / "own", {"train": [9, 5], "val": [4]}, first=2000)
    return tmp_path / "own"


def mixed(shards: Path, own: Path, repeat: int = 3) -> str:
    return f"{{coco: {shards}, own: {{path: {own}, repeat: {repeat}}}}}"


def test_mix_trains_each_sample_as_often_as_its_dataset_repeats(shards: Path, own: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    length = {"train__num_steps": None, "train__epochs": 2}
    state = train_here(Path(mixed(shards, own)), run, **length)
    assert state.samples_consumed == 2 * (100 + 3 * 14)
    due = once(keys_of(shards)) + once(3 * keys_of(own))
    assert by_epoch(run, [0, 142, 284]) == [due, due]

    counts = [line["sources"] for line in runs.events(run, "step")]
    assert {name: sum(c[name] for c in counts) for name in ("coco", "own")} == {"coco": 200, "own": 84}
    assert all(abs(c["own"] - 12 * 42 / 142) <= 1 for c in counts[:-1])

    result = audit_of(run)
    assert (result.ok, result.evidence) == (True, "keys")
    seen = {(e.source, e.epoch): (e.seen, e.repeated, e.skipped) for e in result.epochs}
    assert seen == {
        **{("coco", epoch): (100, 0, 0) for epoch in range(2)},
        **{("own", epoch): (14, 0, 0) for epoch in range(6)},
    }


def test_plan_says_what_each_dataset_of_a_mix_is_of_every_batch(
    shards: Path, own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [f"data.shards={mixed(shards, own)}", f"run.dir={tmp_path / 'run'}"]
    assert main.main(["plan", "configs/demo.yaml", *overrides, "--gpus", "1"]) == 0
    text = capsys.readouterr().out
    assert "note: coco: 100 samples x 1, 70.4% of every global batch\n" in text
    assert "note: own: 14 samples x 3, 29.6% of every global batch\n" in text


def test_each_pass_of_a_repeated_dataset_draws_other_captions(shards: Path, own: Path, tmp_path: Path) -> None:
    from xctrain import audit

    run = tmp_path / "run"
    train_here(Path(mixed(shards, own)), run, train__num_steps=12)
    opened = audit.open_run(run)
    chosen: dict[str, list[str]] = {}
    for step in range(1, 13):
        for row in audit.batch_of_step(opened, step):
            if row["source"] == "own" and row["n"] < 142:
                chosen.setdefault(row["key"], []).append(row["chosen"][0])
    assert {len(texts) for texts in chosen.values()} == {3}
    assert all(len({*texts}) == 3 for texts in chosen.values())


def test_batches_of_a_mix_are_the_same_for_every_number_of_ranks(shards: Path, own: Path, tmp_path: Path) -> None:
    config = config_of(Path(mixed(shards, own)), tmp_path / "run", train__global_batch=24, train__micro_batch=1)
    stream = make_plan(config, 1).stream
    for step in range(12):
        whole = stream.step(24 * step)
        for ranks in (1, 2, 3, 4, 6, 8):
            parts = [stream.micro_batches(24 * step, rank, ranks, 1) for rank in range(ranks)]
            assert [slot for part in parts for micro in part for slot in micro] == whole


def test_changed_mix_is_refused_by_name_and_accepted_begins_with_the_next_epoch(
    shards: Path, own: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train_here(Path(mixed(shards, own)), run, train__num_steps=4)
    with pytest.raises(
        ResumeError,
        match=r"saved with data.shards=coco x 1 \+ own x 3, this run has data.shards=coco x 1 \+ own x 1; set",
    ):
        make_plan(config_of(Path(mixed(shards, own, repeat=1)), run, train__num_steps=4), 1)
    accepted = {"train__num_steps": 22, "train__resume_with": "data.shards,train.num_steps"}
    state = train_here(Path(mixed(shards, own, repeat=1)), run, **accepted)
    assert [(s.first_n, s.num_samples) for s in state.segments] == [(0, 142), (142, 114)]
    coco, small = keys_of(shards), keys_of(own)
    assert by_epoch(run, [0, 142, 256]) == [once(coco + 3 * small), once(coco + small)]
    assert audit_of(run).ok


def test_run_of_one_dataset_may_take_another_in(shards: Path, own: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_here(shards, run, train__num_steps=4)
    accepted = {"train__num_steps": 18, "train__resume_with": "data.shards,train.num_steps"}
    state = train_here(Path(mixed(shards, own, repeat=1)), run, **accepted)
    coco, small = keys_of(shards), keys_of(own)
    assert by_epoch(run, [0, 100, 214]) == [once(coco), once(coco + small)]
    assert [s.num_samples for s in state.segments] == [100, 114]
    assert audit_of(run).ok
    with pytest.raises(
        ResumeError, match=r"saved with manifest_id=.* \(own\), data.shards=.*; these are other samples"
    ):
        make_plan(config_of(shards, run, train__resume_with="data.shards", train__num_steps=18), 1)


def test_dataset_of_a_mix_may_grow_and_be_moved(shards: Path, own: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_here(Path(mixed(shards, own)), run, train__num_steps=4)
    add_shards(own, [6])
    moved = own.rename(tmp_path / "moved")
    state = train_here(Path(mixed(shards, moved)), run, train__num_steps=30, train__resume_with="train.num_steps")
    assert [s.num_samples for s in state.segments] == [142, 160]
    assert by_epoch(run, [142, 302])[0] == once(keys_of(shards) + 3 * keys_of(moved))
    assert audit_of(run).ok


def test_datasets_of_a_mix_are_scored_each_or_the_one_that_is_named(shards: Path, own: Path, tmp_path: Path) -> None:
    scored = {"eval__every": 4, "eval__max_new_tokens": 2, "train__num_steps": 4}
    train_here(Path(mixed(shards, own)), tmp_path / "each", **scored)
    found = [(e["source"], e["num_images"]) for e in runs.events(tmp_path / "each", "eval")]
    assert found == [("coco", 12), ("own", 4)]
    assert {p.name for p in (tmp_path / "each" / "captions").iterdir()} == {
        "step-00000004.jsonl",
        "own-step-00000004.jsonl",
    }
    train_here(Path(mixed(shards, own)), tmp_path / "one", **scored, eval__source="own")
    assert [e["source"] for e in runs.events(tmp_path / "one", "eval")] == ["own"]
    with pytest.raises(ConfigError, match=r"eval.source is other, data.shards has coco, own; choose one of those"):
        make_plan(config_of(Path(mixed(shards, own)), tmp_path / "none", **scored, eval__source="other"), 1)


def test_quarantine_of_a_mix_stands_beside_its_path(shards: Path, own: Path, tmp_path: Path) -> None:
    out = tmp_path / "own.json"
    damage(own, 2)
    shards_main(["verify", str(own), "--quarantine", str(out)])
    text = f"{{coco: {shards}, own: {{path: {own}, quarantine: {out}}}}}"
    state = train_here(Path(text), tmp_path / "run", train__num_steps=None, train__epochs=1, data__max_damaged=0)
    assert state.samples_consumed == 113
    assert [(e.source, e.seen) for e in audit_of(tmp_path / "run").epochs] == [("coco", 100), ("own", 13)]
    with pytest.raises(
        ConfigError, match=r"data.quarantine is set, data.shards names several datasets; give each its own"
    ):
        config_of(Path(text), tmp_path / "run", data__quarantine=out)


def test_same_folder_twice_is_refused(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"data.shards: a and b are the same folder, .*; name it once and set its repeat"
    ):
        make_plan(config_of(Path(f"{{a: {shards}, b: {shards}}}"), tmp_path / "run"), 1)


def test_dataset_of_a_mix_that_is_not_there_is_named(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.shards.b: .*/none: there is no such folder"):
        make_plan(config_of(Path(f"{{a: {shards}, b: {tmp_path / 'none'}}}"), tmp_path / "run"), 1)


def test_moved_datasets_of_a_mix_are_named_to_the_audit(
    shards: Path, own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train_here(Path(mixed(shards, own)), run, train__num_steps=4)
    moved = own.rename(tmp_path / "moved")
    assert main.main(["audit", str(run), "--shards", f"own={moved}"]) == 0
    assert main.main(["batch", str(run), "--step", "4", "--shards", f"own={moved}"]) == 0
    with pytest.raises(ConfigError, match=r"--shards is .*moved, the run mixes coco, own; give NAME=DIR for each"):
        main.main(["audit", str(run), "--shards", str(moved)])
