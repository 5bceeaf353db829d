import random

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from pipelines import jpeg


def kinds(pictures):
    encode, photo = pictures.encode, pictures.photo
    for mode in ("RGB", "L"):
        for options in ({}, {"progressive": True}, {"subsampling": 0}, {"restart_marker_blocks": 4}, {"quality": 98}):
            yield mode, encode(photo(3, 97, 65, mode), **options)


def damaged(data, draw):
    """The file with one of the things done to it that disks, networks and programs do."""
    at, length = draw.randrange(2, len(data)), draw.choice((1, 4, 64, 500))
    return draw.choice(
        (
            data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :],
            data[:at] + bytes(len(data[at : at + length])) + data[at + length :],
            data[:at] + data[at + length :],
            data[:at] + draw.randbytes(length) + data[at:],
            data[:at],
            data[:at] + bytes([0xFF, draw.randrange(256)]) + data[at + 2 :],
        )
    )


def verdict(data, mode, min_side_px):
    try:
        jpeg.decode(data, mode, min_side_px)
    except ValueError as error:
        return str(error)
    return "whole"


def test_an_eighth_of_the_size_shows_all_damage_that_the_whole_size_shows(pictures):
    draw, found = random.Random(0), []
    for mode, data in kinds(pictures):
        for _ in range(150):
            flawed = damaged(data, draw)
            found.append(verdict(flawed, mode, 0))
            assert verdict(flawed, mode, 1) == found[-1]
    assert 200 < found.count("whole") < 1300
    assert any("extraneous" in message for message in found)
    assert any("premature end" in message for message in found)


@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_some_channel_spans_at_least_what_the_eighth_promises(subsampling):
    """Pictures made to break the bound: the wildest chroma that there is, and colours beyond what RGB can show."""
    draw = np.random.default_rng(0)
    for _ in range(200):
        side = int(draw.integers(8, 40))
        cells = draw.integers(0, 2, (side, side, 3), dtype=np.uint8) * 255
        if draw.random() < 0.5:
            cells[..., 0] = draw.integers(0, 256)
        image = Image.fromarray(cells.repeat(int(draw.integers(1, 9)), 0).repeat(4, 1), "YCbCr")
        data = simplejpeg.encode_jpeg(
            np.asarray(image.convert("RGB")), 95, colorsubsampling=("444", "422", "420")[subsampling]
        )
        pixels = jpeg.decode(data, "RGB")
        assert jpeg.least_range(data, "RGB") <= np.ptp(pixels.astype(int), (0, 1)).max()


def test_a_photo_is_proven_to_vary(pictures):
    for mode in ("RGB", "L"):
        assert jpeg.least_range(pictures.encode(pictures.photo(1, 320, 240, mode)), mode) > 20


def test_a_flat_picture_is_not_proven_to_vary(pictures):
    assert jpeg.least_range(pictures.encode(Image.new("RGB", (64, 48), (120, 7, 90))), "RGB") == 0


def test_scans_are_counted_where_there_can_be_many(pictures):
    data = pictures.encode(pictures.photo(2))
    jpeg.require_few_scans(data + b"\xff\xda" * 1000)  # behind the one scan of a file whose first scan holds it all
    many = pictures.encode(pictures.photo(2), progressive=True) + b"\xff\xda" * 1000
    with pytest.raises(ValueError, match=r"1010 scans, expected at most 500"):
        jpeg.require_few_scans(many)
    start = data.index(b"\xff\xda")
    with pytest.raises(ValueError, match=r"scans, expected at most 500"):  # one component a scan
        jpeg.require_few_scans(data[: start + 4] + b"\1" + data[start + 5 :] + b"\xff\xda" * 1000)
