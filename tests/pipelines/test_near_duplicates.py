import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipelines.near_duplicates import near_pairs, settle

# few bits in use, so that hashes are often near each other
HASHES = st.lists(st.integers(0, 2**6 - 1).map(lambda bits: bits * 0x0410_2081_0204_0821 % 2**64), max_size=40)
WIDE = st.lists(st.integers(0, 2**64 - 1), max_size=12)


def distance(a, b):
    return (a ^ b).bit_count()


def array(hashes):
    return np.array(hashes, np.uint64)


@given(HASHES | WIDE, st.integers(0, 8))
def test_every_near_pair_is_found_and_no_other(hashes, bits):
    pairs = {(i, j) for j, b in enumerate(hashes) for i, a in enumerate(hashes[:j]) if distance(a, b) <= bits}
    found = near_pairs(array(hashes), bits).tolist()
    assert set(map(tuple, found)) == pairs
    assert found == sorted(found, key=lambda pair: (pair[1], pair[0]))


@given(HASHES, st.integers(0, 8))
def test_a_picture_gives_way_to_the_first_of_those_that_stay_and_are_like_it(hashes, bits):
    stay, expected = [], {}
    for i, value in enumerate(hashes):
        owner = next((j for j in stay if distance(hashes[j], value) <= bits), None)
        if owner is None:
            stay.append(i)
        else:
            expected[i] = owner
    assert settle(array(hashes), bits) == expected


@given(HASHES, HASHES)
def test_pictures_that_come_later_change_nothing(before, later):
    grown = settle(array(before + later), 4)
    assert {i: owner for i, owner in grown.items() if i < len(before)} == settle(array(before), 4)


def test_a_chain_is_not_one_group():
    chain = array([0b0, 0b11, 0b1111])
    assert settle(chain, 2) == {1: 0}  # the last is like the middle one alone, which is gone


def test_pairs_planted_among_random_hashes_are_found_whatever_bits_differ():
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**64, 20_000, dtype=np.uint64)
    for i in range(500):
        flips = rng.choice(64, i % 5, replace=False)
        hashes[10_000 + i] = hashes[i] ^ np.uint64(sum(1 << int(bit) for bit in flips))
    assert settle(hashes, 4) == {10_000 + i: i for i in range(500)}


def test_a_crowded_band_is_compared_in_parts(monkeypatch):
    hashes = np.random.default_rng(0).integers(0, 2**12, 300, dtype=np.uint64)
    whole = near_pairs(hashes, 1).tolist()
    monkeypatch.setattr("pipelines.near_duplicates._BLOCK", 1)
    assert near_pairs(hashes, 1).tolist() == whole
