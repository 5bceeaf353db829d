"""Which of several datasets serves a position, in a fixed proportion. Pure integer arithmetic, nothing is replayed.

Part k has N_k samples, those left out not counted, and comes r_k times an epoch: c_k = r_k * N_k positions of the
epoch's E = c_0 + c_1 + ... ``div`` rounds down.

1. epoch = n div E, p = n mod E. Part k's j-th slot of an epoch (j from 0) is due at the time (2j + 1) * E div (2 * c_k):
   its slots are spread evenly. Position p is the p-th slot of all parts, by time, then by part.
2. That slot takes sample number epoch * c_k + j of part k in its own order 1 (order.py), so part k has had exactly r_k
   epochs of its own whenever an epoch of the mix ends.

With one part that comes once, position n is position n of its order 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np

from shards.errors import ConfigError
from shards.order import Ints, Order, OrderSettings, Places

_MOST_POSITIONS = 2**30  # an epoch: products of two such numbers stay in int64


class Positions(Protocol):
    """What stands where: an order, a mix, or several of them one after the other."""

    def places(self, ns: Ints) -> Places:
        """The sample at each position."""

    def position_of(self, epochs: Fraction) -> int:
        """The first position behind so many epochs, a share of an epoch rounded up."""


@dataclass(frozen=True)
class Part:
    """One dataset of a mix.

    shard_sizes  samples per shard, those left out included
    repeat       how often each sample comes in an epoch of the mix
    left_out     numbers of samples that never come, rising
    first_index  what its first sample is called among the samples of all parts
    """

    shard_sizes: tuple[int, ...]
    repeat: int = 1
    left_out: tuple[int, ...] = ()
    first_index: int = 0

    @property
    def kept_sizes(self) -> list[int]:
        """Samples per shard without those left out."""
        ends = np.cumsum([0, *self.shard_sizes])
        before = np.searchsorted(np.asarray(self.left_out, np.int64), ends)
        return list(np.diff(ends - before).tolist())

    def index(self, kept: Ints) -> Ints:
        """The number, among the samples of all parts, of the kept samples with these numbers."""
        left_out = np.asarray(self.left_out, np.int64)
        before: Ints = np.searchsorted(left_out - np.arange(len(left_out)), kept, side="right")
        return kept + before + self.first_index


class Mix:
    """Maps the global counter ``n`` to the samples of several datasets; of one, it is that one's order."""

    def __init__(self, parts: Sequence[Part], settings: OrderSettings, *, base_n: int = 0, base_epoch: int = 0) -> None:
        """Epoch ``base_epoch`` begins at position ``base_n``."""
        self.parts = tuple(parts)
        self.orders = [Order(part.kept_sizes, settings) for part in parts]
        self.base_n, self.base_epoch = base_n, base_epoch
        self._counts = np.array(
            [part.repeat * order.num_samples for part, order in zip(parts, self.orders, strict=True)], np.int64
        )
        self.num_positions = int(self._counts.sum())
        if len(parts) > 1 and self.num_positions > _MOST_POSITIONS:
            raise ConfigError(
                f"data.shards: an epoch of the mix has {self.num_positions} positions, at most {_MOST_POSITIONS} can be "
                "mixed; repeat the small datasets less often"
            )

    def places(self, ns: Ints) -> Places:
        """The sample at each position from ``base_n`` on.

        Shapes: int64 [k], in any order; int64 [k] each.
        """
        since = np.asarray(ns, np.int64) - self.base_n
        assert since.size == 0 or int(since.min()) >= 0, "positions count from the base"
        epochs = self.base_epoch + since // self.num_positions
        part, slot = self._slots(since % self.num_positions)
        own = epochs * self._counts[part] + slot
        result = Places(part, np.empty_like(own), np.empty_like(own), np.empty_like(own))
        for number in np.unique(part).tolist():
            found = self.orders[number].places(own[part == number])
            result.epoch[part == number] = found.epoch
            result.lane[part == number] = found.lane
            result.index[part == number] = self.parts[number].index(found.index)
        return result

    def position_of(self, epochs: Fraction) -> int:
        """The first position behind so many epochs, counted from the run's begin."""
        return self.base_n + math.ceil((epochs - self.base_epoch) * self.num_positions)

    def _slots(self, ps: Ints) -> tuple[Ints, Ints]:
        """Part, and which of its slots, of each position in an epoch."""
        if len(self.parts) == 1:
            return np.zeros_like(ps), ps
        # The last time before which no more than p slots are due; it is off p by half the number of parts at most.
        low, high = np.maximum(0, ps - len(self.parts)), ps + len(self.parts)
        while (low < high).any():
            middle = (low + high + 1) // 2
            early = self._due_before(middle).sum(axis=0) <= ps
            low, high = np.where(early, middle, low), np.where(early, high, middle - 1)
        slots = self._due_before(low)
        due = np.cumsum(self._due_before(low + 1) - slots, axis=0)  # a part has at most one slot at a time
        part = (due <= ps - slots.sum(axis=0)).sum(axis=0)
        return part, slots[part, np.arange(len(ps))]

    def _due_before(self, times: Ints) -> Ints:
        """Slots of each part that are due before each time; int64 [parts, k]."""
        ahead: Ints = 2 * self._counts[:, None] * times[None, :] - self.num_positions
        due: Ints = np.minimum(-(-ahead // (2 * self.num_positions)), self._counts[:, None])
        return due


class Stretches:
    """Mixes one after the other, each from its first position on, up to the next one's."""

    def __init__(self, stretches: Sequence[tuple[int, Mix]]) -> None:
        self.firsts = np.array([first for first, _ in stretches], np.int64)
        self.mixes = [mix for _, mix in stretches]

    def places(self, ns: Ints) -> Places:
        """The sample at each position."""
        ns = np.asarray(ns, np.int64)
        numbers = np.searchsorted(self.firsts, ns, side="right") - 1
        if len(ns) and numbers.min() == numbers.max():
            return self.mixes[int(numbers[0])].places(ns)
        result = Places(*(np.empty_like(ns) for _ in range(4)))
        for number in np.unique(numbers).tolist():
            inside = numbers == number
            found = self.mixes[number].places(ns[inside])
            for column in ("part", "epoch", "lane", "index"):
                getattr(result, column)[inside] = getattr(found, column)
        return result

    def position_of(self, epochs: Fraction) -> int:
        """The first position behind so many epochs, by the mix that they end in."""
        mix = next((mix for mix in reversed(self.mixes) if mix.base_epoch < epochs), self.mixes[0])
        return mix.position_of(epochs)
