"""Which of an image's captions a slot trains on."""

from collections.abc import Sequence
from typing import Literal

from shards.hashing import mix64, text64

CaptionChoice = Literal["random", "first", "all"]


def choose_captions(
    captions: Sequence[str], choice: CaptionChoice, *, seed: int, epoch: int, key: str
) -> tuple[str, ...]:
    """The captions an image trains on in one epoch: a pure function, so workers and resume cannot change it.

    ``random`` begins at a caption drawn from (seed, key) and takes the next one each epoch, so that k epochs see all k.
    """
    if choice == "all":
        return tuple(captions)
    if choice == "first":
        return (captions[0],)
    return (captions[(mix64(seed, text64(key)) + epoch) % len(captions)],)
