"""Raw captions to clean ones."""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

# Control characters and lone surrogates: neither survives tokenizers and UTF-8, so both count as white space.
_BLANKED = {"Cc", "Cs"}


@dataclass(frozen=True)
class CleanCaptions:
    """What is left of one record's captions, and why the rest is not."""

    captions: tuple[str, ...]
    counts: Counter[str] = field(default_factory=Counter)  # changed, empty, duplicate, not_text


def clean_captions(raw: Sequence[object]) -> CleanCaptions:
    """Captions in NFC, white space collapsed; without empty ones, pure punctuation, repeats and what is no text."""
    kept: dict[str, None] = {}
    counts: Counter[str] = Counter()
    for caption in raw:
        if not isinstance(caption, str):
            counts["not_text"] += 1
            continue
        text = normalise(caption)
        if not says_something(text):
            counts["empty"] += 1
        elif text in kept:
            counts["duplicate"] += 1
        else:
            counts["changed"] += text != caption
            kept[text] = None
    return CleanCaptions(tuple(kept), +counts)


def normalise(text: str) -> str:
    """NFC, and every run of white space (line breaks and U+2028 too) as one space."""
    if not text.isascii() or not text.isprintable():
        text = "".join(" " if unicodedata.category(c) in _BLANKED else c for c in text)
        text = unicodedata.normalize("NFC", text)
    return " ".join(text.split())


def says_something(text: str) -> bool:
    """Whether there is a letter, a digit or a picture sign (emoji); punctuation alone teaches nothing."""
    return any(c.isalnum() or unicodedata.category(c) == "So" for c in text)
