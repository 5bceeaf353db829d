"""Samples that a list leaves out of the order."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
from conftest import damage
from epochs import by_epoch, keys_of, once
from small import audit_of, config_of, train_here

from shards.__main__ import main as shards_main
from xctrain.errors import ConfigError, ResumeError, TrainError
from xctrain.start import make_plan


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
