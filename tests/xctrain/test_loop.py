"""One step is one global batch: one update, or a stated reason and no update."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from safetensors.torch import load_file
from small import audit_of, data_of, open_poisoned, train_here
from tiny import TinyFamily, TinyModel

from shards.reader import SplitReader
from xctrain.collate import Batch
from xctrain.config import Config
from xctrain.errors import CheckpointError, NotFiniteError, TrainError
from xctrain.evalconfig import EvalConfig
from xctrain.evaluate import evaluate
from xctrain.ranks import Ranks
from xctrain.start import Plan


@pytest.fixture
def damaged(drawn_shards: Path, tmp_path: Path) -> tuple[Path, list[str]]:
    """The dataset with a flipped byte in three samples, and their keys."""
    shards = Path(shutil.copytree(drawn_shards, tmp_path / "damaged"))
    reader = SplitReader(shards, "train")
    keys = []
    for index in (3, 41, 99):
        shard, _ = reader.locate(index)
        meta = reader.meta(index)
        data = bytearray((shards / shard.name).read_bytes())
        data[meta.parts[0].offset + 40] ^= 1
        (shards / shard.name).write_bytes(data)
        keys.append(meta.key)
    return shards, keys


def test_two_epochs_end_with_masked_surplus_and_every_sample_twice(drawn_shards: Path, tmp_path: Path) -> None:
    state = train_here(drawn_shards, tmp_path, train__num_steps=None, train__epochs=2)
    assert (state.step, state.samples_consumed, state.masked) == (17, 200, ())
    assert len(runs.keys_by_step(tmp_path)[17]) == 8
    result = audit_of(tmp_path)
    assert result.ok
    assert [(e.epoch, e.seen, e.repeated, e.skipped, e.masked) for e in result.epochs] == [
        (0, 100, 0, 0, 0),
        (1, 100, 0, 0, 0),
    ]


def test_key_log_tells_the_epochs_apart_where_a_batch_straddles_the_seam(drawn_shards: Path, tmp_path: Path) -> None:
    train_here(drawn_shards, tmp_path, train__num_steps=None, train__epochs=2, train__micro_batch=12)
    lines = [json.loads(line) for line in (tmp_path / "keys-rank0.jsonl").read_text().splitlines()]
    by_epoch: dict[int, list[str]] = {}
    for line in lines:
        by_epoch.setdefault(line["epoch"], []).extend(line["keys"])
    assert sorted(by_epoch) == [0, 1]
    assert sorted(by_epoch[0]) == sorted(by_epoch[1]) == SplitReader(drawn_shards, "train").keys()
    assert [(line["epoch"], len(line["keys"])) for line in lines if line["step"] == 9] == [(0, 4), (1, 8)]


@pytest.mark.parametrize("longer", [{"train__epochs": 3.5}, {"train__epochs": None, "train__num_steps": 30}])
def test_run_goes_on_exactly_when_it_is_made_longer(drawn_shards: Path, tmp_path: Path, longer: dict[str, Any]) -> None:
    train_here(drawn_shards, tmp_path, train__num_steps=None, train__epochs=2)
    changes = {"train__num_steps": None, **longer, "train__resume_with": "train.num_steps,train.epochs"}
    state = train_here(drawn_shards, tmp_path, **changes)
    expected = (30, 350) if longer["train__epochs"] else (30, 200 + 13 * 12)
    assert (state.step, state.samples_consumed) == expected
    result = audit_of(tmp_path)
    assert result.ok
    assert [e.seen for e in result.epochs] == [100, 100, 100, expected[1] - 300]
    assert [n for n, _ in runs.keys_by_step(tmp_path)[17]] == list(range(192, 200))
    assert [n for n, _ in runs.keys_by_step(tmp_path)[18]] == list(range(200, 212))


def test_finished_run_started_again_does_nothing(drawn_shards: Path, tmp_path: Path) -> None:
    before = train_here(drawn_shards, tmp_path)
    weights = runs.weights(tmp_path, 10)
    assert train_here(drawn_shards, tmp_path) == before
    assert runs.weights(tmp_path, 10) == weights
    assert len(runs.events(tmp_path, "step")) == 10


def test_stop_request_saves_at_the_end_of_the_step(drawn_shards: Path, tmp_path: Path) -> None:
    state = train_here(drawn_shards, tmp_path, stop_asked=lambda: runs.last_step(tmp_path) >= 2)
    assert state.step == 3
    assert (tmp_path / "checkpoints" / "step-00000003").is_dir()


def test_damaged_samples_are_masked_logged_and_counted_and_move_nothing(
    drawn_shards: Path, damaged: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards, keys = damaged
    length = {"train__num_steps": None, "train__epochs": 1}
    state = train_here(shards, tmp_path / "run", **length)
    train_here(drawn_shards, tmp_path / "whole", **length)

    assert state.samples_consumed == 100
    assert sorted(m.key for m in state.masked) == keys
    assert all(m.reason.startswith("damaged: train-0000") and "crc32 of " in m.reason for m in state.masked)
    said = capsys.readouterr().err
    assert all(f"masked, no loss at position {m.n}: {m.key}: {m.reason}" in said for m in state.masked)
    logged = runs.events(tmp_path / "run", "masked")
    assert [(line["n"], line["key"], line["reason"]) for line in logged] == [
        (m.n, m.key, m.reason) for m in state.masked
    ]
    whole = runs.keys_by_step(tmp_path / "whole")
    assert runs.keys_by_step(tmp_path / "run") == {
        step: [(n, key) for n, key in slots if key not in keys] for step, slots in whole.items()
    }
    result = audit_of(tmp_path / "run")
    assert result.ok
    assert [(e.seen, e.skipped, e.masked) for e in result.epochs] == [(97, 0, 3)]


def test_masked_sample_right_behind_a_checkpoint_is_logged_once(
    damaged: tuple[Path, list[str]], tmp_path: Path
) -> None:
    shards, _ = damaged
    run = tmp_path / "run"
    first = train_here(shards, run, train__num_steps=9).masked[0].n
    shutil.rmtree(run)
    # A batch of one: each sample is the first one behind some checkpoint.
    length = {"train__global_batch": 1, "train__micro_batch": 1, "train__save_every": 1, "train__on_not_finite": "skip"}
    with pytest.raises(TrainError):
        train_here(shards, run, **length, train__num_steps=100)
    with pytest.raises(TrainError):
        train_here(shards, run, **length, train__num_steps=100)
    assert [line["n"] for line in runs.events(run, "masked")] == [first]


def test_more_damage_than_allowed_stops_the_run(damaged: tuple[Path, list[str]], tmp_path: Path) -> None:
    shards, keys = damaged
    with pytest.raises(TrainError) as error:
        train_here(shards, tmp_path / "run", data__max_damaged=2)
    text = str(error.value)
    assert text.startswith(
        f"{shards}: 3 samples are damaged, data.max_damaged is 2; the last is {error.value.key} (damaged: "
    )
    assert f"find them all with `python -m shards verify {shards}` and build again" in text
    assert error.value.key in keys
    assert error.value.on_every_rank


def test_damage_is_counted_across_starts(damaged: tuple[Path, list[str]], tmp_path: Path) -> None:
    shards, _ = damaged
    assert 0 < len(train_here(shards, tmp_path / "run", train__num_steps=5).masked) < 3
    more = {"train__num_steps": 9, "train__resume_with": "train.num_steps"}
    with pytest.raises(TrainError, match=r"3 samples are damaged, data.max_damaged is 2"):
        train_here(shards, tmp_path / "run", data__max_damaged=2, **more)


def test_one_damaged_sample_counts_once_however_often_it_comes(damaged: tuple[Path, list[str]], tmp_path: Path) -> None:
    shards, keys = damaged
    state = train_here(shards, tmp_path / "run", data__max_damaged=3, train__num_steps=25)
    assert sorted(m.key for m in state.masked) == sorted(3 * keys)


def test_batch_without_any_target_is_a_stated_error(drawn_shards: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainError) as error:
        train_here(drawn_shards, tmp_path, open_speechless)
    assert str(error.value) == (
        "step 1: none of the 12 samples has a target token (0 masked); look at it with "
        f"`python -m xctrain batch {tmp_path} --position 0`"
    )
    assert runs.events(tmp_path, "step") == []


def open_speechless(*_: object) -> tuple[TinyFamily, str]:
    class Speechless(TinyFamily):
        @staticmethod
        def collator(rows: Any) -> Any:
            from dataclasses import replace

            batch = TinyFamily.collator(rows)
            return replace(batch, labels=torch.full_like(batch.labels, -100), num_targets=0)

    return Speechless(TinyModel(0.0)), "tiny"


def test_not_finite_loss_updates_nothing_and_leaves_the_batch_to_look_at(drawn_shards: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFiniteError) as error:
        train_here(drawn_shards, tmp_path, open_poisoned(75))
    folder = tmp_path / "not-finite" / "step-00000007-n72"
    keys = [key for n, key in sorted(positions(drawn_shards, tmp_path, 72)) if n == 75]
    text = str(error.value)
    assert text.startswith("step 7: loss is nan, gradient norm is nan; nothing was updated; first of its micro-batch: ")
    assert f"the batch is in {folder}, look at it with `python -m xctrain batch {tmp_path} --position 72`" in text
    assert text.endswith("lower optim.lr, or go on past it with train.on_not_finite=skip")
    assert error.value.on_every_rank

    rows = json.loads((folder / "rank0.json").read_text())
    [bad] = [row for row in rows if row["loss"] == "nan"]
    assert 75 in bad["n"]
    assert keys[0] in bad["keys"]
    dumped = load_file(folder / "rank0.safetensors")
    assert dumped[f"{bad['micro']}.labels"].shape == dumped[f"{bad['micro']}.input_ids"].shape
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000005"]
    assert runs.last_step(tmp_path) == 6


def positions(shards: Path, run: Path, n: int) -> list[tuple[int, str]]:
    from small import config_of

    from xctrain.start import make_plan

    plan = make_plan(config_of(shards, run), 1)
    return [(slot.n, plan.reader.key(slot.index)) for slot in plan.stream.step(n)]


def test_skipped_batch_moves_position_but_not_step(drawn_shards: Path, tmp_path: Path) -> None:
    state = train_here(drawn_shards, tmp_path, open_poisoned(75), train__on_not_finite="skip")
    assert (state.step, state.samples_consumed) == (9, 120)
    assert [(m.n, m.reason) for m in state.masked] == [(n, "not_finite") for n in range(72, 84)]
    [line] = runs.events(tmp_path, "skip")
    assert (line["step"], line["samples_consumed"], line["reason"]) == (6, 84, "not_finite")
    assert len(line["keys"]) == 12
    result = audit_of(tmp_path)
    assert result.ok
    assert [(e.seen, e.skipped, e.masked) for e in result.epochs] == [(88, 0, 12), (20, 0, 0)]


def test_too_many_skips_in_a_row_stop_the_run(drawn_shards: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFiniteError, match=r"; 2 batches in a row were skipped, train.max_skips is 2"):
        train_here(drawn_shards, tmp_path, open_poisoned(72, 84, 96), train__on_not_finite="skip", train__max_skips=2)


def test_skips_that_are_not_in_a_row_do_not_add_up(drawn_shards: Path, tmp_path: Path) -> None:
    state = train_here(
        drawn_shards, tmp_path, open_poisoned(12, 36, 60, 84), train__on_not_finite="skip", train__max_skips=1
    )
    assert (state.step, state.samples_consumed) == (6, 120)


def test_skips_in_a_row_are_counted_across_a_resume(drawn_shards: Path, tmp_path: Path) -> None:
    changes = {"train__on_not_finite": "skip", "train__max_skips": 1}
    # The run ends with a skipped batch, which the last save holds.
    assert train_here(drawn_shards, tmp_path, open_poisoned(108, 120), **changes).skips_in_a_row == 1
    with pytest.raises(NotFiniteError, match=r"1 batches in a row were skipped, train.max_skips is 1"):
        train_here(
            drawn_shards,
            tmp_path,
            open_poisoned(108, 120),
            **changes,
            train__num_steps=12,
            train__resume_with="train.num_steps",
        )


def test_weights_that_are_not_finite_are_never_saved(drawn_shards: Path, tmp_path: Path) -> None:
    with pytest.raises(
        TrainError, match="step-00000005: not saved: 1 weights hold values that are not finite"
    ) as error:
        train_here(drawn_shards, tmp_path, open_ruined)
    assert error.value.on_every_rank
    assert not isinstance(error.value, CheckpointError)
    assert list((tmp_path / "checkpoints").glob("*")) == []


def open_ruined(*_: object) -> tuple[TinyFamily, str]:
    """A weight that is infinite but, for a byte no caption has, never read."""
    model = TinyModel(0.0)
    with torch.no_grad():
        model.embedding.weight[1] = float("inf")
    return TinyFamily(model), "tiny"


def test_evaluation_stands_in_the_log_once_each_and_on_the_screen(
    drawn_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"eval__every": 5, "eval__num_images": 4, "eval__max_new_tokens": 2}
    straight = train_here(drawn_shards, tmp_path / "eval", **changes)
    logged = runs.events(tmp_path / "eval", "eval")
    assert [line["step"] for line in logged] == [0, 5, 10]
    shown = [line for line in capsys.readouterr().err.splitlines() if ": 4 images of val, loss " in line]
    assert shown[-1].startswith(
        f"step 10: 4 images of val, loss {logged[-1]['loss']:.3f}, bleu4 {logged[-1]['bleu4']:.3f}"
    )
    assert len(shown) == 3
    assert sorted(p.name for p in (tmp_path / "eval" / "captions").iterdir()) == [
        "step-00000000.jsonl",
        "step-00000005.jsonl",
        "step-00000010.jsonl",
    ]
    # It moves nothing around it.
    assert train_here(drawn_shards, tmp_path / "plain").digest == straight.digest
    assert runs.trajectory(tmp_path / "eval") == runs.trajectory(tmp_path / "plain")
    assert runs.weights(tmp_path / "eval", 10) == runs.weights(tmp_path / "plain", 10)


class ScoredModel(TinyModel):
    """It is evaluated before every second of its training micro-batches."""

    def __init__(self, score: Callable[["ScoredModel"], object]) -> None:
        super().__init__(dropout=0.2)
        self.score = score
        self.seen = 0

    def forward(self, batch: Batch) -> torch.Tensor:
        if self.training:
            self.seen += 1
            if self.seen % 2 == 0:
                self.score(self)
        return super().forward(batch)


def test_evaluation_between_two_micro_batches_changes_no_weight(drawn_shards: Path, tmp_path: Path) -> None:
    scored = []

    def open_model(config: Config, ranks: Ranks, _plan: Plan) -> tuple[TinyFamily, str]:
        def score(model: ScoredModel) -> None:
            held_out = data_of(drawn_shards, "val").datasets[0]
            scored.append(evaluate(TinyFamily(model), held_out, EvalConfig(num_images=2, max_new_tokens=1), ranks))

        torch.manual_seed(config.train.seed)
        return TinyFamily(ScoredModel(score)), "tiny"

    train_here(drawn_shards, tmp_path / "scored", open_model, train__num_steps=5)
    train_here(drawn_shards, tmp_path / "plain", train__num_steps=5)
    assert len(scored) > 5
    assert runs.weights(tmp_path / "scored", 5) == runs.weights(tmp_path / "plain", 5)


def test_metrics_of_a_step_say_what_design_promises(drawn_shards: Path, tmp_path: Path) -> None:
    train_here(drawn_shards, tmp_path)
    [*_, last] = runs.events(tmp_path, "step")
    names = "step samples_consumed epoch loss lr grad_norm num_targets samples_per_s tokens_per_s step_s data_wait_s"
    assert set(last) >= {"event", *names.split(), "max_memory_gb", "digest"}
    assert last["epoch"] == pytest.approx(1.2)
    assert [line["path"] for line in runs.events(tmp_path, "save")] == ["step-00000005", "step-00000010"]
