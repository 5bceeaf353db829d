"""What every rank trains on at every step: the global batch, its slots and its micro-batches."""

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from shards.errors import ConfigError
from shards.mix import Positions
from shards.order import Ints, Places

AT_ONCE = 2048  # positions that are worked out together, for a tenth of the time of a step of 32 alone


class Slot(NamedTuple):
    """One place in a global batch.

    n        position: samples consumed before it
    epoch    of the dataset that the sample is of
    index    number of the sample, among those of all datasets of a mix
    surplus  behind the run's end, so it is read but gives no loss
    part     which dataset of a mix the sample is of
    """

    n: int
    epoch: int
    index: int  # type: ignore[assignment]  # tuples have an index(), which is of no use here
    surplus: bool = False
    part: int = 0


class Stream:
    """Cuts the order into global batches. Holds no position: every answer is a function of ``samples_consumed``."""

    def __init__(self, order: Positions, global_batch: int, end: int | None = None) -> None:
        """``end``: number of positions in the run, None for an endless one; see ``num_positions``."""
        if global_batch < 1:
            raise ConfigError(f"train.global_batch is {global_batch}, expected 1 or more")
        self.order = order
        self.global_batch = global_batch
        self.end = end

    def num_positions(self, epochs: float) -> int:
        """Slots that ``epochs`` epochs fill, a share of an epoch rounded up."""
        return self.order.position_of(Fraction(str(epochs)))

    def num_steps(self, epochs: float) -> int:
        """Updates that cover ``epochs`` epochs; the last one may hold surplus slots."""
        return -(-self.num_positions(epochs) // self.global_batch)

    def steps(self, samples_consumed: int, count: int) -> tuple[Ints, Places]:
        """Positions, and what stands there, of the ``count`` global batches that follow, each ordered by (lane, n).

        Shapes: int64 [count * global_batch] each.
        """
        ns = np.arange(samples_consumed, samples_consumed + count * self.global_batch)
        places = self.order.places(ns)
        by_lane = np.lexsort((places.lane, (ns - samples_consumed) // self.global_batch))
        return ns[by_lane], Places(*(a[by_lane] for a in (places.part, places.epoch, places.lane, places.index)))

    def step(self, samples_consumed: int) -> list[Slot]:
        """The whole global batch that follows ``samples_consumed``, ordered by (lane, n)."""
        return self._slots(samples_consumed, 1)

    def steps_from(self, samples_consumed: int) -> Iterator[list[Slot]]:
        """One ``step`` after the other, up to the run's end."""
        n = samples_consumed
        while self.end is None or n < self.end:
            count = max(1, AT_ONCE // self.global_batch)
            if self.end is not None:
                count = min(count, -(-(self.end - n) // self.global_batch))
            slots = self._slots(n, count)
            for i in range(0, len(slots), self.global_batch):
                yield slots[i : i + self.global_batch]
            n += len(slots)

    def _slots(self, samples_consumed: int, count: int) -> list[Slot]:
        ns, places = self.steps(samples_consumed, count)
        surplus = np.zeros(len(ns), bool) if self.end is None else ns >= self.end
        columns = (a.tolist() for a in (ns, places.epoch, places.index, surplus, places.part))
        return [Slot(*fields) for fields in zip(*columns, strict=True)]

    def micro_batches(self, samples_consumed: int, rank: int, world_size: int, micro_batch: int) -> list[list[Slot]]:
        """Rank ``rank``'s ``share`` of the global batch that follows ``samples_consumed``."""
        return share(self.step(samples_consumed), rank, world_size, micro_batch)


def share(step: list[Slot], rank: int, world_size: int, micro_batch: int) -> list[list[Slot]]:
    """Rank ``rank``'s part of a global batch, in the runs that it trains on one after the other.

    Raises:
        ConfigError: the global batch is not world_size * micro_batch * a whole number; see ``accumulation``.
    """
    count = accumulation(len(step), world_size, micro_batch)
    part = step[rank * count * micro_batch : (rank + 1) * count * micro_batch]
    return [part[i : i + micro_batch] for i in range(0, len(part), micro_batch)]


def accumulation(global_batch: int, world_size: int, micro_batch: int) -> int:
    """Micro-batches per rank and step.

    Raises:
        ConfigError: they do not fill the global batch exactly; the possible numbers of processes are named.
    """
    if micro_batch < 1:
        raise ConfigError(f"train.micro_batch is {micro_batch}, expected 1 or more")
    if global_batch % (world_size * micro_batch) == 0:
        return global_batch // (world_size * micro_batch)
    possible = possible_world_sizes(global_batch, micro_batch)
    if possible:
        advice = f"with these, {_listed(possible)} processes are possible; or change train.micro_batch"
    else:
        advice = f"train.micro_batch must divide it: {_listed(divisors(global_batch))}"
    fitting = [m for m in divisors(global_batch) if global_batch % (world_size * m) == 0]
    if fitting:
        advice += f"; {world_size} processes take a train.micro_batch of {_listed(fitting)}"
    raise ConfigError(
        f"train.global_batch is {global_batch}, which is not processes ({world_size}) x train.micro_batch "
        f"({micro_batch}) x a whole number; {advice}"
    )


def possible_world_sizes(global_batch: int, micro_batch: int) -> list[int]:
    """Numbers of processes for which the global batch can be cut; empty if no number works."""
    return [] if global_batch % micro_batch else divisors(global_batch // micro_batch)


def divisors(number: int) -> list[int]:
    """All divisors, rising."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
