"""One image file's bytes to a verdict: rejected with a reason, or a picture with its measurements and what to store."""

import io
import warnings
import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from pipelines import jpeg
from pipelines.filters import Limits, Measurements, Reason, Rejection, judge_header, judge_pixels

# What Pillow may open. Not everything it knows: some of its formats start other programs or fetch other files.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
KEPT_AS_IS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}  # Pillow's format to our extension
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM", b"II*\0", b"MM\0*")
_ORIENTATION = 0x0112
_AVIF = (b"avif", b"avis")
_NEEDED = 16  # bytes a pixel that decoding takes at most, or nearly so


@dataclass(frozen=True)
class Picture:
    """A picture that passed every rule.

    ``data`` is what to store: the file's own bytes, or a PNG where they were converted. ``flags`` say what was special:
    ``mode=CMYK``, ``orientation=6``, ``depth=16``, ``frames=3``, ``format=TIFF``, ``converted``.
    """

    measured: Measurements
    data: bytes
    extension: str
    mode: str
    flags: tuple[str, ...]


def measure(data: bytes, limits: Limits) -> Picture | Rejection:
    """Decode a file fully, once, and judge it. Never raises for anything that the bytes do.

    Raises:
        MemoryError: there was too little for it, which says nothing of the file.
    """
    if not data:
        return Rejection(Reason.EMPTY_FILE, "0 bytes")
    try:
        with warnings.catch_warnings():
            # Pillow warns about large and odd pictures; max_pixels decides on the former, decoding on the latter.
            warnings.simplefilter("ignore")
            return _measure(data, limits)
    except Image.DecompressionBombError as error:
        return Rejection(Reason.TOO_MANY_PIXELS, str(error).split(",")[0])
    except UnidentifiedImageError:
        return _unidentified(data)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - decoders raise anything at all over damaged bytes
        return _undecodable(data, error)


def _measure(data: bytes, limits: Limits) -> Picture | Rejection:
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        if verdict := judge_header(*image.size, image.mode, limits):
            return verdict
        if image.format == "PNG":
            check_png(data)
        flags, is_jpeg = _flags(data, image), image.format in ("JPEG", "MPO")
        as_it_is = is_jpeg and not flags and not (limits.max_side_px and max(image.size) > limits.max_side_px)
        if as_it_is and (varies := jpeg.least_range(data, image.mode)) > limits.constant_levels:
            return Picture(Measurements(*image.size, True, varies), data, "jpg", image.mode, ())
        picture: Image.Image = image
        pixels: NDArray[Any]
        if is_jpeg:
            pixels = jpeg.decode(data, image.mode)
        if is_jpeg and image.mode in ("L", "RGB"):
            picture = Image.fromarray(pixels)
            picture.getexif()[_ORIENTATION] = orientation(image)
        else:
            image.load()
            pixels = np.asarray(image)
        finite = pixels.dtype.kind != "f" or bool(np.isfinite(pixels).all())
        if not finite:
            return judge_pixels(Measurements(*image.size, False, 255), limits) or Rejection(Reason.NOT_FINITE, "")
        if flags:
            picture = to_rgb(ImageOps.exif_transpose(picture))
            pixels = np.asarray(picture)
        measured = Measurements(*picture.size, finite, channel_range(pixels, limits.constant_levels))
        if verdict := judge_pixels(measured, limits):
            return verdict
        if limits.max_side_px and max(picture.size) > limits.max_side_px:
            picture = shrink(picture, limits.max_side_px)
            measured = replace(measured, width=picture.width, height=picture.height)
            return Picture(
                measured, encode_jpeg(picture, limits.resized_quality), "jpg", image.mode, (*flags, "resized")
            )
        if flags:
            return Picture(measured, encode_png(picture), "png", image.mode, (*flags, "converted"))
        return Picture(measured, data, KEPT_AS_IS[str(image.format)], image.mode, ())


def _flags(data: bytes, image: Image.Image) -> tuple[str, ...]:
    """Why the original bytes cannot be kept; nothing for an upright 8-bit gray or RGB JPEG, PNG or WebP."""
    flags = []
    if image.format not in KEPT_AS_IS:
        flags.append(f"format={image.format}")
    if image.mode not in ("L", "RGB"):
        flags.append(f"mode={image.mode}")
    elif image.format == "PNG" and data[24] != 8:  # bit depth in IHDR; Pillow opens 48-bit colour as RGB
        flags.append(f"depth={data[24]}")
    if image.mode in ("L", "RGB") and image.has_transparency_data:
        flags.append("transparency")
    if (turned := orientation(image)) != 1:
        flags.append(f"orientation={turned}")
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":  # an MPO is a JPEG with more after its end, and only its start is read
        flags.append(f"frames={frames}")
    return tuple(flags)


