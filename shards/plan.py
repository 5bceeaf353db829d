"""What a run over a split will do, and what it would refuse, said before anything is read."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shards.errors import ConfigError, counted
from shards.order import Order, OrderSettings
from shards.stream import Stream, accumulation, possible_world_sizes

MEASURED_BATCHES = 100  # enough for a mean within about a percent; a batch costs about a millisecond


@dataclass(frozen=True)
class Plan:
    """The facts of a plan by name, and the sentences for what would be refused and what to know."""

    facts: dict[str, Any]
    refusals: tuple[str, ...]
    notes: tuple[str, ...]


def make_plan(
    shard_sizes: Sequence[int], settings: OrderSettings, global_batch: int, micro_batch: int, gpus: int, workers: int
) -> Plan:
    """Order, steps, mixing and refusals for one split."""
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
    return Plan(facts, tuple(refusals), tuple(_notes(order, global_batch)))


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
