"""Which fragments a node reads at which step, when it needs each for the last time, and the bytes that this takes.

A node is the processes on one machine; it reads whole fragments, each once an epoch, and may drop one after its last
slot. A *use* is one fragment in one epoch of its dataset: number ``epoch * fragments + fragment``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from shards.errors import ConfigError
from shards.mix import Mix, Part, Stretches
from shards.order import Ints, Order
from shards.stream import Stream, divisors

AT_ONCE = 1 << 16  # slots that are worked out together


@dataclass(frozen=True)
class Node:
    """One machine of a run: which of the ``world_size`` ranks are on it."""

    ranks: range
    world_size: int

    @staticmethod
    def of(number: int, nodes: int, world_size: int) -> "Node":
        """Node ``number`` of ``nodes`` equal ones."""
        size = world_size // nodes
        return Node(range(number * size, (number + 1) * size), world_size)


@dataclass(frozen=True, eq=False)
class Fragments:
    """What is fetched at once: so many neighbours of a shard, from its first sample on; of all shards of all datasets.

    They are those of the order (order.py), but in shards with samples left out, which shift the order's.
    """

    starts: Ints  # int64 [fragments], first sample, by its number among those of all datasets
    sizes: Ints  # int64 [fragments], samples
    num_bytes: Ints  # int64 [fragments], 0 for those of a folder here
    shard: Ints  # int64 [fragments], number of the shard among all

    @staticmethod
    def cut(offsets: Sequence[NDArray[np.int64]], size: int) -> "Fragments":
        """``offsets``: of each shard, where its samples begin, and the end."""
        counts = np.asarray([len(o) - 1 for o in offsets], np.int64)
        cuts = [np.arange(0, count, size) for count in counts.tolist()]
        shard = np.repeat(np.arange(len(cuts)), [len(c) for c in cuts])
        first = np.concatenate(cuts)
        sizes = np.minimum(size, counts[shard] - first)
        num_bytes = np.concatenate([np.diff(o[np.append(c, len(o) - 1)]) for o, c in zip(offsets, cuts, strict=True)])
        return Fragments((np.cumsum(counts) - counts)[shard] + first, sizes, num_bytes, shard)

    def of(self, indices: Ints) -> Ints:
        """The fragment that holds each sample."""
        return np.searchsorted(self.starts, indices, side="right") - 1

    def of_part(self, part: Part) -> slice:
        """Those of a part's dataset."""
        first, last = self.of(np.asarray([part.first_index, part.first_index + sum(part.shard_sizes) - 1])).tolist()
        return slice(first, last + 1)

    def shifted(self, part: Part) -> Ints:
        """Those of shards with samples left out."""
        left_out = np.asarray(part.left_out, np.int64) + part.first_index
        return np.flatnonzero(np.isin(self.shard, self.shard[self.of(left_out)])) if part.left_out else left_out


def mixes_of(stream: Stream) -> list[Mix]:
    """The mixes that a stream's positions are of."""
    order = stream.order
    if isinstance(order, Stretches):
        return order.mixes
    assert isinstance(order, Mix)
    return [order]


def parts_of(mix: Mix) -> Iterator[tuple[Part, Order, float]]:
    """Each part with its order, and the positions of the mix from one of its slots to the next."""
    for part, order in zip(mix.parts, mix.orders, strict=True):
        yield part, order, mix.num_positions / (part.repeat * order.num_samples)


class Schedule:
    """The uses of one node, a function of the position."""

    def __init__(self, stream: Stream, node: Node, fragments: Fragments) -> None:
        self.stream = stream
        self.fragments = fragments
        self.num_fragments = len(fragments.starts)
        part = stream.global_batch // node.world_size
        self._columns = slice(node.ranks.start * part, node.ranks.stop * part)
        self._mixes = mixes_of(stream)
        self._shared = cache(self._find_shared)
        # A fragment that is needed in one window, and in the next if they share it, has no longer pause than this.
        self.gap = max(
            int(distance * (min(2 * order.window * order.settings.lanes, order.num_samples) + order.settings.lanes))
            + 2 * (len(mix.parts) + stream.global_batch)
            for mix in self._mixes
            for _, order, distance in parts_of(mix)
        )

    def uses(self, samples_consumed: int, steps: int) -> Ints:
        """The use that each of the node's slots needs, -1 for slots that fetch nothing.

        Shapes: int64 [steps, slots of the node].
        """
        ns, places = self.stream.steps(samples_consumed, steps)
        fragment = self.fragments.of(places.index)
        uses = places.epoch * self.num_fragments + fragment
        uses[self.fragments.num_bytes[fragment] == 0] = -1
        if self.stream.end is not None:
            uses[ns >= self.stream.end] = -1  # surplus slots read nothing
        return uses.reshape(steps, -1)[:, self._columns]

    def is_shared(self, use: int) -> bool:
        """Whether two lanes need it, which may be at the begin and at the end of its epoch."""
        epoch, fragment = divmod(use, self.num_fragments)
        return fragment in self._shared(epoch)

    def _find_shared(self, epoch: int) -> frozenset[int]:
        found: set[int] = set()
        for mix in self._mixes:
            for part, order, _ in parts_of(mix):
                cut = order.cut_fragments(epoch)
                for first, size in zip(order.fragment_starts[cut], order.fragment_sizes[cut], strict=True):
                    found.update(self.fragments.of(part.index(np.arange(first, first + size))).tolist())
                found.update(self.fragments.shifted(part).tolist())
        return frozenset(found)


