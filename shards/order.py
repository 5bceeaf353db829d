"""Order 1: which sample stands at which position. Pure integer arithmetic, held by tests/golden/order.json.

Symbols: N samples in the split, F fragment, T window, L lanes, all from ``OrderSettings``; ``n`` counts the samples
consumed since the start of the run; ``div`` rounds down; hash is ``hashing.mix64``, sorted upwards as an unsigned
number, ties by the number that was hashed last.

1. Samples are numbered 0 ... N-1 through the split's shards in manifest order. Each shard is cut, from its start, into
   fragments of F samples, the last one shorter. Fragments are numbered through all shards from 0.
2. epoch = n div N, p = n mod N. The epoch's list: the fragments sorted by hash(seed, epoch, fragment), each fragment's
   samples in their own order.
3. With N = q * L + r, the list is cut into lanes: lane k has q + 1 samples if k < r, else q, and begins at
   k * q + min(k, r). Position p is row p div L of lane p mod L.
4. A window has W = max(1, T div L) rows. If W is at least the lane's length, the lane is one window, window 0, with
   phase 0. Else its phase is hash(seed, epoch, lane) mod W, and its i-th sample (i from 0) is in window
   (i + phase) div W. The rows of a window serve its samples, sorted by hash(seed, epoch, lane, window, i).
5. Step t takes the positions [n, n + B), see stream.py.

A position costs one sort of the fragments per epoch and one sort per (epoch, lane, window), both remembered; nothing is
replayed.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from shards.errors import ConfigError
from shards.hashing import mix64, mix64_array

Ints = NDArray[np.int64]
V = TypeVar("V")


@dataclass(frozen=True)
class OrderSettings:
    """What the order depends on besides the sizes of the shards.

    seed      any integer
    fragment  neighbouring samples that stay together in the epoch's list: one byte range, one range request
    window    samples, over all lanes, within which neighbours are scattered
    lanes     contiguous parts of the epoch's list that are read side by side
    """

    VERSION: ClassVar[int] = 1

    seed: int
    fragment: int = 16
    window: int = 16384
    lanes: int = 8

    def __post_init__(self) -> None:
        for name in ("fragment", "window", "lanes"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"order.{name} is {value}, expected 1 or more")


@dataclass(frozen=True)
class Places:
    """What stands at k positions; int64 [k] each."""

    part: Ints  # number of the dataset in a mix, see mix.py
    epoch: Ints  # of that dataset, counted from 0
    lane: Ints
    index: Ints  # number of the sample


@dataclass(frozen=True)
class _EpochList:
    """The fragments of one epoch in their order: the first sample of each, and where each begins in the list."""

    first_sample: Ints  # int64 [fragments]
    begins: Ints  # int64 [fragments]

    def samples(self, start: int, stop: int) -> Ints:
        """Sample indices of the places [start, stop) of the epoch's list."""
        places = np.arange(start, stop)
        fragment = np.searchsorted(self.begins, places, side="right") - 1
        return self.first_sample[fragment] + places - self.begins[fragment]


