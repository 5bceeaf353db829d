"""What a run trained on, epoch by epoch."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import runs

from shards.reader import SplitReader
from xctrain import audit, trained


def by_epoch(run: Path, bounds: list[int]) -> list[Counter[str]]:
    """Keys that were trained on between positions, how often each."""
    slots = [slot for step in runs.keys_by_step(run).values() for slot in step]
    return [Counter(key for n, key in slots if start <= n < stop) for start, stop in pairwise(bounds)]


def keys_of(shards: Path) -> list[str]:
    return SplitReader(shards, "train").keys()


def once(keys: list[str]) -> Counter[str]:
    return Counter(keys)


def batch_keys(run: Path, step: int) -> list[tuple[int, str]]:
    """What `xctrain batch` says of a step."""
    return sorted((row["n"], row["key"]) for row in audit.batch_of_step(trained.open_run(run), step))
