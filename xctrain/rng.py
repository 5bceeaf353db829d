"""The generators of one rank, as plain values: nothing to unpickle."""

import base64
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """State of this process's generators: python, numpy, torch and its current GPU."""
    version, words, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    state = {
        "python": [version, list(words), gauss],
        "numpy": {**legacy, "state": {"key": legacy["state"]["key"].tolist(), "pos": legacy["state"]["pos"]}},
        "torch": _text(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        state["cuda"] = _text(torch.cuda.get_rng_state())
    return state


def restore(state: Mapping[str, Any]) -> None:
    """Put every generator back; what a checkpoint lacks raises KeyError rather than going on with other numbers."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    saved = state["numpy"]
    key = np.array(saved["state"]["key"], dtype=np.uint32)
    np.random.set_state({**saved, "state": {"key": key, "pos": saved["state"]["pos"]}})
    torch.set_rng_state(_tensor(state["torch"]))
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def seed_all(seed: int) -> None:
    """Start every generator from one number in 0 .. 2**64 - 1."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
