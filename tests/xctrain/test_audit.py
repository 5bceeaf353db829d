"""The audit finds what was not trained as the order says; ``batch`` shows what a step holds."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
from conftest import write_dataset
from small import audit_of, open_poisoned, train_here

from shards.errors import UserError
from shards.reader import SplitReader
from shards.stream import Slot
from xctrain import __main__ as main
from xctrain import audit, checkpoint
from xctrain.errors import CheckpointError, ConfigError, NotFiniteError
from xctrain.follow import newest_run_id, whole_lines
from xctrain.loader import SlotRows
from xctrain.log import require_whole_log
from xctrain.trained import open_run


@pytest.fixture(scope="module")
def trained(drawn_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 10 steps with logged keys. Not to be changed: copy it first."""
    run = tmp_path_factory.mktemp("trained") / "run"
    train_here(drawn_shards, run)
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "keys-rank0.jsonl").read_text().splitlines()]


def write_lines(run: Path, lines: list[dict[str, Any]]) -> None:
    (run / "keys-rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def forge_position(run: Path, **changes: Any) -> None:
    """Change position.json and make the list of files agree with it again."""
    folder = run / "checkpoints" / "step-00000010"
    position = folder / "position.json"
    position.write_text(json.dumps({**json.loads(position.read_text()), **changes}))
    listed = json.loads((folder / "files.json").read_text())
    listed["position.json"] = {"bytes": position.stat().st_size, "sha256": checkpoint._sha256(position)}
    (folder / "files.json").write_text(json.dumps(listed))


def totals(result: audit.Audit) -> tuple[int, int]:
    return sum(e.repeated or 0 for e in result.epochs), sum(e.skipped or 0 for e in result.epochs)


def test_honest_run_is_proven(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["audit", str(trained), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["ok"], values["evidence"], values["step"], values["samples_consumed"]) == (True, "keys", 10, 120)
    assert values["epochs"] == [
        {
            "epoch": 0,
            "segment": 0,
            "source": "",
            "num_samples": 100,
            "seen": 100,
            "repeated": 0,
            "skipped": 0,
            "masked": 0,
        },
        {
            "epoch": 1,
            "segment": 0,
            "source": "",
            "num_samples": 100,
            "seen": 20,
            "repeated": 0,
            "skipped": 0,
            "masked": 0,
        },
    ]


def test_forged_digest_is_found(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forge_position(run, digest="00000000000000ff")
    assert main.main(["audit", str(run)]) == 1
    text = capsys.readouterr().out
    assert "digest is 00000000000000ff, manifest and order give " in text
    assert "NOT OK" in text


def test_forged_position_is_found(run: Path) -> None:
    forge_position(run, samples_consumed=132)
    result = audit_of(run)
    assert not result.ok
    assert totals(result) == (0, 12)


def test_without_key_logs_a_forged_digest_is_all_that_is_known(run: Path) -> None:
    forge_position(run, digest="00000000000000ff", keys_from=None)
    result = audit_of(run)
    assert (result.ok, result.evidence) == (False, "digest")
    assert [(e.seen, e.repeated, e.skipped) for e in result.epochs] == [(None, None, None)] * 2
    assert "? repeated, ? skipped, 0 masked" in audit.as_text(result)


def test_removed_line_is_skipped_samples(run: Path) -> None:
    lines = lines_of(run)
    write_lines(run, lines[:4] + lines[5:])
    result = audit_of(run)
    assert (result.ok, totals(result)) == (False, (0, len(lines[4]["n"])))


def test_doubled_line_is_repeated_samples(run: Path) -> None:
    lines = lines_of(run)
    write_lines(run, [*lines, lines[4]])
    result = audit_of(run)
    assert (result.ok, totals(result)) == (False, (len(lines[4]["n"]), 0))


def test_wrong_key_is_named_beside_the_right_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(run)
    line = lines[7]
    right, n = line["keys"][1], line["n"][1]
    line["keys"][1] = "000000000777"
    write_lines(run, lines)
    assert main.main(["audit", str(run)]) == 1
    assert f"position {n}: trained on 000000000777, the order says {right}" in capsys.readouterr().out


def test_position_that_was_never_due_is_found(run: Path) -> None:
    lines = lines_of(run)
    lines.append({**lines[0], "n": [4000], "keys": ["000000000001"]})
    write_lines(run, lines)
    result = audit_of(run)
    assert not result.ok
    assert result.findings == ("position 4000: trained on 000000000001, the checkpoint says that it was not trained",)


def test_lines_behind_the_checkpoint_are_not_audited(run: Path) -> None:
    lines = lines_of(run)
    lines.append({**lines[0], "samples_consumed": 132, "n": [120], "keys": ["?"]})
    write_lines(run, lines)
    assert audit_of(run).ok


def test_run_folder_may_be_moved(run: Path, tmp_path: Path) -> None:
    moved = run.rename(tmp_path / "moved")
    assert audit_of(moved).ok
    (moved / "keys-rank0.jsonl").write_text("")
    assert not audit_of(moved).ok


def test_skipped_batch_counts_as_masked_and_a_trained_masked_slot_as_repeated(
    drawn_shards: Path, tmp_path: Path
) -> None:
    train_here(drawn_shards, tmp_path, open_poisoned(75), train__on_not_finite="skip")
    assert audit_of(tmp_path).ok
    lines = lines_of(tmp_path)
    write_lines(tmp_path, [*lines, {**lines[0], "n": [75], "keys": ["x"]}])
    result = audit_of(tmp_path)
    assert (result.ok, totals(result)) == (False, (1, 0))


def make_empty(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def make_damaged(run: Path) -> None:
    for path in run.glob("checkpoints/*/rng.json"):
        path.unlink()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (shutil.rmtree, "there is no such run folder; give the run.dir of a run"),
        (
            lambda run: (run / "config.yaml").unlink() or make_empty(run),
            "has no config.yaml, so it is not a run folder; give",
        ),
        (make_empty, "has no checkpoint; train first, or give another run folder"),
        (make_damaged, "has no whole checkpoint, the newest is damaged ("),
        (make_damaged, "step-00000010: rng.json is missing); put a copy of one back"),
    ],
)
def test_folder_without_a_checkpoint_is_refused(run: Path, change: Callable[[Path], None], text: str) -> None:
    change(run)
    damaged = any(run.glob("checkpoints/*"))
    with pytest.raises(CheckpointError if damaged else ConfigError) as error:
        open_run(run)
    assert error.value.exit_code == (1 if damaged else 2)
    assert str(run) in str(error.value)
    assert text in str(error.value)


def test_other_data_than_was_trained_on_is_refused_with_both_manifests(drawn_shards: Path, tmp_path: Path) -> None:
    shards = Path(shutil.copytree(drawn_shards, tmp_path / "shards"))
    train_here(shards, tmp_path / "run")
    saved = open_run(tmp_path / "run").data.manifest_id
    shutil.rmtree(shards)
    found = write_dataset(shards, {"train": [90]}).manifest_id
    with pytest.raises(UserError, match=f"manifest_id is {found}, the run was trained on {saved}"):
        open_run(tmp_path / "run")


def batch(run: Path, step: int, capsys: pytest.CaptureFixture[str]) -> list[tuple[int, str]]:
    assert main.main(["batch", str(run), "--step", str(step), "--json"]) == 0
    return sorted((row["n"], row["key"]) for row in json.loads(capsys.readouterr().out)["samples"])


def test_batch_shows_what_past_steps_held_and_future_ones_will(
    drawn_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    length = {"train__num_steps": None, "train__epochs": 2}
    shown: dict[int, list[tuple[int, str]]] = {}

    def look_ahead() -> bool:
        if runs.last_step(tmp_path) == 6:
            shown.update({step: batch(tmp_path, step, capsys) for step in (1, 5, 6, 7, 8, 17)})
        return False

    train_here(drawn_shards, tmp_path, stop_asked=look_ahead, **length)
    trained = runs.keys_by_step(tmp_path)
    assert shown == {step: trained[step] for step in shown}
    assert [batch(tmp_path, step, capsys) for step in trained] == list(trained.values())
    with pytest.raises(
        ConfigError, match="step 18: the run ends after step 17, at position 200; the batch would hold 200"
    ):
        batch(tmp_path, 18, capsys)
    with pytest.raises(ConfigError, match="step 0: steps count from 1"):
        batch(tmp_path, 0, capsys)


def test_batch_that_stopped_a_run_before_it_saved_can_be_looked_at(
    drawn_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with pytest.raises(NotFiniteError, match=f"`python -m xctrain batch {run} --position 24`"):
        train_here(drawn_shards, run, open_poisoned(30))
    assert [n for n, _ in batch(run, 3, capsys)] == list(range(24, 36))
    assert main.main(["batch", str(run), "--position", "24"]) == 0
    text = capsys.readouterr().out
    rows = json.loads((next(run.glob("not-finite/*")) / "rank0.json").read_text())
    assert all(key in text for row in rows for key in row["keys"])


def test_skipped_batch_is_found_by_its_position(
    drawn_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train_here(drawn_shards, run, open_poisoned(30), train__on_not_finite="skip", train__num_steps=4)
    assert main.main(["batch", str(run), "--position", "31", "--json"]) == 0
    samples = json.loads(capsys.readouterr().out)["samples"]
    [skip] = runs.events(run, "skip")
    assert sorted(row["key"] for row in samples) == sorted(skip["keys"])
    with pytest.raises(ConfigError, match="position -1: positions count from 0"):
        main.main(["batch", str(run), "--position", "-1"])


def test_batch_marks_the_caption_that_is_trained_on(
    trained: Path, drawn_shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["batch", str(trained), "--step", "9", "--json"]) == 0
    samples = json.loads(capsys.readouterr().out)["samples"]
    epochs = {row["epoch"] for row in samples}
    assert epochs == {0, 1}
    reader = SplitReader(drawn_shards, "train")
    rows = SlotRows(reader, "random", seed=0)
    for row in samples:
        index = reader.keys().index(row["key"])
        assert tuple(row["chosen"]) == rows[Slot(row["n"], row["epoch"], index)].captions
    assert main.main(["batch", str(trained), "--step", "9"]) == 0
    assert f"*{samples[0]['chosen'][0]}*" in capsys.readouterr().out


def change_metrics(run: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in change(lines)))


def changed_digest(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**e, "digest": "0" * 16} if (e["event"], e["step"]) == ("step", 4) else e for e in lines]


METRICS_CHANGES: list[tuple[Callable[[list[dict[str, Any]]], list[dict[str, Any]]], str]] = [
    (lambda lines: [e for e in lines if (e["event"], e["step"]) != ("step", 4)], "1 step missing, first step 4"),
    (lambda lines: [e for e in lines if e["event"] == "start"], "10 steps missing, first step 1"),
    (
        lambda lines: [*lines, *(e for e in lines if (e["event"], e["step"]) == ("step", 10))],
        "1 step there more than once, first step 10",
    ),
    (changed_digest, "1 line changed, first step 4: digest is 0000000000000000, due is "),
]


@pytest.mark.parametrize(("change", "text"), METRICS_CHANGES)
def test_changed_metrics_are_found(
    run: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]], text: str
) -> None:
    change_metrics(run, change)
    result = audit_of(run)
    assert not result.ok
    [finding] = result.findings
    assert finding.startswith(f"metrics.jsonl: {text}")


@pytest.mark.parametrize("name", ["metrics.jsonl", "keys-rank0.jsonl"])
def test_damaged_line_of_a_log_is_a_finding_among_the_others(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / name
    lines = path.read_text().splitlines(keepends=True)
    number = next(n for n, line in enumerate(lines) if '"step":4,' in line)
    path.write_text("".join([*lines[:number], '{"note":"mine"}\n', *lines[number + 1 :], "nor is this\n"]))
    assert main.main(["audit", str(run), "--json"]) == 1
    missing = {"metrics.jsonl": "event", "keys-rank0.jsonl": "step"}[name]
    found = f"{path}: line {number + 1} has no {missing}, and 1 line more; put it back from a copy of the run, or remove it if"
    result = json.loads(capsys.readouterr().out)
    assert [text.partition(" the run did not write it;")[0] for text in result["findings"] if "line" in text] == [found]
    assert result["digest_matches"]
    if name == "metrics.jsonl":
        assert "metrics.jsonl: 1 step missing, first step 4" in result["findings"]
    else:
        assert sum(epoch["skipped"] for epoch in result["epochs"]) == len(json.loads(lines[number])["n"])


def test_damaged_line_of_a_log_ends_no_other_command_in_a_traceback(
    run: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "metrics.jsonl"
    path.write_text('{"note":"mine"}\n' + path.read_text())
    for command in (["report", str(run)], ["report", str(run), str(trained), "--out", str(tmp_path / "both.html")]):
        assert main.main(command) == 0
        assert f"{path}: line 1 has no event; the rest is drawn" in capsys.readouterr().err
    with pytest.raises(UserError, match="line 1 has no event; put it back"):
        main.main(["batch", str(run), "--step", "3"])
    with pytest.raises(UserError, match="line 1 has no event; put it back"):
        require_whole_log(run)
    with path.open("rb") as file:
        assert next(whole_lines(file))["event"] == "start"
    assert newest_run_id(path)


def test_absent_metrics_are_found(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    result = audit_of(run)
    assert (result.ok, result.findings) == (False, ("metrics.jsonl: is missing",))


def test_newest_checkpoint_that_is_gone_is_a_finding(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "checkpoints" / "step-00000010")
    assert main.main(["audit", str(run)]) == 1
    said = capsys.readouterr().out
    assert (
        "checkpoints: the one of step 10, which metrics.jsonl tells of, is gone; what is audited is the newest" in said
    )


@pytest.mark.parametrize(
    ("name", "found"),
    [("metrics.jsonl", "metrics.jsonl: 6 steps missing, first step 1"), ("keys-rank0.jsonl", "72 skipped")],
)
def test_missing_log_is_said_by_the_next_start_and_stays_a_finding(
    drawn_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, found: str
) -> None:
    train_here(drawn_shards, tmp_path, stop_asked=lambda: runs.last_step(tmp_path) == 5)
    (tmp_path / name).unlink()
    train_here(drawn_shards, tmp_path)
    pattern = name.replace("0", "*")
    said = capsys.readouterr().err
    assert (
        f"{tmp_path / pattern}: is missing; training goes on exactly, but the audit will miss what was logged up to step 6"
        in said
    )
    result = audit_of(tmp_path)
    assert not result.ok
    assert found in audit.as_text(result)


def test_damaged_newest_checkpoint_is_a_finding(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = run / "checkpoints" / "step-00000010"
    (newest / "rng.json").unlink()
    assert main.main(["audit", str(run)]) == 1
    text = capsys.readouterr().out
    assert text.startswith("step 5, 60 samples consumed")
    assert f"passed over {newest}: rng.json is missing; what is audited is the newest whole one" in text


def test_masked_samples_are_in_the_verdict(drawn_shards: Path, tmp_path: Path) -> None:
    train_here(drawn_shards, tmp_path, open_poisoned(75), train__on_not_finite="skip")
    text = audit.as_text(audit_of(tmp_path))
    assert text.endswith("OK, but 12 masked: every other sample of the order exactly once")


def test_shards_are_found_from_where_the_run_was_started_or_where_one_says(
    drawn_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = Path(shutil.copytree(drawn_shards, tmp_path / "here" / "shards"))
    monkeypatch.chdir(tmp_path / "here")
    train_here(Path("shards"), tmp_path / "run", train__num_steps=2)
    monkeypatch.chdir(tmp_path)
    assert audit_of(tmp_path / "run").ok
    moved = shards.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"shards: .*; the path is the data.shards that the run .* --shards DIR"):
        audit_of(tmp_path / "run")
    assert main.main(["audit", str(tmp_path / "run"), "--shards", str(moved)]) == 0
    assert main.main(["batch", str(tmp_path / "run"), "--step", "1", "--shards", str(moved)]) == 0
    assert main.main(["report", str(tmp_path / "run"), "--shards", str(moved)]) == 0
    assert "no pictures" not in capsys.readouterr().err


def test_batch_is_right_behind_skips_and_across_segments(
    drawn_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    poisoned = open_poisoned(30, 130)
    skip = {"train__on_not_finite": "skip"}
    train_here(drawn_shards, tmp_path, poisoned, train__num_steps=None, train__epochs=1, **skip)
    more = {"train__epochs": 2, "train__seed": 5, "train__resume_with": "train.epochs,train.seed"}
    train_here(drawn_shards, tmp_path, poisoned, train__num_steps=None, **more, **skip)
    trained = runs.keys_by_step(tmp_path)
    assert [n for n, _ in trained[8]] == [96, 97, 98, 99]
    assert {step: batch(tmp_path, step, capsys) for step in trained} == trained
    assert audit_of(tmp_path).ok


def test_checkpoint_that_a_running_run_renames_meanwhile_is_read_under_its_new_name(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    newest = max((run / "checkpoints").iterdir())
    aside = newest.rename(newest.with_name(f".{newest.name}.tmp"))
    read = checkpoint.read_position

    def read_late(path: Path) -> Any:
        if path == aside and aside.exists():
            aside.rename(newest)
        return read(path)

    monkeypatch.setattr(checkpoint, "read_position", read_late)
    assert open_run(run).state.step == 10
    assert newest.exists()
