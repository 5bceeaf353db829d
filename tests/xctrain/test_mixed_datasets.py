"""Several datasets in one order, each as often as it is repeated."""

from pathlib import Path

import pytest
import runs
from conftest import add_shards, damage, write_dataset
from epochs import by_epoch, keys_of, once
from small import audit_of, config_of, train_here

from shards.__main__ import main as shards_main
from xctrain import __main__ as main
from xctrain.errors import ConfigError, ResumeError
from xctrain.start import is_complete, make_plan


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
    from xctrain import audit, trained

    run = tmp_path / "run"
    train_here(Path(mixed(shards, own)), run, train__num_steps=12)
    opened = trained.open_run(run)
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
    assert found == 2 * [("coco", 12), ("own", 4)]
    assert {p.name for p in (tmp_path / "each" / "captions").iterdir()} == {
        f"{source}step-{step:08d}.jsonl" for source in ("", "own-") for step in (0, 4)
    }
    # A run that was killed between the two is not complete.
    config = config_of(Path(mixed(shards, own)), tmp_path / "each", **scored)
    assert is_complete(config, make_plan(config, 1))
    log = tmp_path / "each" / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if not ('"own"' in line and '"eval"' in line)))
    assert not is_complete(config, make_plan(config, 1))
    train_here(Path(mixed(shards, own)), tmp_path / "one", **scored, eval__source="own")
    assert [e["source"] for e in runs.events(tmp_path / "one", "eval")] == ["own", "own"]
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