def orientation(image: Image.Image) -> int:
    """EXIF orientation 2..8, or 1 where there is none that means anything."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - damaged EXIF raises anything; the picture is then taken as it is
        return 1
    return value if isinstance(value, int) and 1 < value <= 8 else 1


def check_png(data: bytes) -> None:
    """Compare the checksums of a PNG's critical chunks, which Pillow skips for pixel data.

    Raises:
        ValueError: one does not match.
    """
    at = 8
    while at + 12 <= len(data):
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        end = at + 8 + length
        if kind[:1].isupper() and zlib.crc32(data[at + 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
            raise ValueError(f"checksum of chunk {ascii(kind)[2:-1]} at byte {at} does not match")
        if kind == b"IEND":
            return
        at = end + 4


def to_rgb(image: Image.Image) -> Image.Image:
    """The picture as 8-bit RGB by one rule for each mode.

    Transparency (RGBA, LA, a palette's or a key colour): over white. 16 bits: the high byte; 32 bits too where all values
    fit in 16, else stretched from least..greatest to 0..255. Float: times 255 where all values lie in 0..1, as they are
    where all lie in 0..255, else stretched likewise. CMYK, YCbCr, Lab, HSV, palettes, 1 bit: Pillow's conversion.
    """
    if image.mode.startswith("I"):
        levels = np.asarray(image).astype(np.int64)
        fits = levels.min() >= 0 and levels.max() <= 65535
        return _from_array(levels >> 8 if fits else _to_levels(levels.astype(np.float64)))
    if image.mode == "F":
        return _from_array(_to_levels(np.asarray(image, np.float64)))
    if image.has_transparency_data:
        colors = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, colors).convert("RGB")
    return image.convert("RGB")


def _to_levels(values: NDArray[np.float64]) -> NDArray[np.float64]:
    low, high = values.min(), values.max()
    if low >= 0 and high <= 1:
        values = values * 255
    elif low < 0 or high > 255:
        values = (values - low) * (255 / (high - low))
    return np.rint(values)


def _from_array(levels: NDArray[Any]) -> Image.Image:
    return Image.fromarray(levels.astype(np.uint8)).convert("RGB")


def channel_range(pixels: NDArray[Any], enough: int) -> int:
    """Greatest minus least level of the channel that varies most; stops looking once it is over ``enough``."""
    sampled = _range(pixels[::16, ::16])  # settles nearly every picture for a 256th of the work
    return sampled if sampled > enough else _range(pixels)


def _range(pixels: NDArray[Any]) -> int:
    flat = pixels.reshape(pixels.shape[0] * pixels.shape[1], -1)
    return int((flat.max(0).astype(np.int64) - flat.min(0)).max())


def shrink(image: Image.Image, max_side_px: int) -> Image.Image:
    """The picture with its longer side of this length; in whole numbers, so the same on every machine."""
    scale = max_side_px / max(image.size)
    width, height = (max(1, round(side * scale)) for side in image.size)
    small = image.resize((width, height), Image.Resampling.LANCZOS)
    small.info = {}  # a profile or a comment belonged to the file
    return small


def encode_jpeg(image: Image.Image, quality: int) -> bytes:
    """The pixels as JPEG, nothing else in the file."""
    out = io.BytesIO()
    image.save(out, "JPEG", quality=quality)
    return out.getvalue()


def encode_png(image: Image.Image) -> bytes:
    """The pixels as PNG, nothing else in the file; the same bytes for the same pixels."""
    image.info = {}  # an ICC profile or a key colour would go along, and belonged to the file before conversion
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=6)
    return out.getvalue()


def _unidentified(data: bytes) -> Rejection:
    if data[4:8] == b"ftyp" and data[8:12] not in _AVIF:
        return Rejection(
            Reason.NOT_AN_IMAGE, f"is a {ascii(data[8:12])[2:-1]} file, which is not read; convert it to JPEG"
        )
    if not (data.startswith(_MAGIC) or data[8:12] in (b"WEBP", *_AVIF)):
        return Rejection(Reason.NOT_AN_IMAGE, f"begins with {ascii(data[:16])[1:]}")
    if looks_cut(data):
        return Rejection(Reason.TRUNCATED, f"ends within its header, after {len(data)} bytes")
    return Rejection(Reason.CORRUPT_DATA, "the header is damaged")


def _undecodable(data: bytes, error: Exception) -> Rejection:
    detail = " ".join(f"{error or type(error).__name__}".split())[:200]
    cut = looks_cut(data) or "truncated" in detail.lower()
    if not cut:
        require_memory(data)
    return Rejection(Reason.TRUNCATED if cut else Reason.CORRUPT_DATA, detail)


def require_memory(data: bytes) -> None:
    """To be asked when a picture could not be decoded: decoders that find no memory call the file damaged, each in its way.

    Raises:
        MemoryError: there is too little for a picture of this size, or, where that is not known, of 17 million pixels.
    """
    try:
        with warnings.catch_warnings(), Image.open(io.BytesIO(data), formats=FORMATS) as image:
            warnings.simplefilter("ignore")
            num_pixels = image.width * image.height
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - its size is damaged too, or the decoder finds no memory to begin with
        num_pixels = 1 << 24
    np.empty(_NEEDED * num_pixels, np.uint8)  # reserved, and given back without being touched


def looks_cut(data: bytes) -> bool:
    """Whether a JPEG, PNG, WebP or AVIF ends before its end marker, or before the length it gives itself."""
    if data.startswith(b"\xff\xd8"):
        return b"\xff\xd9" not in data[-64:]
    if data.startswith(b"\x89PNG"):
        return b"IEND" not in data[-64:]
    if data.startswith(b"RIFF"):
        return int.from_bytes(data[4:8], "little") + 8 > len(data)
    if data[4:8] == b"ftyp":
        at = 0
        while at + 8 <= len(data) and (length := int.from_bytes(data[at : at + 4], "big")) >= 8:
            at += length
        return at > len(data)
    return False
