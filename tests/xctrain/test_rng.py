"""The generators of one rank."""

import json
import random

import numpy as np
import pytest
import torch

from xctrain import rng


def draw() -> tuple[float, float, float, float, list[float]]:
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal(), torch.randn(3).tolist()


def test_restored_generators_go_on_with_the_same_numbers() -> None:
    rng.seed_all(7)
    random.gauss(0, 1)  # leaves a second number behind, which belongs to the state
    np.random.normal()
    state = json.loads(json.dumps(rng.capture()))
    expected = [draw() for _ in range(3)]
    rng.seed_all(8)
    rng.restore(state)
    assert [draw() for _ in range(3)] == expected


def test_seed_decides_every_generator() -> None:
    rng.seed_all(2**64 - 1)
    first = draw()
    rng.seed_all(2**64 - 1)
    assert draw() == first
    rng.seed_all(3)
    assert not set(map(str, draw())) & set(map(str, first))


@pytest.mark.parametrize("name", ["python", "numpy", "torch"])
def test_missing_generator_is_an_error_and_not_other_numbers(name: str) -> None:
    state = rng.capture()
    del state[name]
    with pytest.raises(KeyError, match=name):
        rng.restore(state)
