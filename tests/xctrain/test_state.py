"""Progress as a value, and its file format."""

import json
import runpy
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xctrain.errors import CheckpointError
from xctrain.state import VERSION, Masked, Segment, TrainState, due

GOLDEN = Path(__file__).parents[1] / "golden"

counts = st.integers(0, 2**40)
texts = st.text(max_size=20)
segments = st.builds(
    Segment, counts, counts, counts, counts, counts, texts, texts, st.integers(0, 2**63 - 1), counts, counts, counts
)
states = st.builds(
    TrainState,
    step=counts,
    samples_consumed=counts,
    digest=st.integers(0, 2**64 - 1),
    masked=st.lists(st.builds(Masked, counts, texts, texts), max_size=3).map(tuple),
    segments=st.lists(segments, max_size=3).map(tuple),
    keys_from=st.none() | counts,
    skips_in_a_row=counts,
)


@given(states)
@settings(deadline=None, max_examples=50)
def test_state_reads_back_from_its_json(state: TrainState) -> None:
    assert TrainState.from_json(json.loads(json.dumps(state.to_json()))) == state


@pytest.mark.parametrize(("name", "state"), [("position-v1", "golden_state"), ("position-v1-mix", "golden_mix")])
def test_position_file_of_version_1_stays_readable(name: str, state: str) -> None:
    golden_state = runpy.run_path(str(GOLDEN / "remake_position.py"))[state]()
    values = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    assert TrainState.from_json(values) == golden_state
    assert VERSION > 1 or json.loads(json.dumps(golden_state.to_json())) == values


def test_unknown_version_is_refused_with_both_versions() -> None:
    with pytest.raises(CheckpointError, match=r"position.json: version is 99, this release reads 1; continue with"):
        TrainState.from_json({"version": 99})


def test_advance_moves_step_and_position_and_ends_a_row_of_skips() -> None:
    state = TrainState(step=3, samples_consumed=36, digest=2**64 - 1, skips_in_a_row=2).advance(12, 5)
    assert (state.step, state.samples_consumed, state.digest, state.skips_in_a_row) == (4, 48, 4, 0)


def test_skip_moves_position_but_not_step() -> None:
    masked = [Masked(n, str(n), "not_finite") for n in range(36, 48)]
    state = TrainState(step=3, samples_consumed=36, digest=9).skip(12, masked)
    assert (state.step, state.samples_consumed, state.digest, state.skips_in_a_row) == (3, 48, 9, 1)
    assert state.masked == tuple(masked)


def test_due_is_every_so_many_steps_and_never_before_the_first() -> None:
    assert [step for step in range(10) if due(step, 4)] == [4, 8]
    assert not any(due(step, None) for step in range(10))
