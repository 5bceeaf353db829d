import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.captions import clean_captions


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
