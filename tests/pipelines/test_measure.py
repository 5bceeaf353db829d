import io
import resource

import numpy as np
import pytest
from PIL import Image, ImageOps, features

from pipelines.config import FilterConfig
from pipelines.filters import Reason, Rejection
from pipelines.measure import Picture, measure

LIMITS = FilterConfig()


def stored(picture):
    assert isinstance(picture, Picture), picture
    image = Image.open(io.BytesIO(picture.data))
    assert image.size == (picture.measured.width, picture.measured.height)
    assert image.getexif().get(0x0112) is None
    return image


def oriented(image, orientation, encode, kind="JPEG"):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(image, kind, exif=exif)


@pytest.mark.parametrize(
    ("kind", "mode", "extension", "options"),
    [
        ("JPEG", "RGB", "jpg", {}),
        ("JPEG", "L", "jpg", {}),
        ("JPEG", "RGB", "jpg", {"progressive": True}),
        ("PNG", "RGB", "png", {}),
        ("PNG", "L", "png", {}),
        ("WEBP", "RGB", "webp", {}),
    ],
)
def test_plain_pictures_are_kept_byte_for_byte(pictures, kind, mode, extension, options):
    data = pictures.encode(pictures.photo(1, mode=mode), kind, **options)
    picture = measure(data, LIMITS)
    assert isinstance(picture, Picture)
    assert (picture.data, picture.extension, picture.flags) == (data, extension, ())


@pytest.mark.parametrize("orientation", range(2, 9))
def test_orientation_is_applied_to_the_pixels(pictures, orientation):
    upright = pictures.photo(2)
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}[orientation]  # Pillow's transpositions by number
    lying = upright.transpose(Image.Transpose(undo))
    picture = measure(oriented(lying, orientation, pictures.encode, "PNG"), LIMITS)
    assert np.array_equal(stored(picture), upright)
    assert picture.flags == (f"orientation={orientation}", "converted")


def test_an_oriented_jpeg_swaps_its_sides(pictures):
    picture = measure(oriented(pictures.photo(3, 64, 48), 6, pictures.encode), LIMITS)
    assert stored(picture).size == (48, 64)
    assert picture.extension == "png"


@pytest.mark.parametrize("orientation", [0, 1, 9, 77])
def test_orientations_without_meaning_leave_the_file_as_it_is(pictures, orientation):
    data = oriented(pictures.photo(3), orientation, pictures.encode)
    assert measure(data, LIMITS).data == data


def test_alpha_goes_over_white(pictures):
    image = Image.new("RGBA", (64, 48), (200, 0, 0, 0))
    image.paste((0, 100, 0, 255), (0, 0, 32, 48))
    image.paste((0, 0, 0, 128), (32, 0, 40, 48))
    pixels = np.asarray(stored(measure(pictures.encode(image, "PNG"), LIMITS)))
    assert pixels[0, 0].tolist() == [0, 100, 0]
    assert pixels[0, 63].tolist() == [255, 255, 255]
    assert pixels[0, 35].tolist() == [127, 127, 127]


def test_a_palette_with_transparency_goes_over_white(pictures):
    image = pictures.photo(4).convert("P")
    clear = image.getpixel((0, 0))
    picture = measure(pictures.encode(image, "PNG", transparency=clear), LIMITS)
    pixels = np.asarray(stored(picture))
    assert pixels[np.asarray(image) == clear].min() == 255
    assert picture.flags == ("mode=P", "converted")


def test_a_key_colour_goes_over_white(pictures):
    image = pictures.photo(5)
    picture = measure(pictures.encode(image, "PNG", transparency=image.getpixel((3, 3))), LIMITS)
    assert np.asarray(stored(picture))[3, 3].tolist() == [255, 255, 255]
    assert "transparency" in picture.flags


def test_16_bits_keep_their_high_byte(pictures):
    levels = np.arange(48 * 64, dtype=np.uint16).reshape(48, 64) * 20
    picture = measure(pictures.encode(Image.fromarray(levels), "PNG"), LIMITS)
    assert np.array_equal(np.asarray(stored(picture))[..., 1], levels >> 8)


