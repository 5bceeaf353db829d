"""``Record``: one image with its captions as a source gives them; and the names that ids go by."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ImageId = int | str
_WHOLE_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")


@dataclass(frozen=True, slots=True)
class Record:
    """One image before filtering. Captions and file name stand as they were found, and may be of any type.

    image_id    as the source gives it, or the file name; unique in the source
    file_name   what people know the picture by; goes into KEY.json
    captions    in the order of the source
    about       what KEY.json says of origin and licence; plain values
    place       where ``Images`` finds the bytes; None: ``file_name``
    split       what the source itself says of the split; None: nothing
    """

    image_id: ImageId
    file_name: Any
    captions: tuple[Any, ...]
    about: Mapping[str, Any] = field(default_factory=dict)
    place: str | None = None
    split: str | None = None


def as_id(value: ImageId) -> ImageId:
    """Text that is a whole number, as CSV has it, is that number: "17" and 17 are one id. "017" stays a text."""
    if isinstance(value, str) and _WHOLE_NUMBER.fullmatch(value) and int(value) < 2**63:
        return int(value)
    return value


def id_bytes(image_id: ImageId) -> bytes:
    """16 bytes that stand for an id: numbers come first and in their order, texts by a hash."""
    if isinstance(image_id, int):
        return image_id.to_bytes(16, "big")
    return b"\1" + hashlib.blake2b(image_id.encode("utf-8", "surrogatepass"), digest_size=15).digest()


def id_order(image_id: ImageId) -> tuple[bool, ImageId]:
    """Key by which ids of both kinds can be sorted: numbers first."""
    return isinstance(image_id, str), image_id
