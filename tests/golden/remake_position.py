"""Writes position-v1.json anew: python tests/golden/remake_position.py. A difference is a break, see CHANGELOG.md."""

import json
from pathlib import Path

from xctrain.state import Masked, Segment, TrainState

HERE = Path(__file__).parent


def golden_state() -> TrainState:
    """A run with a skipped batch, a damaged sample and a second segment."""
    first = Segment(0, 0, 0, 100, 12, "8f" * 16, "train", seed=7, fragment=32, window=16384, lanes=8)
    second = Segment(204, 16, 2, 100, 24, "8f" * 16, "train", seed=2**62, fragment=32, window=64, lanes=4)
    masked = (
        *(Masked(n, f"{n:012d}", "not_finite") for n in range(12, 24)),
        Masked(150, "000000000150", "damaged: crc"),
    )
    return TrainState(
        step=20,
        samples_consumed=300,
        digest=2**64 - 3,
        masked=masked,
        segments=(first, second),
        keys_from=0,
        skips_in_a_row=1,
    )


if __name__ == "__main__":
    (HERE / "position-v1.json").write_text(json.dumps(golden_state().to_json(), indent=1) + "\n", encoding="utf-8")
