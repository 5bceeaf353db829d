from pathlib import Path
from types import ModuleType

import pytest

from shards.errors import DamagedSampleError
from shards.sample import Sample, canonical_json


def test_members_are_the_picture_then_its_json() -> None:
    sample = Sample("a", b"x", "png", {"captions": ["b"], "a": 1})
    assert sample.members() == (("a.png", b"x"), ("a.json", b'{"a":1,"captions":["b"]}'))
    assert sample.captions == ("b",)


def test_json_has_one_spelling() -> None:
    assert canonical_json({"b": 1, "a": "ü\ud800"}) == rb'{"a":"\u00fc\ud800","b":1}'
    assert canonical_json({"b": 1, "a": 2}) == canonical_json({"a": 2, "b": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"a": float("nan")})


def test_image_is_always_rgb(remake: ModuleType) -> None:
    images = [sample.open_image() for sample, _ in remake.golden_samples()]
    assert [(image.mode, image.size) for image in images] == [("RGB", (3, 2))] * 4


@pytest.mark.parametrize("cut", [0, 20, 60])
def test_a_picture_that_does_not_decode_names_its_key(golden: Path, remake: ModuleType, cut: int) -> None:
    whole, _ = remake.golden_samples()[0]
    broken = Sample(whole.key, whole.image[:cut], whole.extension, whole.meta)
    with pytest.raises(DamagedSampleError, match=r"000000000000: 000000000000\.png cannot be decoded"):
        broken.open_image()