def test_cmyk_becomes_rgb(pictures):
    picture = measure(pictures.encode(pictures.photo(6, mode="CMYK")), LIMITS)
    assert stored(picture).mode == "RGB"
    assert picture.mode == "CMYK"
    difference = np.asarray(stored(picture)).astype(int) - np.asarray(pictures.photo(6))
    assert abs(difference).mean() < 8  # chroma subsampling of noise


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.0, 255.0), (-3.0, 9.0)])
def test_floats_are_scaled_by_their_range(pictures, low, high):
    pixels = np.linspace(low, high, 48 * 64, dtype=np.float32).reshape(48, 64)
    picture = measure(pictures.encode(Image.fromarray(pixels), "TIFF"), LIMITS)
    assert (np.asarray(stored(picture)).min(), np.asarray(stored(picture)).max()) == (0, 255)


@pytest.mark.parametrize(("kind", "mode"), [("PNG", "1"), ("PNG", "LA"), ("GIF", "P"), ("BMP", "RGB"), ("TIFF", "RGB")])
def test_other_kinds_are_stored_as_rgb_png(pictures, kind, mode):
    picture = measure(pictures.encode(pictures.photo(7).convert(mode), kind), LIMITS)
    assert stored(picture).mode == "RGB"
    assert (picture.extension, picture.flags[-1]) == ("png", "converted")


def test_conversion_gives_the_same_bytes_each_time(pictures):
    data = pictures.encode(pictures.photo(8, mode="RGBA"), "PNG")
    assert measure(data, LIMITS).data == measure(data, LIMITS).data


def test_the_extension_follows_the_content_of_a_misnamed_file(pictures):
    assert measure(pictures.encode(pictures.photo(9), "PNG"), LIMITS).extension == "png"


@pytest.mark.parametrize(
    ("values", "lowest", "highest"),
    [
        (np.arange(3072) * 20, 0, 239),  # they fit in 16 bits: the high byte
        (np.arange(3072) * 600_000, 0, 255),
        (np.arange(3072) - 1000, 0, 255),
    ],
)
def test_32_bits_keep_the_high_byte_or_are_stretched(pictures, values, lowest, highest):
    picture = measure(pictures.encode(Image.fromarray(values.astype(np.int32).reshape(48, 64)), "TIFF"), LIMITS)
    pixels = np.asarray(stored(picture))
    assert (picture.mode, pixels.min(), pixels.max()) == ("I", lowest, highest)


def test_gray_with_alpha_goes_over_white(pictures):
    image = Image.new("LA", (64, 48), (40, 255))
    image.paste((40, 0), (0, 0, 32, 48))
    picture = measure(pictures.encode(image, "PNG"), LIMITS)
    assert np.asarray(stored(picture))[0, [0, 63], 0].tolist() == [255, 40]
    assert picture.flags == ("mode=LA", "converted")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_lying_jpeg_is_decoded_once_and_as_pillow_does(pictures, orientation, mode):
    data = oriented(pictures.photo(3, 65, 49, mode), orientation, pictures.encode)
    picture = measure(data, LIMITS)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if orientation == 1:
        assert picture.data == data
    else:
        assert np.array_equal(stored(picture), expected.convert("RGB"))
        assert picture.flags == (f"orientation={orientation}", "converted")


@pytest.mark.parametrize(
    ("at", "damage"),
    [(6, b"XX"), (10, b"\xff" * 4), (14, b"\0\0")],  # byte order, offset of the directory, number of its entries
)
def test_broken_exif_leaves_the_picture_as_it_is(pictures, at, damage):
    data = oriented(pictures.photo(4), 6, pictures.encode)
    start = data.index(b"Exif\0\0") + at
    data = data[:start] + damage + data[start + len(damage) :]
    picture = measure(data, LIMITS)
    assert (picture.data, picture.flags) == (data, ())


