"""A picture's 64-bit perceptual hash: alike pictures have hashes that differ in few bits.

ImageHash's ``phash``: which of 64 slow waves in the brightness are stronger than their median. It survives other sizes and
qualities and small changes of brightness (4 bits or fewer differ), not cropping beyond 2 % or mirroring, and does not
see colour. Two photos that have nothing in common differ in some 32 bits.
"""

import io
import warnings
import zlib
from importlib import metadata

from PIL import Image, ImageOps

from pipelines import jpeg
from pipelines.filters import Limits, judge_header
from pipelines.measure import FORMATS, check_png, orientation, require_memory, to_rgb
from shards.sample import canonical_json

SIDE_PX = 64  # the hash looks at 32 x 32 of brightness; a JPEG is decoded at the smallest scale that gives twice that
VERSION = 1  # raise it when the same file gives another hash
FLAT_LEVELS = 16  # below it the waves are noise, or all equal: flat pictures would be near duplicates of each other


def seen(limits: Limits) -> int:
    """A number, not 0, for all that a file's hash depends on besides its bytes; 0 where no hash is wanted."""
    if limits.near_duplicate_bits is None:
        return 0
    versions = [VERSION, metadata.version("ImageHash")]
    names = ("min_side_px", "max_pixels", "max_aspect_ratio", "color_modes")
    return zlib.crc32(canonical_json([versions, {name: getattr(limits, name) for name in names}])) | 1


def fingerprint(data: bytes, limits: Limits) -> int | None:
    """The hash of an image file; None where it cannot stand for another: damaged, of a wrong size, or nearly flat.

    Raises:
        MemoryError: there was too little to tell.
    """
    import imagehash  # an optional package, and slow to import

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gray = _brightness(data, limits)
            return None if gray is None else int(str(imagehash.phash(gray)), 16)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - decoders raise anything at all; the build says later what is wrong with the file
        require_memory(data)
        return None


def _brightness(data: bytes, limits: Limits) -> Image.Image | None:
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        if judge_header(*image.size, image.mode, limits):
            return None
        if image.format in ("JPEG", "MPO") and image.mode in ("L", "RGB") and orientation(image) == 1:
            gray = Image.fromarray(jpeg.decode(data, image.mode, SIDE_PX)).convert("L")
        else:
            if image.format == "PNG":
                check_png(data)
            gray = to_rgb(ImageOps.exif_transpose(image)).convert("L")
    darkest, brightest = gray.resize((32, 32), Image.Resampling.LANCZOS).getextrema()
    return gray if brightest - darkest >= FLAT_LEVELS else None  # type: ignore[operator]
