"""Caption scores: the numbers of pycocoevalcap, and clear words where a number would mislead."""

import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xctrain.scores import ScoreError, Scores, longest_common_subsequence, score_captions

SHARED = Path(__file__).parents[2] / "../shared/caption-metrics"
FIELDS = {
    "BLEU-1": "bleu1",
    "BLEU-2": "bleu2",
    "BLEU-3": "bleu3",
    "BLEU-4": "bleu4",
    "CIDEr": "cider",
    "ROUGE-L": "rouge_l",
}
COLOURS = ("red", "green", "blue", "black", "white", "grey", "pink", "brown", "gold", "purple")
THINGS = ("dog", "cat", "bus", "train", "kite", "horse", "boat", "plate", "clock", "bench")


def read(name: str) -> Any:
    if not SHARED.exists():
        pytest.skip("needs the COCO captions in a folder `shared` beside the checkout")
    return json.loads((SHARED / name).read_text(encoding="utf-8"))


def coco_references() -> dict[int, list[str]]:
    captions: dict[int, list[str]] = {}
    for annotation in read("captions_val2017.json")["annotations"]:
        captions.setdefault(annotation["image_id"], []).append(annotation["caption"])
    return captions


def assert_expected(scores: Scores, name: str) -> None:
    expected = next(values for key, values in read("expected.json").items() if key.startswith(name))
    assert {k: getattr(scores, f) for k, f in FIELDS.items()} == pytest.approx(
        {k: expected[k] for k in FIELDS}, rel=1e-6, abs=0
    )


def hundred_images() -> dict[str, list[str]]:
    return {
        f"{i:012d}": [
            f"a {COLOURS[i // 10]} {THINGS[i % 10]} on a street",
            f"one {THINGS[i % 10]} in the day light outside",
        ]
        for i in range(100)
    }


def test_a_public_results_file_scores_as_in_pycocoevalcap() -> None:
    predictions = {r["image_id"]: r["caption"] for r in read("captions_val2017_fakecap_results.json")}
    scores = score_captions(predictions, coco_references(), missing="ignore")
    assert scores.num_images == 4989
    assert scores.warnings[0].startswith("not scored: 11 images without a prediction (")
    assert_expected(scores, "fakecap")


def test_first_captions_score_against_the_others_as_in_pycocoevalcap() -> None:
    captions = coco_references()
    scores = score_captions({i: c[0] for i, c in captions.items()}, {i: c[1:] for i, c in captions.items()})
    assert_expected(scores, "first caption")
    assert scores.warnings == ()


def test_predictions_equal_to_references_have_bleu_and_rouge_1() -> None:
    references = hundred_images()
    scores = score_captions({i: captions[1] for i, captions in references.items()}, references)
    assert scores.num_images == 100
    assert [scores.bleu1, scores.bleu2, scores.bleu3, scores.bleu4] == pytest.approx([1.0] * 4)
    assert scores.rouge_l == pytest.approx(1)
    assert scores.length_ratio == pytest.approx(1)
    assert scores.cider is not None
    assert scores.cider > 1
    assert scores.warnings == ()


def test_cider_of_one_image_is_not_a_number_but_a_reason() -> None:
    scores = score_captions({1: "a dog runs on grass"}, {1: ["a dog runs on grass", "a dog"]})
    assert scores.cider is None
    assert scores.warnings == ("CIDEr is not defined for 1 image: no word tells one image's references from another's",)


def test_cider_of_few_images_comes_with_a_warning() -> None:
    references = dict(list(hundred_images().items())[:49])
    scores = score_captions({i: c[0] for i, c in references.items()}, references)
    assert scores.cider is not None
    assert scores.warnings == (
        "CIDEr of 49 images is not comparable with published ones: its word weights need 50 or more",
    )


def test_cider_d_by_hand() -> None:
    # Two images of two words each, all four words in one image only: idf log 2, one bigram each. The first prediction is
    # its reference (1 for n = 1 and 2, no 3-grams), the second has one of two words (cosine 1/2 for n = 1).
    scores = score_captions({"a": "red dog", "b": "blue dog2"}, {"a": ["red dog"], "b": ["blue cat"]})
    assert scores.cider == pytest.approx(10 * ((1 + 1) / 4 + 0.5 / 4) / 2)


