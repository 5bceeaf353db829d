"""What a shard's statistics count while it is built; the report adds them up."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from pipelines import vocabulary
from pipelines.measure import Picture

Stats = dict[str, Counter[str]]
WORDS, HASHES = "words", "word_hashes"  # statistics that become the vocabulary


def count_captions(stats: Stats, record: Mapping[str, Any]) -> None:
    """Add what was done to a record's captions, kept or rejected, to a shard's statistics."""
    stats.setdefault("caption_cleaning", Counter()).update(record["caption_counts"])


def count(stats: Stats, record: Mapping[str, Any], picture: Picture) -> None:
    """Add one kept sample to a shard's statistics."""
    captions = record["captions"]
    for name, value in (
        ("modes", picture.mode),
        ("extensions", picture.extension),
        ("width_px", picture.measured.width),
        ("height_px", picture.measured.height),
        ("size_kb", round(len(picture.data) / 1000)),
        ("captions_per_image", len(captions)),
    ):
        of(stats, name)[str(value)] += 1
    of(stats, "flags").update(picture.flags)
    for caption in captions:
        of(stats, "words_per_caption")[str(len(caption.split()))] += 1
        of(stats, WORDS).update(vocabulary.words(caption))


def of(stats: Stats, name: str) -> Counter[str]:
    """The counts of one kind; empty at first."""
    return stats[name] if name in stats else stats.setdefault(name, Counter())


def remembered(stats: Stats) -> dict[str, dict[str, int]]:
    """A shard's statistics as they are kept: of its words only as much as ``vocabulary`` needs."""
    kept = {name: dict(counts) for name, counts in stats.items()}
    if WORDS in stats:
        kept[WORDS], kept[HASHES] = vocabulary.compact(stats[WORDS])
    return kept
