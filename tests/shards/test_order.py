import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shards.errors import ConfigError
from shards.order import Order, OrderSettings

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any)
SETTINGS = st.builds(
    OrderSettings,
    seed=st.integers(-(2**63), 2**64),
    fragment=st.integers(1, 50),
    window=st.integers(1, 100),
    lanes=st.integers(1, 10),
)


def mix(*values: int) -> int:
    h = 0
    for v in values:
        h = (h + v + 0x9E3779B97F4A7C15) % 2**64
        h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        h = (h ^ (h >> 27)) * 0x94D049BB133111EB % 2**64
        h = h ^ (h >> 31)
    return h


def reference_epoch(sizes: Sequence[int], s: OrderSettings, epoch: int) -> list[int]:
    """Order 1 a second time, written from the docstring of order.py with plain lists and loops."""
    fragments: list[list[int]] = []
    first = 0
    for size in sizes:
        samples = list(range(first, first + size))
        fragments += [samples[i : i + s.fragment] for i in range(0, size, s.fragment)]
        first += size
    by_hash = sorted(range(len(fragments)), key=lambda f: (mix(s.seed, epoch, f), f))
    epoch_list = [sample for f in by_hash for sample in fragments[f]]
    q, r = divmod(len(epoch_list), s.lanes)
    width = max(1, s.window // s.lanes)
    lanes: list[list[int]] = []
    for k in range(s.lanes):
        start = k * q + min(k, r)
        lane = epoch_list[start : start + q + (1 if k < r else 0)]
        phase = 0 if width >= len(lane) else mix(s.seed, epoch, k) % width
        windows: dict[int, list[int]] = {}
        for i in range(len(lane)):
            windows.setdefault((i + phase) // width, []).append(i)
        served: list[int] = []
        for w in sorted(windows):
            served += sorted(windows[w], key=lambda i, w=w: (mix(s.seed, epoch, k, w, i), i))
        lanes.append([lane[i] for i in served])
    return [lanes[p % s.lanes][p // s.lanes] for p in range(len(epoch_list))]


@settings(deadline=None, max_examples=150)
@given(SIZES, SETTINGS, st.integers(0, 5))
@example([1], OrderSettings(0), 1)  # N = 1
@example([3], OrderSettings(0, fragment=1), 2)  # N < L
@example([40, 40], OrderSettings(5, fragment=1, window=16, lanes=4), 0)  # F = 1
@example([40, 40], OrderSettings(5, window=80, lanes=4), 0)  # the window is exactly the lane
@example([40, 41], OrderSettings(5, window=80, lanes=4), 0)  # it is one lane, the longest, but not quite
@example([40, 40], OrderSettings(5, window=2, lanes=4), 0)  # T < L: windows of one
def test_order_is_the_documented_one(sizes: list[int], order_settings: OrderSettings, epoch: int) -> None:
    order = Order(sizes, order_settings)
    ns = epoch * order.num_samples + np.arange(order.num_samples)
    assert order.indices(ns).tolist() == reference_epoch(sizes, order_settings, epoch)


def test_order_is_that_of_every_earlier_version(golden: Path, remake: ModuleType) -> None:
    assert remake.order_values() == json.loads((golden / "order.json").read_text())


@settings(deadline=None, max_examples=100)
@given(SIZES, SETTINGS)
def test_every_epoch_is_a_permutation(sizes: list[int], order_settings: OrderSettings) -> None:
    order = Order(sizes, order_settings)
    epochs = order.indices(np.arange(4 * order.num_samples)).reshape(4, -1)
    assert (np.sort(epochs, axis=1) == np.arange(order.num_samples)).all()


@settings(deadline=None, max_examples=100)
@given(SIZES, SETTINGS, st.data())
def test_any_positions_in_any_sequence_give_the_same_samples(
    sizes: list[int], order_settings: OrderSettings, data: st.DataObject
) -> None:
    num_samples = sum(sizes)
    everything = Order(sizes, order_settings).indices(np.arange(3 * num_samples))
    ns = data.draw(st.lists(st.integers(0, 3 * num_samples - 1), max_size=30))
    assert Order(sizes, order_settings).indices(np.array(ns, np.int64)).tolist() == everything[ns].tolist()


def test_epochs_and_seeds_differ_and_the_same_seed_repeats() -> None:
    ns = np.arange(300)
    seven, again, eight = (Order([100, 200], OrderSettings(seed)).indices(ns).tolist() for seed in (7, 7, 8))
    second = Order([100, 200], OrderSettings(7)).indices(ns + 300).tolist()
    assert seven == again
    assert seven != eight
    assert seven != second


def test_a_window_touches_few_fragments() -> None:
    order = Order([1000] * 10, OrderSettings(3, fragment=50, window=800, lanes=4))
    for row in range(0, 2000, 200):
        lane_rows = np.arange(row, row + 200) * 4 + 1
        assert len(np.unique(order.indices(lane_rows) // 50)) <= 2 * (200 // 50) + 2


def test_a_worker_process_gets_the_same_order() -> None:
    order = Order([50, 60], OrderSettings(1, fragment=4, window=40))
    before = order.indices(np.arange(220))
    assert (pickle.loads(pickle.dumps(order)).indices(np.arange(220)) == before).all()
    assert len(pickle.dumps(order)) < 5000  # what it remembers stays behind


def test_position_late_in_a_huge_split_sorts_only_its_own_window() -> None:
    order = Order([10_000] * 200, OrderSettings(1))
    order.indices(np.arange(1_999_000, 1_999_064))
    assert sum(len(w) for w in order._windows._values.values()) <= 3 * order.settings.window


def test_samples_sorted_by_label_give_batches_without_a_wave_from_shard_to_shard() -> None:
    sizes, batch = [1000] * 20, 48
    labels = np.arange(20_000) / 20_000  # shard by shard, as a dataset that was sorted
    order = Order(sizes, OrderSettings(5, window=4096))
    means = labels[order.indices(np.arange(20_000))][: 20_000 // batch * batch].reshape(-1, batch).mean(axis=1)
    shuffled = np.random.default_rng(0).permutation(labels)[: len(means) * batch].reshape(-1, batch).mean(axis=1)
    assert means.std() < 1.5 * shuffled.std()
    power = np.abs(np.fft.rfft(means - means.mean())) ** 2
    period = round(len(means) / len(sizes))  # batches in which one shard after the other would have passed
    near = power[max(1, len(means) // period - 2) : len(means) // period + 3]
    assert near.max() < 8 * np.median(power)


@pytest.mark.parametrize("name", ["fragment", "window", "lanes"])
def test_settings_below_one_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"order.{name} is 0, expected 1 or more"):
        OrderSettings(0, **{name: 0})


def test_an_empty_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="the split has no samples"):
        Order([0, 0], OrderSettings(0))