def test_of_several_frames_the_first_is_kept(pictures):
    frames = [pictures.photo(i) for i in (5, 6, 7)]
    mpo = pictures.encode(frames[0], "MPO", save_all=True, append_images=frames[1:])
    assert (measure(mpo, LIMITS).data, measure(mpo, LIMITS).extension) == (mpo, "jpg")
    for kind in ("GIF", "WEBP", "PNG", "TIFF"):
        data = pictures.encode(frames[0], kind, save_all=True, append_images=[pictures.photo(6), pictures.photo(7)])
        picture = measure(data, LIMITS)
        assert "frames=3" in picture.flags, kind
        first = Image.open(io.BytesIO(data)).convert("RGB")
        assert np.array_equal(stored(picture), first), kind


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow was built without AVIF")
def test_avif_is_stored_as_png_and_a_cut_one_rejected(pictures):
    data = pictures.encode(pictures.photo(8), "AVIF")
    picture = measure(data, LIMITS)
    assert stored(picture).size == (64, 48)
    assert picture.flags == ("format=AVIF", "converted")
    for end in (40, len(data) // 2, len(data) - 1):
        assert measure(data[:end], LIMITS).reason is Reason.TRUNCATED


def test_a_heic_photo_is_named_as_what_it_is():
    found = measure(b"\0\0\0\x18ftypheic" + bytes(200), LIMITS)
    assert (found.reason, found.detail) == ("not_an_image", "is a heic file, which is not read; convert it to JPEG")


@pytest.mark.parametrize("missing", [1, 2, 3, 10])
def test_a_jpeg_short_of_its_last_bytes_is_cut(pictures, missing):
    assert rejection(pictures.encode(pictures.photo(9))[:-missing]).reason is Reason.TRUNCATED


def test_damage_can_show_in_nothing_but_extraneous_bytes(pictures):
    """So a JPEG with such bytes is rejected, though padding before its end would be harmless."""
    whole = pictures.encode(pictures.photo(10, 320, 240), quality=95)
    padded = whole[:-2] + bytes(40) + whole[-2:]
    messages = [rejection(padded).detail]
    for at in range(len(whole) // 2, len(whole) - 600, 200):
        flawed = measure(whole[:at] + bytes(500) + whole[at + 500 :], LIMITS)
        messages += [flawed.detail] if isinstance(flawed, Rejection) else []
    assert "extraneous bytes before marker 0xd9" in messages[0]
    assert any("extraneous bytes before marker 0xd9" in message for message in messages[1:])


def test_a_jpeg_of_thousands_of_scans_is_rejected_before_it_holds_the_build(pictures):
    data = pictures.encode(pictures.photo(11, 320, 240), progressive=True)
    last = data.rindex(b"\xff\xda")
    scan = data[last:-2]
    assert isinstance(measure(data, LIMITS), Picture)
    found = rejection(data[:-2] + scan * 1000 + data[-2:])
    assert (found.reason, found.detail) == (Reason.CORRUPT_DATA, "1010 scans, expected at most 500")


def test_a_larger_picture_is_made_smaller(pictures):
    limits = FilterConfig(max_side_px=32)
    for kind, mode in (
        ("JPEG", "RGB"),
        ("JPEG", "L"),
        ("PNG", "RGBA"),
        ("PNG", "RGB"),
        ("WEBP", "RGB"),
        ("TIFF", "RGB"),
    ):
        data = pictures.encode(pictures.photo(12, mode=mode), kind)
        picture = measure(data, limits)
        image = stored(picture)
        assert (image.format, image.size, picture.extension) == ("JPEG", (32, 24), "jpg")
        assert (image.mode, picture.mode, picture.flags[-1]) == ("L" if mode == "L" else "RGB", mode, "resized")
        assert "converted" not in picture.flags
        difference = np.asarray(image.convert("RGB")).astype(int) - np.asarray(pictures.photo(12).resize((32, 24)))
        assert mode == "L" or abs(difference).mean() < 12
        assert measure(data, limits).data == picture.data


def test_a_lying_picture_is_made_smaller_upright(pictures):
    picture = measure(oriented(pictures.photo(13), 6, pictures.encode), FilterConfig(max_side_px=32))
    assert stored(picture).size == (24, 32)
    assert picture.flags == ("orientation=6", "resized")


def test_a_picture_that_is_small_enough_keeps_its_bytes(pictures):
    data = pictures.encode(pictures.photo(14))
    assert measure(data, FilterConfig(max_side_px=64)).data == data


def test_the_quality_of_smaller_pictures_is_in_the_config(pictures):
    data = pictures.encode(pictures.photo(15, 400, 300))
    low, high = (measure(data, FilterConfig(max_side_px=200, resized_quality=q)) for q in (30, 95))
    assert len(low.data) < len(high.data) / 2


def test_colour_modes_can_be_kept_out(pictures):
    limits = FilterConfig(color_modes=["RGB", "L"])
    for mode, kind in (("RGB", "JPEG"), ("L", "PNG")):
        assert isinstance(measure(pictures.encode(pictures.photo(16, mode=mode), kind), limits), Picture)
    found = rejection(pictures.encode(pictures.photo(16, mode="CMYK")), limits)
    assert (found.reason, found.detail) == (Reason.COLOR_MODE, "is CMYK, expected RGB or L")


def rejection(data, limits=LIMITS):
    found = measure(data, limits)
    assert isinstance(found, Rejection), found
    return found


def damaged_cases(pictures):
    big = pictures.encode(pictures.photo(10, 320, 240), quality=95)
    png = pictures.encode(pictures.photo(11), "PNG")
    webp = pictures.encode(pictures.photo(12), "WEBP")
    half = len(big) // 2
    return {
        "empty": (b"", Reason.EMPTY_FILE),
        "html": (b"<!DOCTYPE html><html></html>", Reason.NOT_AN_IMAGE),
        "text": (b"GIF is what this text begins with", Reason.NOT_AN_IMAGE),
        "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", Reason.NOT_AN_IMAGE),
        "cut jpeg": (big[: int(len(big) * 0.6)], Reason.TRUNCATED),
        "jpeg without its end": (big[:-2], Reason.TRUNCATED),
        "jpeg header alone": (big[:100], Reason.TRUNCATED),
        "four bytes": (big[:4], Reason.TRUNCATED),
        "zeros inside": (big[:half] + b"\0" * 4096 + big[half + 4096 :], Reason.CORRUPT_DATA),
        "cut png": (png[: len(png) // 2], Reason.TRUNCATED),
        "png header alone": (png[:30], Reason.TRUNCATED),
        "flipped png": (png[:200] + bytes([png[200] ^ 255]) + png[201:], Reason.CORRUPT_DATA),
        "cut webp": (webp[: len(webp) // 2], Reason.TRUNCATED),
        "bomb": (pictures.png_bomb(40_000), Reason.TOO_MANY_PIXELS),
        "half a bomb": (pictures.png_bomb(10_000), Reason.TOO_MANY_PIXELS),
        "dot": (pictures.encode(Image.new("RGB", (1, 1)), "PNG"), Reason.TOO_SMALL),
        "strip": (pictures.encode(pictures.photo(13, 700, 20), "PNG"), Reason.ASPECT_RATIO),
        "nan": (pictures.float_tiff(np.nan), Reason.NOT_FINITE),
        "inf": (pictures.float_tiff(-np.inf), Reason.NOT_FINITE),
        "black": (pictures.encode(Image.new("RGB", (64, 48)), "PNG"), Reason.CONSTANT_IMAGE),
        "flat jpeg": (pictures.encode(Image.new("RGB", (64, 48), (120, 7, 90))), Reason.CONSTANT_IMAGE),
        "clear": (pictures.encode(Image.new("RGBA", (64, 48)), "PNG"), Reason.CONSTANT_IMAGE),
        "flat float": (pictures.float_tiff(0.5, 0.5), Reason.CONSTANT_IMAGE),
    }


def test_damage_is_rejected_with_its_reason(pictures):
    found = {name: rejection(data).reason for name, (data, _) in damaged_cases(pictures).items()}
    assert found == {name: reason for name, (_, reason) in damaged_cases(pictures).items()}


def test_garbage_after_the_end_is_harmless(pictures):
    data = pictures.encode(pictures.photo(14)) + b"garbage" * 100
    assert measure(data, LIMITS).data == data


def test_no_cut_of_a_file_escapes_as_an_error(pictures):
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"):
        data = pictures.encode(pictures.photo(15), kind)
        for end in range(0, len(data), max(1, len(data) // 60)):
            measure(data[:end], LIMITS)


def test_a_bomb_costs_no_memory_and_leaves_pillows_guard_alone(pictures):
    guard = Image.MAX_IMAGE_PIXELS
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for side in (10_000, 13_000, 40_000):
        rejection(pictures.png_bomb(side))
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kb < 20_000
    assert guard == Image.MAX_IMAGE_PIXELS


def test_limits_are_in_the_config(pictures):
    data = pictures.encode(pictures.photo(16, 64, 48))
    for limits, reason in (
        ({"max_pixels": 64 * 48 - 1}, Reason.TOO_MANY_PIXELS),
        ({"min_side_px": 49}, Reason.TOO_SMALL),
        ({"max_aspect_ratio": 1.3}, Reason.ASPECT_RATIO),
        ({"constant_levels": 255}, Reason.CONSTANT_IMAGE),
    ):
        assert rejection(data, FilterConfig(**limits)).reason is reason
    flat = pictures.encode(Image.new("RGB", (64, 48)), "PNG")
    assert isinstance(measure(flat, FilterConfig(constant_levels=-1)), Picture)


def test_a_single_pixel_makes_a_picture_that_is_not_constant(pictures):
    image = Image.new("RGB", (64, 48))
    image.putpixel((33, 21), (9, 0, 0))  # off the grid that is looked at first
    assert isinstance(measure(pictures.encode(image, "PNG"), LIMITS), Picture)
