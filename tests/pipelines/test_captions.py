import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.captions import clean_captions, script_share
from pipelines.config import FilterConfig


@pytest.mark.parametrize(
    ("raw", "kept"),
    [
        (["  two  spaces\n", "a line\nbreak in it"], ["two spaces", "a line break in it"]),
        (["one\u2028two\u00a0three\x0bfour"], ["one two three four"]),
        (["nul\x00byte"], ["nul byte"]),
        (["", "   ", "\n", "...", "!?", "\u2026", "\u200b"], []),
        (["caf\u00e9 table", "cafe\u0301 table"], ["caf\u00e9 table"]),
        (["a dog", "a  dog", "a cat"], ["a dog", "a cat"]),
        ([f"caption {i}" for i in range(7)], [f"caption {i}" for i in range(7)]),
        (["\U0001f600", "\u732b", "7"], ["\U0001f600", "\u732b", "7"]),
        (["lone \ud800 surrogate"], ["lone surrogate"]),
    ],
)
def test_captions_are_cleaned(raw, kept):
    assert list(clean_captions(raw).captions) == kept


def test_what_is_no_text_is_counted_and_dropped():
    cleaned = clean_captions([None, 7, 1.5, float("nan"), ["a"], {"a": 1}, True, "a dog"])
    assert cleaned.captions == ("a dog",)
    assert cleaned.counts == {"not_text": 7}


def test_counts_say_what_was_done():
    cleaned = clean_captions(["a dog", " a dog", "a  cat", "..."])
    assert cleaned.counts == {"changed": 1, "duplicate": 1, "empty": 1}


@given(st.lists(st.one_of(st.text(), st.text(st.characters(categories=["Cs", "Cc", "Zs", "L"])), st.none())))
@settings(deadline=None, max_examples=200)
def test_cleaning_twice_changes_nothing_more_and_survives_utf8(raw):
    once = clean_captions(raw).captions
    assert clean_captions(once).captions == once
    assert all(unicodedata.is_normalized("NFC", c) for c in once)
    assert json.loads(json.dumps(once, ensure_ascii=False).encode()) == list(once)


@pytest.mark.parametrize(
    ("limits", "kept", "counts"),
    [
        ({"min_caption_words": 2}, ["a dog", "a dog on a sofa", "\u732b\u304c \u3044\u308b"], {"too_short": 1}),
        ({"max_caption_words": 2}, ["dog", "a dog", "\u732b\u304c \u3044\u308b"], {"too_long": 1}),
        ({"min_caption_chars": 6}, ["a dog on a sofa"], {"too_short": 3}),
        ({"max_caption_chars": 5}, ["dog", "a dog", "\u732b\u304c \u3044\u308b"], {"too_long": 1}),
        ({"caption_scripts": ["LATIN"]}, ["dog", "a dog", "a dog on a sofa"], {"script": 1}),
        ({"caption_scripts": ["CJK", "HIRAGANA"]}, ["\u732b\u304c \u3044\u308b"], {"script": 3}),
    ],
)
def test_limits_drop_captions_one_by_one_and_count_them(limits, kept, counts):
    raw = ["dog", "a dog", "a dog on a sofa", "\u732b\u304c \u3044\u308b"]
    cleaned = clean_captions(raw, FilterConfig(**limits))
    assert (list(cleaned.captions), cleaned.counts) == (kept, counts)


def test_length_is_that_of_the_cleaned_caption():
    assert clean_captions(["a   dog \n"], FilterConfig(max_caption_chars=5)).captions == ("a dog",)


def test_a_foreign_name_leaves_a_caption_in_its_script():
    text = "a sign that says \u043c\u0438\u0440 above the door"
    assert script_share(text, ["LATIN"]) == 25 / 28
    assert clean_captions([text], FilterConfig(caption_scripts=["LATIN"])).captions == (text,)
    assert clean_captions([text], FilterConfig(caption_scripts=["LATIN"], caption_script_share=0.9)).captions == ()


@given(st.text(st.characters(exclude_categories=["L"])))
def test_a_caption_without_letters_has_no_foreign_ones(text):
    assert script_share(text, ["LATIN"]) == 1


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            {"caption_scripts": ["LATN"]},
            r"'LATN', expected the first word of a letter's Unicode name.*did you mean LATIN",
        ),
        ({"caption_scripts": ["latin"]}, r"did you mean LATIN\?"),
        ({"min_caption_words": 5, "max_caption_words": 4}, r"min_caption_words is 5, more than max_caption_words=4"),
        ({"caption_scripts": []}, r"at least 1 item"),
    ],
)
def test_impossible_limits_are_named(limits, message):
    with pytest.raises(ValueError, match=message):
        FilterConfig(**limits)
