import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shards.errors import ConfigError
from shards.order import Order, OrderSettings
from shards.stream import Slot, Stream, accumulation, divisors, possible_world_sizes

SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=5).filter(any)
SETTINGS = st.builds(
    OrderSettings,
    seed=st.integers(0, 2**32),
    fragment=st.integers(1, 10),
    window=st.integers(1, 60),
    lanes=st.integers(1, 9),
)


@settings(deadline=None, max_examples=100)
@given(SIZES, SETTINGS, st.integers(1, 48), st.integers(0, 200))
@example([1], OrderSettings(0), 24, 0)  # N = 1, and 24 epochs in one batch
@example([30, 30], OrderSettings(0, lanes=8), 24, 48)  # across the seam of two epochs
def test_ranks_and_micro_batches_cut_the_same_batch(
    sizes: list[int], order_settings: OrderSettings, global_batch: int, consumed: int
) -> None:
    stream = Stream(Order(sizes, order_settings), global_batch)
    whole = stream.step(consumed)
    assert sorted(slot.n for slot in whole) == list(range(consumed, consumed + global_batch))
    for world_size in divisors(global_batch):
        for micro_batch in divisors(global_batch // world_size):
            parts = [stream.micro_batches(consumed, rank, world_size, micro_batch) for rank in range(world_size)]
            assert {len(micro) for part in parts for micro in part} == {micro_batch}
            assert [slot for part in parts for micro in part for slot in micro] == whole


@settings(deadline=None, max_examples=50)
@given(SIZES, SETTINGS, st.integers(1, 20), st.integers(0, 8))
def test_starting_at_a_step_equals_dropping_those_before(
    sizes: list[int], order_settings: OrderSettings, global_batch: int, dropped: int
) -> None:
    order = Order(sizes, order_settings)
    used = Stream(order, global_batch)
    steps = [used.step(t * global_batch) for t in range(10)]
    fresh = Stream(Order(sizes, order_settings), global_batch)
    assert [fresh.step(t * global_batch) for t in range(dropped, 10)] == steps[dropped:]


@settings(deadline=None, max_examples=50)
@given(SIZES, SETTINGS, st.integers(1, 20))
def test_epochs_are_seen_exactly_once_without_padding(
    sizes: list[int], order_settings: OrderSettings, global_batch: int
) -> None:
    num_samples = sum(sizes)
    stream = Stream(Order(sizes, order_settings), global_batch, end=2 * num_samples)
    slots = [slot for t in range(stream.num_steps(2)) for slot in stream.step(t * global_batch)]
    for epoch in (0, 1):
        seen = sorted(slot.index for slot in slots if slot.epoch == epoch and not slot.surplus)
        assert seen == list(range(num_samples))
    assert all(slot.surplus == (slot.n >= 2 * num_samples) for slot in slots)
    assert sum(slot.surplus for slot in slots) < global_batch


def test_a_batch_is_ordered_by_lane_then_position() -> None:
    stream = Stream(Order([10], OrderSettings(0, lanes=4)), 8)
    # N = 10: the last, short row of epoch 0 is positions 8 and 9, in lanes 0 and 1; epoch 1 begins again in lane 0.
    assert [slot.n for slot in stream.step(8)] == [8, 10, 14, 9, 11, 15, 12, 13]


def test_a_rank_reads_only_its_own_lanes_where_they_divide() -> None:
    order = Order([64] * 10, OrderSettings(0, lanes=8))
    stream = Stream(order, 32)
    for rank in range(4):
        for step in range(20):  # 640 samples are whole rows
            slots = [s for micro in stream.micro_batches(step * 32, rank, 4, 2) for s in micro]
            assert {s.n % 8 for s in slots} == {2 * rank, 2 * rank + 1}


def test_a_slot_says_its_epoch_and_sample() -> None:
    assert Stream(Order([1], OrderSettings(0)), 3, end=2).step(0) == [
        Slot(0, 0, 0),
        Slot(1, 1, 0),
        Slot(2, 2, 0, surplus=True),
    ]


@pytest.mark.parametrize(
    ("epochs", "positions", "steps"),
    [(1, 100, 13), (3, 300, 38), (0.5, 50, 7), (0.1, 10, 2), (0.001, 1, 1), (8, 800, 100)],
)
def test_number_of_steps_rounds_up(epochs: float, positions: int, steps: int) -> None:
    stream = Stream(Order([100], OrderSettings(0)), 8)
    assert (stream.num_positions(epochs), stream.num_steps(epochs)) == (positions, steps)


@pytest.mark.parametrize(
    ("batch", "world", "micro", "message"),
    [
        (
            32,
            3,
            4,
            "train.global_batch is 32, which is not processes (3) x train.micro_batch (4) x a whole number; "
            "with these, 1, 2, 4, 8 processes are possible",
        ),
        (
            32,
            2,
            5,
            "train.micro_batch must divide it: 1, 2, 4, 8, 16, 32; 2 processes take a train.micro_batch of 1, 2, 4, 8, 16",
        ),
        (6, 4, 3, "with these, 1, 2 processes are possible"),
        (8, 2, 0, "train.micro_batch is 0, expected 1 or more"),
    ],
)
def test_an_impossible_cut_is_refused_with_the_possible_ones(batch: int, world: int, micro: int, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        accumulation(batch, world, micro)


def test_possible_world_sizes_are_those_that_are_accepted() -> None:
    for batch in range(1, 40):
        for micro in range(1, 10):
            accepted = [world for world in range(1, 41) if batch % (world * micro) == 0]
            assert possible_world_sizes(batch, micro) == accepted
            assert all(accumulation(batch, world, micro) * world * micro == batch for world in accepted)


def test_a_global_batch_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.global_batch is 0, expected 1 or more"):
        Stream(Order([1], OrderSettings(0)), 0)