def test_bleu_and_rouge_by_hand() -> None:
    scores = score_captions({1: "a black dog runs"}, {1: ["a dog runs fast", "the black cat"]})
    # 4 words of 4; bigrams "dog runs" of 3; common subsequence "a dog runs": precision 3/4, recall 3/4.
    assert scores.bleu1 == pytest.approx(1)
    assert scores.bleu2 == pytest.approx(math.sqrt(1 / 3))
    assert scores.rouge_l == pytest.approx(3 / 4)


def test_short_and_long_captions_are_said_to_be_so() -> None:
    references = hundred_images()
    short = score_captions(dict.fromkeys(references, "a dog"), references)
    assert short.length_ratio == pytest.approx(2 / 6)
    assert any("too short: 0.33 times" in w for w in short.warnings)
    long = score_captions(dict.fromkeys(references, "a dog " * 8), references)
    assert any("too long: 2.29 times" in w for w in long.warnings)


def test_empty_predictions_count_as_nothing_and_are_counted() -> None:
    references = hundred_images()
    predictions = {i: c[0] for i, c in references.items()} | {"000000000003": "", "000000000004": " ... "}
    scores = score_captions(predictions, references)
    assert scores.num_images == 100
    assert scores.rouge_l == pytest.approx(0.98)
    assert scores.warnings == ("2 of 100 images: the predicted caption has no words",)
    nothing = score_captions(dict.fromkeys(references, ""), references)
    assert (nothing.rouge_l, nothing.cider, nothing.length_ratio) == (0, 0, pytest.approx(0, abs=1e-9))
    assert nothing.bleu4 < 1e-6


@pytest.mark.parametrize("captions", [[], ["", " "]])
def test_an_image_without_reference_is_an_error_that_names_it(captions: list[str]) -> None:
    with pytest.raises(ScoreError, match=r"^7: has no reference caption"):
        score_captions({7: "a dog"}, {7: captions})


def test_references_of_punctuation_only_do_not_divide_by_zero() -> None:
    scores = score_captions({1: "a dog", 2: "a cat"}, {1: ["..."], 2: ["a cat"]})
    assert scores.rouge_l == pytest.approx(0.5)


def test_ids_may_be_numbers_or_text() -> None:
    assert score_captions({391895: "a dog"}, {"000000391895": ["a dog"]}).num_images == 1
    with pytest.raises(ScoreError, match="predictions: hold '07' twice"):
        score_captions({"7": "a", "07": "b"}, {7: ["a"]})


def test_ids_that_differ_are_an_error_with_the_first_five_of_each() -> None:
    predictions = dict.fromkeys(range(5, 15), "a dog")
    references = {i: ["a dog"] for i in range(8)}
    message = (
        r"predictions are for 10 images, references for 8: 5 images without a prediction \(0, 1, 2, 3, 4\) and "
        r"7 predictions for images without references \(8, 9, 10, 11, 12, ...\)"
    )
    with pytest.raises(ScoreError, match=message):
        score_captions(predictions, references)
    assert score_captions(predictions, references, missing="ignore").num_images == 3


def test_no_image_at_all_is_an_error() -> None:
    with pytest.raises(ScoreError, match="there is no image to score"):
        score_captions({}, {})
    with pytest.raises(ScoreError, match="there is no image to score"):
        score_captions({1: "a"}, {2: ["b"]}, missing="ignore")


@given(st.lists(st.sampled_from("abc"), max_size=7), st.lists(st.sampled_from("abc"), max_size=7))
@settings(deadline=None, max_examples=100)
def test_longest_common_subsequence_is_the_longest(a: list[str], b: list[str]) -> None:
    def subsequences(words: list[str]) -> set[tuple[str, ...]]:
        return {tuple(c) for n in range(len(words) + 1) for c in combinations(words, n)}

    assert longest_common_subsequence(a, b) == max(len(s) for s in subsequences(a) & subsequences(b))
