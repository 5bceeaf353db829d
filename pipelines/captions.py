"""Raw captions to clean ones."""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipelines.config import FilterConfig

_NO_LIMITS = FilterConfig()
# Control characters and lone surrogates: neither survives tokenizers and UTF-8, so both count as white space.
_BLANKED = {"Cc", "Cs"}


@dataclass(frozen=True)
class CleanCaptions:
    """What is left of one record's captions, and why the rest is not."""

    captions: tuple[str, ...]
    counts: Counter[str] = field(
        default_factory=Counter
    )  # changed, empty, duplicate, not_text, too_short, too_long, script


def clean_captions(raw: Sequence[object], limits: FilterConfig = _NO_LIMITS) -> CleanCaptions:
    """Captions in NFC, white space collapsed; without empty ones, pure punctuation, repeats, what is no text, and what
    the limits on length and script leave out.
    """
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
        elif fault := _fault(text, limits):
            counts[fault] += 1
        else:
            counts["changed"] += text != caption
            kept[text] = None
    return CleanCaptions(tuple(kept), +counts)


def _fault(text: str, limits: FilterConfig) -> str | None:
    for size, least, most in (
        (len(text.split()), limits.min_caption_words, limits.max_caption_words),
        (len(text), limits.min_caption_chars, limits.max_caption_chars),
    ):
        if least is not None and size < least:
            return "too_short"
        if most is not None and size > most:
            return "too_long"
    if limits.caption_scripts and script_share(text, limits.caption_scripts) < limits.caption_script_share:
        return "script"
    return None


def script_share(text: str, scripts: Sequence[str]) -> float:
    """Share of the letters whose Unicode name begins with one of these words, as in LATIN SMALL LETTER A; 1 of none."""
    letters = [unicodedata.name(c, "").partition(" ")[0] in scripts for c in text if c.isalpha()]
    return sum(letters) / len(letters) if letters else 1.0


def normalise(text: str) -> str:
    """NFC, and every run of white space (line breaks and U+2028 too) as one space."""
    if not text.isascii() or not text.isprintable():
        text = "".join(" " if unicodedata.category(c) in _BLANKED else c for c in text)
        text = unicodedata.normalize("NFC", text)
    return " ".join(text.split())


def says_something(text: str) -> bool:
    """Whether there is a letter, a digit or a picture sign (emoji); punctuation alone teaches nothing."""
    return any(c.isalnum() or unicodedata.category(c) == "So" for c in text)
