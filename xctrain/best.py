"""Which checkpoints are kept: the newest, and the best by a score of the held-out split. Pure functions."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

Metric = Literal["loss", "bleu1", "bleu2", "bleu3", "bleu4", "cider", "rouge_l"]
Scores = Mapping[str, Any]  # as evaluate.as_event gives them; empty where a checkpoint was not scored

_HOW = ("split", "source", "num_images")  # scores of other images are not compared


def best_step(scores: Mapping[int, Scores], metric: Metric | None) -> int | None:
    """The step with the best score, of equal ones the earliest; None where there is none.

    Lowest is best of a loss, highest of all else. A score that is absent or not finite is none. Compared are scores that
    were made on the same images as the newest.
    """
    values = {step: found for step in sorted(scores) if (found := _value(scores[step], metric)) is not None}
    if not values:
        return None
    images = scored_images(scores[max(values)])
    comparable = [step for step in values if scored_images(scores[step]) == images]
    return min(comparable, key=lambda step: values[step] if metric == "loss" else -values[step])


def _value(scores: Scores, metric: Metric | None) -> float | None:
    value = scores.get(metric) if metric else None
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def scored_images(scores: Scores) -> tuple[Any, ...]:
    """Which images a score was made on, as far as it says."""
    return tuple(scores.get(name) for name in _HOW)


def kept_steps(
    steps: Iterable[int], saved: int, keep: int, scores: Mapping[int, Scores], metric: Metric | None
) -> set[int]:
    """The newest ``keep`` up to the step just saved, and the best of these steps; higher ones are of a past that was
    gone back on.
    """
    valid = sorted((step for step in steps if step <= saved), reverse=True)
    best = best_step({step: scores[step] for step in valid if step in scores}, metric)
    return {*valid[:keep], *({best} if best is not None else ())}
