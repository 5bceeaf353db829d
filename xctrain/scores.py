"""Caption scores as pure functions: BLEU-1 to BLEU-4, CIDEr and ROUGE-L on Penn Treebank words, as the COCO caption
evaluation (pycocoevalcap 1.2) gives them, without Java. Scales are those of that program: 0 to 1, CIDEr 0 to 10.

Sources: BLEU from Papineni et al. 2002; CIDEr from Vedantam et al. 2015, in its form D, which "CIDEr" stands for in
published COCO results; ROUGE-L from Lin 2004. ``tests/xctrain/test_scores.py`` holds them to that program's numbers.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from shards.errors import UserError
from xctrain.ptb import tokenize

Words = list[str]
NGrams = tuple[Counter[str], ...]  # of 1, 2, 3 and 4 words; the words joined by a blank
T = TypeVar("T")

NUM_ORDERS = 4
MIN_IMAGES = 50  # fewer reference images make CIDEr's inverse document frequencies meaningless
LENGTH_RATIOS = (0.8, 1.25)  # outside of these, caption length rather than content decides BLEU and CIDEr


class ScoreError(UserError):
    """Predictions and references that do not belong together."""


@dataclass(frozen=True)
class Scores:
    """What a set of predictions is worth. ``cider`` is None where it is not defined; ``warnings`` then says why."""

    num_images: int
    bleu1: float
    bleu2: float
    bleu3: float
    bleu4: float
    cider: float | None
    rouge_l: float
    length_ratio: float
    warnings: tuple[str, ...] = ()


def score_captions(
    predictions: Mapping[str, str] | Mapping[int, str],
    references: Mapping[str, Sequence[str]] | Mapping[int, Sequence[str]],
    missing: Literal["error", "ignore"] = "error",
) -> Scores:
    """Scores of one predicted caption an image against its reference captions.

    Ids may be numbers or text, leading zeros do not count: 391895 is "000000391895". With ``missing="ignore"`` only
    images that have both are scored, and a warning counts the others. The order of ``references`` is that of the images:
    it decides, as in pycocoevalcap, how a last single letter is cut (see ``ptb.tokenize``).

    Raises:
        ScoreError: no image to score, an image without a reference, one id twice, or ids that differ and are not ignored.
    """
    predicted, referred = _by_id(predictions, "predictions"), _by_id(references, "references")
    warnings = _compare_ids(predicted, referred, missing)
    ids = [i for i in referred if i in predicted]
    if not ids:
        raise ScoreError("there is no image to score; give at least one id that has a prediction and references")
    for image_id in ids:
        if isinstance(referred[image_id], str) or not any(caption.strip() for caption in referred[image_id]):
            raise ScoreError(f"{image_id}: has no reference caption; leave it out or give it one", key=image_id)
    hypotheses = tokenize([predicted[i] for i in ids])
    words = iter(tokenize([caption for i in ids for caption in referred[i]]))
    reference_words = [[next(words) for _ in referred[i]] for i in ids]
    hypothesis_ngrams = [count_ngrams(h) for h in hypotheses]
    reference_ngrams = [[count_ngrams(r) for r in rs] for rs in reference_words]

    (bleu1, bleu2, bleu3, bleu4), ratio = bleu(hypothesis_ngrams, reference_ngrams)
    cider = cider_d(hypothesis_ngrams, reference_ngrams)
    return Scores(
        num_images=len(ids),
        bleu1=bleu1,
        bleu2=bleu2,
        bleu3=bleu3,
        bleu4=bleu4,
        cider=cider,
        rouge_l=rouge_l(hypotheses, reference_words),
        length_ratio=ratio,
        warnings=(*warnings, *_doubts(hypotheses, cider, ratio)),
    )


def count_ngrams(words: Words) -> NGrams:
    """How often each run of 1 to 4 words stands in a caption. Words with a no-break space ("2 1/2") are two here."""
    words = " ".join(words).split()
    return tuple(
        Counter(words if n == 1 else map(" ".join, zip(*(words[i:] for i in range(n)), strict=False)))
        for n in range(1, NUM_ORDERS + 1)
    )


def bleu(hypotheses: Sequence[NGrams], references: Sequence[Sequence[NGrams]]) -> tuple[list[float], float]:
    """BLEU-1 to BLEU-4 of the whole corpus, and its length divided by the length of the closest references.

    The reference length of an image is that of the reference closest in length, the shorter one on a tie. The two small
    constants are pycocoevalcap's: they keep a corpus without any match just above 0.
    """
    tiny, small = 1e-15, 1e-9
    length = reference_length = 0
    matches, totals = [0] * NUM_ORDERS, [0] * NUM_ORDERS
    for hypothesis, refs in zip(hypotheses, references, strict=True):
        size = hypothesis[0].total()
        length += size
        reference_length += min((abs(r[0].total() - size), r[0].total()) for r in refs)[1]
        for n, counts in enumerate(hypothesis):
            totals[n] += max(0, size - n)
            matches[n] += sum(min(c, max(r[n][gram] for r in refs)) for gram, c in counts.items())
    ratio = (length + tiny) / (reference_length + small)
    penalty = 1.0 if ratio >= 1 else math.exp(1 - 1 / ratio)
    precisions = [(m + tiny) / (t + small) for m, t in zip(matches, totals, strict=True)]
    return [math.prod(precisions[:n]) ** (1 / n) * penalty for n in range(1, NUM_ORDERS + 1)], ratio


def cider_d(hypotheses: Sequence[NGrams], references: Sequence[Sequence[NGrams]]) -> float | None:
    """CIDEr-D of the whole corpus, or None where no n-gram tells one image's references from another's.

    Each n-gram weighs its count times log(images / images whose references have it). The similarity is a cosine with the
    hypothesis's weights cut to the reference's, times a Gaussian of the difference in length; it is averaged over
    n = 1..4, references and images, times 10. A caption's length is its number of bigrams, as in pycocoevalcap.
    """
    sigma = 6.0
    frequencies = [
        Counter(g for refs in references for g in {g for r in refs for g in r[n]}) for n in range(NUM_ORDERS)
    ]
    log_images = math.log(len(references))
    idfs = [{gram: log_images - math.log(count) for gram, count in f.items()} for f in frequencies]
    if not any(value > 0 for idf in idfs for value in idf.values()):
        return None

    def norm(counts: Counter[str], idf: Mapping[str, float]) -> float:
        return math.sqrt(sum((c * idf.get(gram, log_images)) ** 2 for gram, c in counts.items()))

    total = 0.0
    for hypothesis, refs in zip(hypotheses, references, strict=True):
        norms = [norm(counts, idf) for counts, idf in zip(hypothesis, idfs, strict=True)]
        similarity = 0.0
        for reference in refs:
            damping = math.exp(-((hypothesis[1].total() - reference[1].total()) ** 2) / (2 * sigma**2))
            for n, idf in enumerate(idfs):
                theirs = reference[n]
                dot = sum(min(c, theirs[g]) * theirs[g] * idf[g] ** 2 for g, c in hypothesis[n].items() if g in theirs)
                if dot:
                    similarity += damping * dot / (norms[n] * norm(theirs, idf))
        total += similarity / len(refs)
    return 10 * total / (NUM_ORDERS * len(references))


def rouge_l(hypotheses: Sequence[Words], references: Sequence[Sequence[Words]]) -> float:
    """ROUGE-L, averaged over the images: F with beta 1.2 of the best precision and the best recall over all references."""
    beta_squared = 1.2**2
    total = 0.0
    for hypothesis, refs in zip(hypotheses, references, strict=True):
        commons = [longest_common_subsequence(hypothesis, r) for r in refs]
        if any(commons):
            precision = max(commons) / len(hypothesis)
            recall = max(c / len(r) for c, r in zip(commons, refs, strict=True) if r)
            total += (1 + beta_squared) * precision * recall / (recall + beta_squared * precision)
    return total / len(hypotheses)


def longest_common_subsequence(a: Words, b: Words) -> int:
    """The most words that stand in both in the same order, by one bit operation a word (Hyyrö 2004).

    Bit i of ``row`` is 0 where word i of ``a`` ends a longer common subsequence with the words of ``b`` so far.
    """
    places: dict[str, int] = {}
    for i, word in enumerate(a):
        places[word] = places.get(word, 0) | 1 << i
    full = (1 << len(a)) - 1
    row = full
    for word in b:
        hits = row & places.get(word, 0)
        row = (row + hits) | (row - hits)
    return len(a) - (row & full).bit_count()


def _by_id(captions: Mapping[str, T] | Mapping[int, T], name: str) -> dict[str, T]:
    by_id: dict[str, T] = {}
    for key, value in captions.items():
        image_id = _plain_id(key)
        if image_id in by_id:
            raise ScoreError(
                f"{name}: hold {key!r} twice, as text and number or with other zeros; keep one", key=image_id
            )
        by_id[image_id] = value
    return by_id


def _plain_id(key: str | int) -> str:
    text = str(key).strip()
    return text.lstrip("0") or "0" if text.isdecimal() else text


def _compare_ids(predicted: Iterable[str], referred: Iterable[str], missing: str) -> list[str]:
    """Warnings about ids that only one side has."""
    if missing not in ("error", "ignore"):
        raise ValueError(f"missing is {missing!r}, expected 'error' or 'ignore'")
    known, wanted = set(predicted), set(referred)
    lacking, extra = [i for i in referred if i not in known], [i for i in predicted if i not in wanted]
    if not lacking and not extra:
        return []
    found = " and ".join(
        f"{len(ids)} {what} ({', '.join(ids[:5])}{', ...' if len(ids) > 5 else ''})"
        for ids, what in (
            (lacking, "images without a prediction"),
            (extra, "predictions for images without references"),
        )
        if ids
    )
    if missing == "error":
        raise ScoreError(
            f"predictions are for {len(known)} images, references for {len(wanted)}: {found}; are both of the same split? "
            "missing='ignore' scores only the images that have both"
        )
    return [f"not scored: {found}"]


def _doubts(hypotheses: Sequence[Words], cider: float | None, ratio: float) -> list[str]:
    """What a reader of the scores has to know."""
    num_images, num_empty = len(hypotheses), sum(not words for words in hypotheses)
    images = "1 image" if num_images == 1 else f"{num_images} images"
    doubts = []
    if cider is None:
        doubts.append(f"CIDEr is not defined for {images}: no word tells one image's references from another's")
    elif num_images < MIN_IMAGES:
        doubts.append(
            f"CIDEr of {images} is not comparable with published ones: its word weights need {MIN_IMAGES} or more"
        )
    if num_empty:
        doubts.append(f"{num_empty} of {images}: the predicted caption has no words")
    if not LENGTH_RATIOS[0] <= ratio <= LENGTH_RATIOS[1]:
        kind = "short" if ratio < 1 else "long"
        doubts.append(
            f"captions are too {kind}: {ratio:.2f} times the references' words; BLEU and CIDEr mostly measure that"
        )
    return doubts
