from hypothesis import example, given
from hypothesis import strategies as st

from pipelines.records import as_id, id_bytes, id_order
from shards.sample import Sample, key_of_id

IDS = st.integers(0, 2**63 - 1) | st.text(min_size=1).map(as_id)


@given(IDS)
@example("a" * 65)
@example("\ud83d")
@example("17-0123456789abcdef0123")
@example("\u00e9\u00e9\u00e9")
def test_every_id_has_a_key_that_a_shard_takes(image_id):
    assert Sample(key_of_id(image_id), b"", "jpg", {}).key


@given(IDS, IDS)
@example(17, "017")
@example(17, "000000000017")
@example("A.jpg", "a.jpg")
@example("a/b.jpg", "a.b.jpg")
@example("x-" + "0" * 20, "x")
@example(1, 256)
def test_different_ids_have_different_keys_and_rows(a, b):
    assert (a == b) == (key_of_id(a) == key_of_id(b)) == (id_bytes(a) == id_bytes(b))


def test_a_number_is_one_id_however_it_is_written():
    assert as_id("17") == 17
    assert [as_id(text) for text in ("017", "1e3", "-1", "1.0", "\u0661", str(2**63))] == [
        "017",
        "1e3",
        "-1",
        "1.0",
        "\u0661",
        str(2**63),
    ]
    assert key_of_id(17) == "000000000017"
    assert key_of_id("coco-17_a") == "coco-17_a"


@given(st.lists(st.integers(0, 2**63 - 1), min_size=2))
def test_numbers_keep_their_order_in_rows(numbers):
    assert sorted(numbers, key=id_bytes) == sorted(numbers, key=id_order) == sorted(numbers)
