"""Tars that another tool wrote: which of a sample's members are read, what its captions are, and what its key is here.

A sample is what WebDataset takes for one: neighbouring members with one name up to the first dot behind the last slash.
Its picture is its one member .jpg, .jpeg, .png or .webp, in capitals too. Its captions are in .txt or .caption (UTF-8,
the whole text is one caption) or in .json, an object: the texts of the list `captions`, or else the text `caption`.
Unicode is made NFC and white space is collapsed. Other members stay in the tar and are not read.

A key that the format allows (0-9 a-z _ -, at most 90) stays as it is, without folders in front. Any other becomes its
name in small letters, with - for what is not allowed, and the first 8 hex digits of the sha256 of its UTF-8 bytes behind
it: `train/Ab.jpg` is sample `ab-` and those of `train/Ab`.
"""

import hashlib
import json
import re
import unicodedata
from typing import Any

from shards.sample import MAX_KEY, is_key

PICTURES = ("jpg", "jpeg", "png", "webp")
CAPTIONS = ("txt", "caption", "json")  # the first that a folder's first sample has is the folder's
ORIENTATION = "orientation"  # name in KEY.json, and in a flag `orientation=6`

_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)")  # as in WebDataset and Megatron-Energon; not `.hidden`, not `README`
_META = re.compile(r"__[^/]*__($|/)")  # names such as __index__, which WebDataset keeps for itself


def split_name(member: str) -> tuple[str, str] | None:
    """A member's sample and extension, both as in the tar; None if it belongs to no sample."""
    match = _NAME.fullmatch(member)
    return None if match is None or _META.match(member) else (match[1], match[2])


def key_of(name: str) -> str:
    """The key here of the sample that is called ``name`` in its tar."""
    last = name.rpartition("/")[2]
    if is_key(name) or (name in (f"./{last}", last) and is_key(last)):
        return last
    digits = hashlib.sha256(name.encode("utf-8", "backslashreplace")).hexdigest()[:8]
    return f"{re.sub('[^0-9a-z_-]', '-', last.lower())[: MAX_KEY - 9]}-{digits}"


def captions_of(kind: str, payload: bytes) -> list[str]:
    """The captions in a member of one of the kinds in ``CAPTIONS``.

    Raises:
        ValueError: there are none, or it is not what its name says.
    """
    texts: Any
    if kind != "json":
        texts = [payload.decode("utf-8")]
    else:
        values = json.loads(payload)
        if not isinstance(values, dict):
            raise ValueError(f"holds a {type(values).__name__}, expected an object with `captions` or `caption`")
        texts = values["captions"] if "captions" in values else [values.get("caption")]
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError("has neither a list of texts `captions` nor a text `caption`")
    captions = [" ".join(unicodedata.normalize("NFC", text).split()) for text in texts]
    if not any(captions):
        raise ValueError("holds no caption")
    return [caption for caption in captions if caption]


def make_meta(
    kind: str, payload: bytes, *, member: str, width: int, height: int, flags: tuple[str, ...]
) -> dict[str, Any]:
    """What KEY.json would hold had the build written the sample; ``member`` is its picture's name in the tar."""
    values = json.loads(payload) if kind == "json" else {}
    values.pop(ORIENTATION, None)
    for flag in flags:
        name, _, value = flag.partition("=")
        if name == ORIENTATION:
            values[name] = int(value)
    captions = captions_of(kind, payload)
    return {**values, "file_name": member, "width": width, "height": height, "captions": captions}
