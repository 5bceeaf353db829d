"""Writes position-v1*.json anew: python tests/golden/remake_position.py. A difference is a break, see CHANGELOG.md."""

import json
from dataclasses import replace
from pathlib import Path

from xctrain.state import Masked, Segment, Source, TrainState

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


def golden_mix() -> TrainState:
    """A run of a mix without some samples, whose data are others from the next epoch on."""
    coco = Source("coco", "8f" * 16, 98, quarantine_id="7a" * 16, left_out=(3, 44))
    own = Source("own", "9d" * 16, 14, repeat=3)
    first = Segment(0, 0, 0, 140, 12, "5e" * 16, "train", seed=7, fragment=32, window=64, lanes=4)
    first = replace(first, quarantine_id="6b" * 16, sources=(coco, own))
    ahead = replace(first, first_n=140, first_step=11, first_epoch=1, num_samples=158, base_n=140, base_epoch=1)
    ahead = replace(ahead, batches_from=0, sources=(coco, replace(own, manifest_id="1c" * 16, num_samples=20)))
    return TrainState(step=5, samples_consumed=60, digest=17, segments=(first, ahead), keys_from=0)


if __name__ == "__main__":
    for name, state in (("position-v1", golden_state()), ("position-v1-mix", golden_mix())):
        (HERE / f"{name}.json").write_text(json.dumps(state.to_json(), indent=1) + "\n", encoding="utf-8")
