"""The words of a caption are those that the Java tokenizer of the COCO caption evaluation gives."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xctrain.ptb import ptb_tokens, tokenize

GOLDEN = Path(__file__).parents[1] / "golden"
SHARED = Path(__file__).parents[2] / "../shared/caption-metrics"


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def coco_captions() -> list[str]:
    if not SHARED.exists():
        pytest.skip("needs the COCO captions in a folder `shared` beside the checkout")
    return [a["caption"] for a in read(SHARED / "captions_val2017.json")["annotations"]]


def test_words_of_real_captions_are_those_of_java() -> None:
    pairs = read(GOLDEN / "ptb_captions.json")["captions"]
    assert [(p["text"], " ".join(ptb_tokens(p["text"]))) for p in pairs] == [(p["text"], p["words"]) for p in pairs]


def test_words_of_odd_texts_are_those_of_java() -> None:
    pairs = read(GOLDEN / "ptb_odd.json")
    words = tokenize([p["text"] for p in pairs])
    differences = [(p, w) for p, w in zip(pairs, words, strict=True) if " ".join(w) != p["words"]]
    assert differences == []


@pytest.mark.parametrize(
    ("caption", "words"),
    [
        ("A stop sign is mounted upside-down on it's post. ", "a stop sign is mounted upside-down on it 's post"),
        ("They don't, can't and cannot.", "they do n't ca n't and can not"),
        ('"Mr. Smith" (left) paid $5.50 at 10:30', "mr. smith -lrb- left -rrb- paid $ 5.50 at 10:30"),
        ("A well… “quoted” – and wide", "a well quoted and wide"),
        ("a dog 😀 runs", "a dog runs"),
        ("", ""),
        (' . ... - "" ', ""),
    ],
)
def test_words(caption: str, words: str) -> None:
    assert " ".join(ptb_tokens(caption)) == words


def test_line_breaks_inside_a_caption_are_blanks() -> None:
    assert tokenize(["two\nlines\r\nof\u2028text", "one"]) == [["two", "lines", "of", "text"], ["one"]]


def test_a_last_single_letter_is_cut_by_the_caption_after_it() -> None:
    assert tokenize(["it reads K.", "A man"])[0] == ["it", "reads", "k"]
    assert tokenize(["it reads K.", "Two men"])[0] == ["it", "reads", "k."]


def test_a_mixed_number_is_one_word_with_a_no_break_space() -> None:
    assert ptb_tokens("22 3/4 st") == ["22\u00a03/4", "st"]


@given(st.text(max_size=60))
@settings(deadline=None, max_examples=200)
def test_any_text_gives_lower_case_words_without_blanks(text: str) -> None:
    for word in ptb_tokens(text):
        assert word
        assert word == word.lower()
        assert " " not in word


@pytest.mark.slow
def test_java_gives_the_same_words() -> None:
    tokenizer = pytest.importorskip(
        "pycocoevalcap.tokenizer.ptbtokenizer", reason="needs pip install .[scores]"
    ).PTBTokenizer
    if not shutil.which("java"):
        pytest.skip("needs Java")
    draw = random.Random(1)
    pieces = [p["text"] for p in read(GOLDEN / "ptb_odd.json") if len(p["text"]) <= 6]
    odd = [
        "".join(draw.choice(pieces) + draw.choice(("", " ")) for _ in range(draw.randint(2, 5))) for _ in range(20_000)
    ]
    for captions, allowed in ((coco_captions(), 0.0), (odd, 0.02)):
        java = tokenizer().tokenize({i: [{"caption": caption}] for i, caption in enumerate(captions)})
        ours = [" ".join(words) for words in tokenize(captions)]
        differences = [
            (captions[i], " ".join(java[i][0].split(" ")), words) for i, words in enumerate(ours) if java[i] != [words]
        ]
        assert len(differences) <= allowed * len(captions), differences[:10]
