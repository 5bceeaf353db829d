"""The best checkpoint by a score of the held-out split outlives the newest."""

import math
import shutil
from pathlib import Path

import pytest
import runs
from hypothesis import given
from hypothesis import strategies as st
from small import config_of, train_here
from test_checkpoint import content
from tiny import TinyFamily, TinyModel

from xctrain import checkpoint, resume
from xctrain.best import best_step, kept_steps
from xctrain.checkpoint import Checkpoints
from xctrain.config import Config
from xctrain.errors import ConfigError
from xctrain.ranks import Ranks
from xctrain.session import trained_family
from xctrain.start import Plan

SCORED = {
    "eval__every": 2,
    "eval__num_images": 4,
    "eval__max_new_tokens": 2,
    "checkpoint__best": "loss",
    "train__keep": 1,
}


def scored(**values: object) -> dict[str, object]:
    return {"split": "val", "num_images": 4, **values}


def test_highest_is_best_but_of_loss_the_lowest() -> None:
    scores = {1: scored(cider=0.5, loss=3.0), 2: scored(cider=0.7, loss=2.0), 3: scored(cider=0.6, loss=2.5)}
    assert best_step(scores, "cider") == 2
    assert best_step(scores, "loss") == 2
    assert best_step(scores, None) is None


def test_of_equal_scores_the_earliest_is_best() -> None:
    assert best_step({3: scored(loss=1.0), 1: scored(loss=1.0), 2: scored(loss=2.0)}, "loss") == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "high"])
def test_score_that_is_no_number_is_never_best(value: object) -> None:
    for metric in ("loss", "cider"):
        assert best_step({1: scored(**{metric: value})}, metric) is None  # type: ignore[arg-type]
        assert best_step({1: scored(**{metric: 2.0}), 2: scored(**{metric: value})}, metric) == 1  # type: ignore[arg-type]


def test_scores_of_other_images_are_not_compared() -> None:
    few, many = {"split": "val", "num_images": 4}, {"split": "val", "num_images": 100}
    assert best_step({1: {**few, "cider": 0.9}, 2: {**many, "cider": 0.4}, 3: {**many, "cider": 0.3}}, "cider") == 2


@given(
    st.dictionaries(st.integers(1, 30), st.floats(allow_nan=True), min_size=1), st.integers(1, 4), st.integers(1, 30)
)
def test_newest_and_best_are_kept_and_nothing_of_a_past_that_was_gone_back_on(
    values: dict[int, float], keep: int, saved: int
) -> None:
    scores = {step: scored(loss=value) for step, value in values.items()}
    kept = kept_steps(values, saved, keep, scores, "loss")
    valid = {step: value for step, value in values.items() if step <= saved}
    assert kept <= valid.keys()
    assert kept >= {*sorted(valid, reverse=True)[:keep]}
    assert len(kept) <= keep + 1
    if finite := {step: value for step, value in valid.items() if math.isfinite(value)}:
        assert min(finite.values()) in {finite.get(step) for step in kept}


def test_best_checkpoint_is_not_pruned_until_a_better_one_is_there(tmp_path: Path) -> None:
    from dataclasses import replace

    checkpoints = Checkpoints(tmp_path, 1, "cider")
    for step, cider in ((1, 0.2), (2, 0.5), (3, 0.5), (4, math.nan), (5, 0.4)):
        checkpoints.save(replace(content(step), scores=scored(cider=cider)))
    assert checkpoints.steps() == [5, 2]
    assert checkpoints.best() == checkpoints.path(2)
    assert not checkpoints.improves(6, scored(cider=0.5))
    assert checkpoints.improves(6, scored(cider=0.6))
    checkpoints.save(replace(content(6), scores=scored(cider=0.6)))
    assert checkpoints.steps() == [6]
    checkpoints.save(content(7))
    assert checkpoints.steps() == [7, 6]


def open_unlearning(config: Config, _ranks: Ranks, _plan: Plan) -> tuple[TinyFamily, str]:
    """A model that is at its best early, as its learning rate is far too high."""
    import torch

    torch.manual_seed(config.train.seed)
    return TinyFamily(TinyModel(dropout=0.2)), "tiny"


def test_evaluation_that_is_better_than_all_before_saves_and_outlives_resumes(
    drawn_shards: Path, tmp_path: Path
) -> None:
    # The learning rate rises beyond what helps.
    changes = {**SCORED, "optim__lr": 3.0, "optim__warmup_steps": 40, "train__save_every": 5, "train__num_steps": 20}
    run = tmp_path / "run"
    train_here(drawn_shards, run, stop_asked=lambda: runs.last_step(run) >= 11, **changes)
    train_here(drawn_shards, run, **changes)
    losses = {line["step"]: line["loss"] for line in runs.events(run, "eval") if line["step"]}
    best = min(losses, key=lambda step: losses[step])
    assert 0 < best < 20
    config = config_of(drawn_shards, run, **changes)
    assert resume.best_checkpoint(config).name == f"step-{best:08d}"
    assert resume.checkpoints_of(config).steps() == [20, best]
    _, position = checkpoint.read_position(resume.best_checkpoint(config))
    assert position["scores"]["loss"] == losses[best]
    saved = {line["step"] for line in runs.events(run, "save")}
    assert saved >= {step for step in losses if losses[step] == min(losses[s] for s in losses if s <= step)}
    # It changes nothing about the training.
    plain = {name: value for name, value in changes.items() if name != "checkpoint__best"}
    train_here(drawn_shards, tmp_path / "plain", **plain)
    assert runs.trajectory(run) == runs.trajectory(tmp_path / "plain")
    assert runs.weights(run, 20) == runs.weights(tmp_path / "plain", 20)


def test_run_that_was_not_told_what_is_best_says_so(drawn_shards: Path, tmp_path: Path) -> None:
    train_here(drawn_shards, tmp_path, train__num_steps=2)
    with pytest.raises(ConfigError, match=r"checkpoint.best was not set, so the best checkpoint was not kept; name"):
        trained_family(config_of(drawn_shards, tmp_path), "best")


def test_run_that_was_not_scored_yet_says_so(drawn_shards: Path, tmp_path: Path) -> None:
    changes = {**SCORED, "train__num_steps": 2, "eval__every": 50}
    train_here(drawn_shards, tmp_path, stop_asked=lambda: True, **changes)
    with pytest.raises(ConfigError, match=r"no checkpoint has a score in loss; train beyond the next evaluation"):
        trained_family(config_of(drawn_shards, tmp_path, **changes), "best")


def test_best_without_evaluations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"checkpoint.best is cider, eval.every is empty: nothing would be scored; set"
    ):
        config_of(tmp_path, tmp_path, checkpoint__best="cider")


def test_damaged_best_checkpoint_is_named(tmp_path: Path) -> None:
    from dataclasses import replace

    checkpoints = Checkpoints(tmp_path, 1, "cider")
    path = checkpoints.save(replace(content(1), scores=scored(cider=0.2)))
    shutil.copytree(path, checkpoints.path(2))
    (checkpoints.path(2) / "position.json").write_text("{")
    assert checkpoints.best() == path
