"""Why a record is left out: a fixed list of reasons, and the rules on measured pictures. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """The whole list; it is part of the shard format."""

    MISSING_FILE = "missing_file"
    UNREADABLE_FILE = "unreadable_file"
    EMPTY_FILE = "empty_file"
    NOT_AN_IMAGE = "not_an_image"
    TRUNCATED = "truncated"
    CORRUPT_DATA = "corrupt_data"
    TOO_MANY_PIXELS = "too_many_pixels"
    TOO_SMALL = "too_small"
    ASPECT_RATIO = "aspect_ratio"
    COLOR_MODE = "color_mode"
    NOT_FINITE = "not_finite"
    CONSTANT_IMAGE = "constant_image"
    NO_CAPTION = "no_caption"
    DUPLICATE_IMAGE = "duplicate_image"
    KNOWN_ID = "known_id"  # of the dataset that is added to
    NEAR_DUPLICATE = "near_duplicate"
    SPLIT_LEAK = "split_leak"


@dataclass(frozen=True)
class Limits:
    """What a file is judged by, of ``FilterConfig``, which describes each. Plain: build processes start in half the time
    without pydantic.
    """

    min_side_px: int
    max_pixels: int
    max_aspect_ratio: float
    constant_levels: int
    color_modes: Sequence[str] | None
    max_side_px: int | None
    resized_quality: int
    near_duplicate_bits: int | None


@dataclass(frozen=True)
class Rejection:
    """A reason, and what was found. The detail never holds a path outside the source: rejects.jsonl is data."""

    reason: Reason
    detail: str


@dataclass(frozen=True)
class Measurements:
    """What a decoded picture is like.

    Units: width and height in pixels after orientation; channel_range in levels of 255, of the most varied channel.
    """

    width: int
    height: int
    finite: bool
    channel_range: int


def judge_header(width: int, height: int, mode: str, limits: Limits) -> Rejection | None:
    """Verdict on what the header says, before anything is decoded; ``mode`` is Pillow's name of the colour mode."""
    if verdict := judge_size(width, height, limits):
        return verdict
    if limits.color_modes is not None and mode not in limits.color_modes:
        return Rejection(Reason.COLOR_MODE, f"is {mode}, expected {' or '.join(limits.color_modes)}")
    return None


def judge_size(width: int, height: int, limits: Limits) -> Rejection | None:
    """Verdict on the size alone."""
    if width * height > limits.max_pixels:
        return Rejection(
            Reason.TOO_MANY_PIXELS, f"{width}x{height} = {width * height} pixels, at most {limits.max_pixels}"
        )
    short, long = sorted((width, height))
    if short < limits.min_side_px:
        return Rejection(Reason.TOO_SMALL, f"{width}x{height}, sides of at least {limits.min_side_px} px")
    if long > limits.max_aspect_ratio * short:
        return Rejection(
            Reason.ASPECT_RATIO, f"{width}x{height} = {long / short:.1f} to 1, at most {limits.max_aspect_ratio:g}"
        )
    return None


def judge_pixels(measured: Measurements, limits: Limits) -> Rejection | None:
    """Verdict on the decoded pixels."""
    if not measured.finite:
        return Rejection(Reason.NOT_FINITE, "NaN or infinite pixels")
    if measured.channel_range <= limits.constant_levels:
        return Rejection(
            Reason.CONSTANT_IMAGE,
            f"no channel varies by more than {measured.channel_range} levels, expected over {limits.constant_levels}",
        )
    return None
