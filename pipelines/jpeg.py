"""JPEGs by TurboJPEG: strictly, and without working out what nobody asks for."""

import numpy as np
import simplejpeg
from numpy.typing import NDArray

MAX_SCANS = (
    500  # a progressive photo has some ten; each costs a pass over the picture, so thousands hold a build for hours
)
_SPACES = {"L": "GRAY", "CMYK": "CMYK"}
_PROGRESSIVE = (0xC2, 0xC6, 0xCA, 0xCE)
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # markers that begin a frame
_SCAN = 0xDA


def decode(data: bytes, mode: str, min_side_px: int = 0) -> NDArray[np.uint8]:
    """Pixels of a JPEG that Pillow opens in ``mode``, as Pillow has them, of shape [height, width] where they are gray.

    With ``min_side_px``, at the smallest of the scales 1/8, 2/8 ... that gives sides of at least that.

    Raises:
        ValueError: libjpeg has any warning, as over zeros or cut scans inside, where Pillow is silent. "Extraneous bytes
            before marker" is one: it may be harmless padding, or all that can be seen of damage which made the decoder
            run out of picture before it ran out of data, and nothing tells the two apart.
    """
    require_few_scans(data)
    sides = {"min_width": min_side_px, "min_height": min_side_px}
    pixels = np.asarray(simplejpeg.decode_jpeg(data, colorspace=_SPACES.get(mode, "RGB"), **sides))
    return pixels[..., 0] if mode == "L" else pixels


def least_range(data: bytes, mode: str) -> int:
    """The channel that varies most spans at least this many levels; and the file is whole. A third faster than ``decode``.

    At an eighth of its size, all compressed data are read as strictly as for the whole picture; only arithmetic on
    numbers, which cannot fail, is left out. Its pixels are means of 8 x 8, which some pixel must reach, but for
    rounding and for chroma that is interpolated across the edge of such a block: by a sixteenth in each direction, 57
    levels at most. Of three channels green is looked at.

    Raises:
        ValueError: as for ``decode``.
    """
    pixels = decode(data, mode, 1)
    channel = pixels if mode == "L" else np.ascontiguousarray(pixels[..., 1])
    return max(0, int(channel.max()) - int(channel.min()) - 64)


def require_few_scans(data: bytes) -> None:
    """Refuse a file of more than ``MAX_SCANS`` scans; their number bounds how long it can take to decode.

    Raises:
        ValueError: there are more.
    """
    # in compressed data every ff is followed by 00; headers may hold some by chance
    if _may_have_many_scans(data) and (count := data.count(bytes((0xFF, _SCAN)))) > MAX_SCANS:
        raise ValueError(f"{count} scans, expected at most {MAX_SCANS}")


def _may_have_many_scans(data: bytes) -> bool:
    """Not if the first scan holds all components, each of them whole, as in most files: counting takes 0.1 ms."""
    at, progressive, num_components = 2, False, 0
    while at + 10 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == _SCAN:
            return progressive or data[at + 4] < num_components
        if marker in _FRAMES:
            progressive, num_components = marker in _PROGRESSIVE, data[at + 9]
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return True
