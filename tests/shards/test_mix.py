"""Several datasets in a fixed proportion, each exactly as often an epoch as it says."""

import json
import pickle
import tracemalloc
from collections import Counter
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shards.errors import ConfigError
from shards.mix import Mix, Part, Stretches
from shards.order import Order, OrderSettings

SETTINGS = OrderSettings(seed=3, fragment=4, window=16, lanes=3)
SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(any)


@st.composite
def drawn_parts(draw: st.DrawFn, most: int = 4) -> list[Part]:
    parts, first = [], 0
    for _ in range(draw(st.integers(1, most))):
        sizes = tuple(draw(SIZES))
        out = draw(st.sets(st.integers(0, sum(sizes) - 1), max_size=sum(sizes) - 1))
        parts.append(Part(sizes, draw(st.integers(1, 4)), tuple(sorted(out)), first))
        first += sum(sizes)
    return parts


def due_in_an_epoch(parts: list[Part]) -> dict[int, int]:
    """How often each sample comes, by its number."""
    return {
        part.first_index + i: part.repeat
        for part in parts
        for i in range(sum(part.shard_sizes))
        if i not in part.left_out
    }


@settings(deadline=None, max_examples=100)
@given(drawn_parts(), st.integers(0, 3))
@example([Part((1,)), Part((30, 30), 4, (), 1)], 0)
def test_every_epoch_has_each_sample_as_often_as_its_dataset_repeats_and_those_left_out_never(
    parts: list[Part], epoch: int
) -> None:
    mix = Mix(parts, SETTINGS)
    places = mix.places(np.arange(epoch * mix.num_positions, (epoch + 1) * mix.num_positions))
    assert Counter(places.index.tolist()) == due_in_an_epoch(parts)
    for number, part in enumerate(parts):  # and each pass of a dataset is a whole epoch of its own
        own = Counter(places.epoch[places.part == number].tolist())
        assert own == dict.fromkeys(range(epoch * part.repeat, (epoch + 1) * part.repeat), sum(part.kept_sizes))


@settings(deadline=None, max_examples=50)
@given(drawn_parts())
def test_positions_are_those_of_sorting_all_slots_by_the_documented_time(parts: list[Part]) -> None:
    mix = Mix(parts, SETTINGS)
    counts = [part.repeat * sum(part.kept_sizes) for part in parts]
    total = sum(counts)
    slots = sorted(((2 * j + 1) * total // (2 * c), k, j) for k, c in enumerate(counts) for j in range(c))
    places = mix.places(np.arange(total, 2 * total))
    orders = [Order(part.kept_sizes, SETTINGS) for part in parts]
    for at, (_, k, j) in enumerate(slots):
        kept = orders[k].indices(np.array([counts[k] + j]))
        assert (places.part[at], places.index[at]) == (k, parts[k].index(kept)[0])


def test_mix_is_that_of_every_earlier_version(golden: Path, remake: ModuleType) -> None:
    assert remake.mix_values() == json.loads((golden / "mix.json").read_text())


@settings(deadline=None, max_examples=50)
@given(SIZES, st.integers(0, 10**6))
def test_one_dataset_alone_has_its_own_order(sizes: list[int], start: int) -> None:
    ns = np.arange(start, start + 40)
    alone, mixed = Order(sizes, SETTINGS).places(ns), Mix([Part(tuple(sizes))], SETTINGS).places(ns)
    for name in ("part", "epoch", "lane", "index"):
        assert getattr(alone, name).tolist() == getattr(mixed, name).tolist()


@settings(deadline=None, max_examples=50)
@given(drawn_parts(), st.integers(1, 60), st.integers(0, 400))
def test_every_run_of_positions_has_the_shares_of_the_whole(parts: list[Part], size: int, start: int) -> None:
    mix = Mix(parts, SETTINGS)
    counts = np.array([part.repeat * sum(part.kept_sizes) for part in parts])
    start %= mix.num_positions
    size = min(size, mix.num_positions - start)
    found = np.bincount(mix.places(np.arange(start, start + size)).part, minlength=len(parts))
    assert (abs(found - size * counts / counts.sum()) <= len(parts)).all()


@settings(deadline=None, max_examples=50)
@given(drawn_parts(), st.lists(st.integers(0, 500), min_size=1, max_size=30))
def test_any_positions_in_any_sequence_give_the_same_samples(parts: list[Part], ns: list[int]) -> None:
    together = Mix(parts, SETTINGS).places(np.array(ns)).index.tolist()
    mix = pickle.loads(pickle.dumps(Mix(parts, SETTINGS)))
    assert [int(mix.places(np.array([n])).index[0]) for n in ns] == together


@settings(deadline=None, max_examples=50)
@given(drawn_parts(2), drawn_parts(2), st.integers(1, 3))
def test_data_that_change_at_an_epochs_end_leave_every_epoch_whole(
    before: list[Part], after: list[Part], epochs: int
) -> None:
    first = Mix(before, SETTINGS)
    change = epochs * first.num_positions
    stretches = Stretches([(0, first), (change, Mix(after, SETTINGS, base_n=change, base_epoch=epochs))])
    size = sum(part.repeat * sum(part.kept_sizes) for part in after)
    for epoch in range(epochs + 2):
        start, stop = stretches.position_of(Fraction(epoch)), stretches.position_of(Fraction(epoch + 1))
        assert stop - start == (first.num_positions if epoch < epochs else size)
        found = Counter(stretches.places(np.arange(start, stop)).index.tolist())
        assert found == due_in_an_epoch(before if epoch < epochs else after)


def test_a_position_late_in_a_huge_mix_is_found_without_replay() -> None:
    mix = Mix([Part((10_000,) * 1000), Part((5_000,), 20, (), 10**7)], OrderSettings(0))
    tracemalloc.start()
    places = mix.places(np.arange(7 * mix.num_positions - 64, 7 * mix.num_positions))
    assert tracemalloc.get_traced_memory()[1] < 200_000_000  # an epoch of the mix has ten million positions
    tracemalloc.stop()
    assert set(places.epoch[places.part == 0].tolist()) == {6}
    assert set(places.epoch[places.part == 1].tolist()) == {139}


def test_a_mix_too_large_for_its_arithmetic_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"an epoch of the mix has 2000000001 positions, at most 1073741824 can"):
        Mix([Part((1,)), Part((10**6,), 2000, (), 1)], SETTINGS)
