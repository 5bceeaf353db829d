"""What a run over a split will do, and what it would refuse, said before anything is read."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shards.errors import ConfigError, counted
from shards.mix import Mix, Part
from shards.order import Order, OrderSettings
from shards.schedule import Fragments, Node, Schedule, least_cache_bytes, needs, require_lanes
from shards.stream import Stream, accumulation, possible_world_sizes

_MEASURED_SAMPLES = 5_000_000  # slots that are worked out; beyond it one node stands for all, as they are alike
MEASURED_BATCHES = 100  # enough for a mean within about a percent; a batch costs about a millisecond


@dataclass(frozen=True)
class Machines:
    """What reads the split, if it lies at an address.

    fragments   of the split
    list_bytes  of its indexes and sample lists
    nodes       that share the processes equally
    cache_gb    of each; None if it is not known yet
    """

    fragments: Fragments
    list_bytes: int
    nodes: int
    cache_gb: float | None


@dataclass(frozen=True)
class Plan:
    """The facts of a plan by name, and the sentences for what would be refused and what to know."""

    facts: dict[str, Any]
    refusals: tuple[str, ...]
    notes: tuple[str, ...]


def make_plan(
    shard_sizes: Sequence[int],
    settings: OrderSettings,
    global_batch: int,
    micro_batch: int,
    gpus: int,
    workers: int,
    machines: Machines | None = None,
) -> Plan:
    """Order, steps, mixing and refusals for one split; with ``machines``, what each node would fetch and hold of it."""
    order = Order(shard_sizes, settings)
    stream = Stream(order, global_batch)
    num_steps = stream.num_steps(1)
    lengths = [order.lane_span(lane)[1] for lane in range(settings.lanes)]
    refusals = []
    try:
        micro_batches: int | None = accumulation(global_batch, gpus, micro_batch)
    except ConfigError as error:
        micro_batches = None
        refusals.append(str(error))
    facts = {
        "samples": order.num_samples,
        "shards": len(shard_sizes),
        "fragments": len(order.fragment_starts),
        "lanes": settings.lanes,
        "samples per lane": max(lengths),
        "windows per lane": max(1, math.ceil(max(lengths) / order.window)),
        "global batch": global_batch,
        "possible GPU counts": possible_world_sizes(global_batch, micro_batch),
        "GPUs": gpus,
        "micro-batches per GPU and step": micro_batches,
        "loader workers in all": gpus * workers,
        "steps per epoch": order.num_samples / global_batch,
        "steps for one epoch": num_steps,
        "surplus slots of its last step": num_steps * global_batch - order.num_samples,
        "mixing": mixing(stream, shard_sizes),
    }
    if machines is None:
        return Plan(facts, tuple(refusals), tuple(_notes(order, global_batch)))
    run = Stream(Mix([Part(tuple(shard_sizes))], settings), global_batch, order.num_samples)
    refusals += _refusals_of(machines, run, settings.lanes, gpus)
    if not refusals or (micro_batches and gpus % machines.nodes == 0 and settings.lanes % machines.nodes == 0):
        facts |= _of_nodes(machines, run, order, gpus, workers)
    return Plan(facts, tuple(refusals), tuple(_notes(order, global_batch)))


def _refusals_of(machines: Machines, run: Stream, lanes: int, gpus: int) -> list[str]:
    try:
        require_lanes(lanes, run.global_batch, machines.nodes, gpus)
    except ConfigError as error:
        return [str(error)]
    least = least_gb(machines, run)
    if machines.cache_gb is None or machines.cache_gb >= least:
        return []
    return [f"data.cache_gb ({machines.cache_gb:g}) is below what a node needs, {least:g}; give that or more"]


def least_gb(machines: Machines, run: Stream) -> float:
    """The least data.cache_gb, in whole MB."""
    least = least_cache_bytes(run, machines.nodes, machines.fragments) + machines.list_bytes
    return -(-least // 10**6) / 1000


def _of_nodes(machines: Machines, run: Stream, order: Order, gpus: int, workers: int) -> dict[str, Any]:
    """What each node fetches in the first epoch, and the most that it needs at once."""
    nodes, num_bytes = machines.nodes, int(machines.fragments.num_bytes.sum())
    measured = range(nodes) if nodes * order.num_samples <= _MEASURED_SAMPLES else [0]
    found = [
        needs(Schedule(run, Node.of(number, nodes, gpus), machines.fragments), 0, order.num_samples)
        for number in measured
    ]
    fetched = sum(n.num_bytes for n in found) * nodes // len(found)
    held = 0 if machines.cache_gb is None else machines.cache_gb * 1e9 - machines.list_bytes
    return {
        "nodes": nodes,
        "loader workers per node": gpus // nodes * workers,
        "each node": {
            "fetches an epoch": max(n.fetches for n in found),
            "GB an epoch": max(n.num_bytes for n in found) / 1e9,
            "GB of a window": num_bytes
            * min(1.0, order.window * order.settings.lanes / order.num_samples)
            / nodes
            / 1e9,
            "most GB needed at once": max(n.most_live_bytes for n in found) / 1e9,
            "least data.cache_gb": least_gb(machines, run),
            "keeps all, so that later epochs fetch only what is new to it": held >= num_bytes,
        },
        "fetched by all nodes over the split's size": fetched / num_bytes,
    }


def _notes(order: Order, global_batch: int) -> list[str]:
    lanes = order.settings.lanes
    notes = []
    if global_batch % lanes:
        fitting = [count for count in range(1, 65) if global_batch % count == 0]
        notes.append(
            f"order.lanes ({lanes}) does not divide the global batch ({global_batch}): fine for local shards, "
            f"refused for remote ones, which take {', '.join(map(str, fitting))}"
        )
    if global_batch > order.num_samples:
        notes.append(
            f"the global batch ({global_batch}) is larger than the split ({order.num_samples}): "
            "a step holds samples more than once"
        )
    if len(order.fragment_starts) < 2 * lanes:
        notes.append(
            f"there are only {counted(len(order.fragment_starts), 'fragment')} for {counted(lanes, 'lane')}, so "
            "epochs are mixed little; a smaller order.fragment mixes better"
        )
    notes.append("any number of workers works, as processes share samples, not shards")
    return notes


def mixing(stream: Stream, shard_sizes: Sequence[int]) -> dict[str, float]:
    """Mean number of distinct shards in a global batch of the first epoch, against a random permutation's."""
    ends = np.cumsum(np.asarray(shard_sizes))
    whole = max(1, stream.num_positions(1) // stream.global_batch)
    spread = np.unique(np.linspace(0, whole - 1, MEASURED_BATCHES).astype(np.int64)).tolist()
    first = list(range(min(20, whole)))

    def mean_distinct(steps: Sequence[int]) -> float:
        counts = []
        for step in steps:
            ns = np.arange(step * stream.global_batch, (step + 1) * stream.global_batch)
            counts.append(len(np.unique(np.searchsorted(ends, stream.order.places(ns).index, side="right"))))
        return float(np.mean(counts))

    ideal = distinct_if_random(shard_sizes, stream.global_batch)
    found, early = mean_distinct(spread), mean_distinct(first)
    return {
        "distinct shards per global batch": found,
        "in the first 20 batches": early,
        "of a random permutation": ideal,
        "ratio": found / ideal,
    }


def distinct_if_random(shard_sizes: Sequence[int], drawn: int) -> float:
    """Expected number of distinct shards among ``drawn`` samples drawn without putting back."""
    total = sum(shard_sizes)
    if drawn >= total:
        return float(sum(1 for size in shard_sizes if size))

    def log_ways(n: int) -> float:  # of drawing all of them from n, up to a constant
        return math.lgamma(n + 1) - math.lgamma(n - drawn + 1)

    return sum(
        1.0 if total - size < drawn else -math.expm1(log_ways(total - size) - log_ways(total))
        for size in shard_sizes
        if size
    )
