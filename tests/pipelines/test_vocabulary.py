from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pipelines.vocabulary import HASHES, compact, merge, words

SHARDS = st.lists(st.lists(st.sampled_from([f"w{i}" for i in range(40)])).map(Counter), max_size=5)


def test_words_are_runs_of_letters_and_digits_in_lower_case():
    assert words("A dog's bone, 2 CATS — l\u2019\u00e9t\u00e9 'quoted' snake_case") == [
        *("a", "dog's", "bone", "2", "cats", "l\u2019\u00e9t\u00e9", "quoted", "snake", "case")
    ]


@given(SHARDS)
def test_a_small_vocabulary_is_counted_exactly(shards):
    total = sum(shards, Counter())
    found = merge(map(compact, shards))
    assert dict(found.top) == total
    assert list(found.top.values()) == sorted(total.values(), reverse=True)
    assert found.num_words == len(total)


def test_a_large_one_is_estimated_from_little():
    shards = [Counter({f"word{(i * 7 + s) % 30_000}": 1 + i % 3 for i in range(9000)}) for s in range(6)]
    kept = [compact(shard) for shard in shards]
    assert all(len(top) == 200 and len(hashes) == HASHES for top, hashes in kept)
    true = len(set().union(*shards))
    assert abs(merge(kept).num_words / true - 1) < 0.15