@dataclass(frozen=True)
class Needs:
    """What one node fetches between two positions, and how much of it is needed at once."""

    fetches: int
    num_bytes: int
    most_live_bytes: int  # of fragments of which slots came and others will; a cache cannot do with less


def needs(schedule: Schedule, start: int, stop: int) -> Needs:
    """The needs of the steps that begin at ``start`` and are over at ``stop``."""
    batch = schedule.stream.global_batch
    steps = max(0, -(-(stop - start) // batch))
    at_once = max(1, AT_ONCE // batch)
    found: list[tuple[Ints, Ints]] = []
    for first in range(0, steps, at_once):
        uses = schedule.uses(start + first * batch, min(at_once, steps - first))
        step = np.broadcast_to(first + np.arange(len(uses))[:, None], uses.shape)
        found.append((uses[uses >= 0], step[uses >= 0]))
    if not any(len(uses) for uses, _ in found):
        return Needs(0, 0, 0)
    uses, step = (np.concatenate(parts) for parts in zip(*found, strict=True))
    by_use = np.argsort(uses, kind="stable")  # steps rise within a use
    uses, step = uses[by_use], step[by_use]
    begins = np.flatnonzero(np.diff(uses, prepend=-1))
    ends = np.append(begins[1:], len(uses)) - 1
    sizes = schedule.fragments.num_bytes[uses[begins] % schedule.num_fragments]
    live = np.zeros(steps + 1, np.int64)
    np.add.at(live, step[begins], sizes)
    np.subtract.at(live, step[ends] + 1, sizes)
    return Needs(len(begins), int(sizes.sum()), int(np.cumsum(live).max()))


def least_cache_bytes(stream: Stream, nodes: int, fragments: Fragments) -> int:
    """A budget with which a node never waits for itself, whatever the epoch, and fetches what it needs once.

    In a lane, the fragments of one window are needed at once, or, where a step lies in two of them, those of its slots;
    beside them one at each end that the next window shares, those that lanes share, and those of an epoch's seam. The
    lanes of a mix are not those of its datasets, so a node has some of all.
    """
    bounds = []
    for mix in mixes_of(stream):
        bound = 0
        for part, order, _ in parts_of(mix):
            own, lanes = fragments.of_part(part), order.settings.lanes
            num_bytes = fragments.num_bytes[own]
            lanes_here = lanes // nodes if len(mix.parts) == 1 else lanes
            rows = min(order.window, -(-order.num_samples // lanes))
            in_windows = _densest(num_bytes, fragments.sizes[own], rows * lanes_here)
            slots = -(-stream.global_batch // nodes) + lanes
            in_step = int(np.sort(num_bytes)[::-1][:slots].sum())
            shifted = int(fragments.num_bytes[fragments.shifted(part)].sum())
            bound += max(in_windows, in_step) + (2 * lanes_here + lanes) * int(num_bytes.max()) + shifted
        bounds.append(bound)
    return min(max(bounds), int(fragments.num_bytes.sum()))


def _densest(num_bytes: Ints, sizes: Ints, samples: int) -> int:
    """The most bytes that so many samples in whole fragments can have."""
    by_density = np.argsort(-num_bytes / sizes)
    held = np.cumsum(sizes[by_density])
    return int(num_bytes[by_density][: np.searchsorted(held, samples) + 1].sum())


def require_lanes(lanes: int, global_batch: int, nodes: int, world_size: int) -> None:
    """Require that each node has whole lanes, so that it fetches its own part of the dataset alone.

    Raises:
        ConfigError: values that would do are named.
    """
    if global_batch % lanes == 0 and lanes % nodes == 0 and world_size % nodes == 0:
        return
    if world_size % nodes:
        raise ConfigError(
            f"{world_size} processes on {nodes} nodes: nodes that read remote shards have equally many; start as many on each"
        )
    fitting = [d for d in divisors(global_batch) if d % nodes == 0]
    change = (
        f"order.lanes may be {', '.join(map(str, fitting))}"
        if fitting
        else f"no order.lanes does; nodes may be {', '.join(map(str, divisors(global_batch)))}"
    )
    if lanes % nodes == 0:
        near = max(1, round(global_batch / lanes)) * lanes
        change += f", or train.global_batch a multiple of {lanes}, such as {near}"
    raise ConfigError(
        f"order.lanes is {lanes}, train.global_batch {global_batch}, nodes {nodes}: with remote shards the lanes divide the "
        f"global batch and the nodes divide the lanes, so that each node fetches its own part only; {change}"
    )