class Order:
    """Maps the global counter ``n`` to sample indices of a split; stateless but for what it remembers."""

    def __init__(self, shard_sizes: Sequence[int], settings: OrderSettings) -> None:
        self.settings = settings
        self.num_samples = sum(shard_sizes)
        if self.num_samples == 0:
            raise ConfigError("the split has no samples; build it with filters that keep some")
        self.fragment_starts, self.fragment_sizes = _cut(shard_sizes, settings.fragment)
        self.window = max(1, settings.window // settings.lanes)
        self._epochs: _Recent[_EpochList] = _Recent(4)
        self._windows: _Recent[Ints] = _Recent(3 * settings.lanes)  # two epochs meet in a batch

    def __getstate__(self) -> dict[str, Any]:
        # What is remembered is cheap to find again and does not travel to worker processes.
        return {**self.__dict__, "_epochs": _Recent(self._epochs.size), "_windows": _Recent(self._windows.size)}

    def epoch_of(self, n: int) -> int:
        """The epoch, counted from 0, that position ``n`` belongs to."""
        return n // self.num_samples

    def lane_of(self, ns: Ints) -> Ints:
        """The lane that serves each position."""
        return np.asarray(ns, np.int64) % self.num_samples % self.settings.lanes

    def places(self, ns: Ints) -> Places:
        """The sample at each position, with its epoch and lane."""
        ns = np.asarray(ns, np.int64)
        return Places(np.zeros_like(ns), ns // self.num_samples, self.lane_of(ns), self.indices(ns))

    def position_of(self, epochs: Fraction) -> int:
        """The first position behind so many epochs, a share of an epoch rounded up."""
        return math.ceil(epochs * self.num_samples)

    def lane_span(self, lane: int) -> tuple[int, int]:
        """Where a lane begins in the epoch's list, and its length."""
        length, longer = divmod(self.num_samples, self.settings.lanes)
        return lane * length + min(lane, longer), length + (lane < longer)

    def cut_fragments(self, epoch: int) -> Ints:
        """The fragments that two or more lanes share in an epoch, at most one per cut between lanes."""
        cuts = np.asarray([self.lane_span(lane)[0] for lane in range(1, self.settings.lanes)], np.int64)
        listed = self._epoch_list(epoch)
        at = np.searchsorted(listed.begins, cuts, side="right") - 1
        first = listed.first_sample[at[(cuts < self.num_samples) & (listed.begins[at] < cuts)]]
        return np.unique(np.searchsorted(self.fragment_starts, first, side="right") - 1)

    def indices(self, ns: Ints) -> Ints:
        """The sample at each position.

        Shapes: int64 [k], not negative, in any order; int64 [k], each in [0, num_samples).
        """
        ns = np.asarray(ns, np.int64)
        assert ns.size == 0 or int(ns.min()) >= 0, "positions count from 0"
        epochs, lanes, rows = ns // self.num_samples, self.lane_of(ns), ns % self.num_samples // self.settings.lanes
        phases = self._phases(epochs, lanes)
        windows = (rows + phases) // self.window
        windows[self._one_window(lanes)] = 0
        result = np.empty_like(ns)
        by_window = np.lexsort((windows, lanes, epochs))
        groups = np.stack((epochs, lanes, windows))[:, by_window]
        for members in np.split(by_window, 1 + np.flatnonzero(np.diff(groups).any(axis=0))):
            if members.size:
                epoch, lane, window = (int(a[members[0]]) for a in (epochs, lanes, windows))
                first_row = max(0, window * self.window - int(phases[members[0]]))
                result[members] = self._window_samples(epoch, lane, window, first_row)[rows[members] - first_row]
        return result

    def _one_window(self, lanes: Ints) -> NDArray[np.bool_]:
        length, longer = divmod(self.num_samples, self.settings.lanes)
        return self.window >= length + (lanes < longer)

    def _phases(self, epochs: Ints, lanes: Ints) -> Ints:
        hashes = mix64_array(self.settings.seed, epochs, lanes) % np.uint64(self.window)
        return np.where(self._one_window(lanes), 0, hashes.astype(np.int64))

    def _window_samples(self, epoch: int, lane: int, window: int, first_row: int) -> Ints:
        """Samples of a window's rows, in the order in which the rows serve them."""

        def sort() -> Ints:
            start, length = self.lane_span(lane)
            stop_row = length
            if self.window < length:
                phase = mix64(self.settings.seed, epoch, lane) % self.window
                stop_row = min(length, (window + 1) * self.window - phase)
            places = np.arange(first_row, stop_row)
            served = np.argsort(mix64_array(self.settings.seed, epoch, lane, window, places), kind="stable")
            return self._epoch_list(epoch).samples(start + first_row, start + stop_row)[served]

        return self._windows.get((epoch, lane, window), sort)

    def _epoch_list(self, epoch: int) -> _EpochList:
        def sort() -> _EpochList:
            numbers = np.arange(len(self.fragment_starts))
            order = np.argsort(mix64_array(self.settings.seed, epoch, numbers), kind="stable")
            ends = np.cumsum(self.fragment_sizes[order])
            return _EpochList(self.fragment_starts[order], ends - self.fragment_sizes[order])

        return self._epochs.get(epoch, sort)


class _Recent(Generic[V]):
    """The ``size`` most recently used values."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: OrderedDict[Hashable, V] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        value = self._values.pop(key, None)
        if value is None:
            value = make()
        self._values[key] = value
        while len(self._values) > self.size:
            self._values.popitem(last=False)
        return value


def _cut(shard_sizes: Sequence[int], fragment: int) -> tuple[Ints, Ints]:
    """First sample and size of every fragment."""
    sizes = np.asarray(shard_sizes, np.int64)
    per_shard = -(-sizes // fragment)
    shard = np.repeat(np.arange(len(sizes)), per_shard)
    number = np.arange(len(shard)) - np.repeat(np.cumsum(per_shard) - per_shard, per_shard)
    offset = number * fragment
    return (np.cumsum(sizes) - sizes)[shard] + offset, np.minimum(fragment, sizes[shard] - offset)
