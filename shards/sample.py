"""One image with its captions, and the two tar members that hold it."""

import hashlib
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shards.errors import DamagedSampleError, ShardsError

if TYPE_CHECKING:
    from PIL.Image import Image

EXTENSIONS = ("jpg", "png", "webp")
MAX_KEY = 90  # KEY.json must fit into the 100 bytes of a tar header's name, see ustar.py
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
_READABLE = re.compile(r"(?=.*[a-z_-])[0-9a-z_-]{1,64}")
_HASHED = re.compile(r".*-[0-9a-f]{20}")
_KEY = re.compile(rf"[0-9a-z_-]{{1,{MAX_KEY}}}")


@dataclass(frozen=True)
class Sample:
    """An encoded picture and what is known about it.

    key         [0-9a-z_-]+, unique in the dataset; no dots, as readers split names at the first dot
    image       the encoded picture
    extension   jpg, png or webp, following the content
    meta        KEY.json: image_id, file_name, width, height, captions, source ...

    Raises:
        ShardsError: the key or the extension is not one that the format allows.
    """

    key: str
    image: bytes
    extension: str
    meta: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not is_key(self.key):
            raise ShardsError(f"key {self.key!r}: expected 1 to {MAX_KEY} of 0-9 a-z _ -", key=self.key)
        if self.extension not in EXTENSIONS:
            raise ShardsError(
                f"{self.key}: extension {self.extension!r}, expected one of {', '.join(EXTENSIONS)}",
                key=self.key,
            )

    @property
    def captions(self) -> tuple[str, ...]:
        """All captions of the picture, in the order of the source."""
        return tuple(self.meta["captions"])

    def members(self) -> tuple[tuple[str, bytes], tuple[str, bytes]]:
        """Name and payload of the sample's tar members, in their order in the tar."""
        return (f"{self.key}.{self.extension}", self.image), (f"{self.key}.json", canonical_json(self.meta))

    def open_image(self) -> "Image":
        """The decoded picture, always RGB.

        Raises:
            DamagedSampleError: the bytes are not a whole picture.
        """
        from PIL import Image, ImageOps

        try:
            with Image.open(io.BytesIO(self.image)) as image:
                if "orientation" in self.meta:  # of a tar that another tool wrote; the build stores upright pictures
                    return ImageOps.exif_transpose(image).convert("RGB")
                return image.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DamagedSampleError(
                f"{self.key}: {self.key}.{self.extension} cannot be decoded: {error}; "
                "run `python -m shards verify` on its folder",
                key=self.key,
            ) from error


def key_of_id(image_id: int | str) -> str:
    """The key of a built sample. Numbers have at least 12 digits; a text that can be a key is its own; others end in a hash.

    The three forms cannot meet: only numbers are all digits, and a text that looks hashed is hashed too.
    """
    if isinstance(image_id, int):
        return f"{image_id:012d}"
    if _READABLE.fullmatch(image_id) and not _HASHED.fullmatch(image_id):
        return image_id
    slug = re.sub(r"[^0-9a-z_]+", "-", image_id.lower())[-40:].strip("-")
    return f"{slug}-{hashlib.sha256(image_id.encode('utf-8', 'surrogatepass')).hexdigest()[:20]}"


def is_key(text: str) -> bool:
    """Whether the format allows it as a key."""
    return _KEY.fullmatch(text) is not None


def canonical_json(value: Any) -> bytes:
    """JSON with one spelling per value: sorted keys, no spaces, ASCII only so that even a lone surrogate survives.

    Raises:
        ValueError: a number is NaN or infinite.
    """
    return _ENCODER.encode(value).encode("ascii")
