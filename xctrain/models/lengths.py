"""Sequences that must fit in `model.max_length`: an answer is never cut."""

from collections.abc import Callable, Iterable

from shards.errors import ConfigError


def require_fit(key: str, length: int, max_length: int | None) -> None:
    """Refuse a row of ``length`` tokens that does not fit.

    Raises:
        ConfigError: names the length that would do.
    """
    if max_length and length > max_length:
        raise ConfigError(
            f"{key}: needs {length} tokens, model.max_length is {max_length}; set it to {length} or more, an answer is "
            "never cut",
            key=key,
        )


def require_all_fit(
    samples: Iterable[tuple[str, int, int, Iterable[str]]],
    max_length: int | None,
    *,
    prompt_length: Callable[[int, int], int],
    answer_length: Callable[[str], int],
    added: int,
) -> None:
    """Refuse a max_length that a sample does not fit in; samples are (key, width, height, captions).

    ``prompt_length`` counts the tokens before the answer, by width and height; ``answer_length`` those of a caption
    with what ends it, which are at most ``added`` more than the caption has bytes.

    Raises:
        ConfigError: names the number of samples that do not fit, one of them, and the length that would do.
    """
    if not max_length:
        return
    num_samples, too_long, largest, first = 0, 0, 0, ""
    prompt_lengths: dict[tuple[int, int], int] = {}
    for key, width, height, captions in samples:
        num_samples += 1
        if (width, height) not in prompt_lengths:
            prompt_lengths[width, height] = prompt_length(width, height)
        length = prompt_lengths[width, height]
        # A token is at least a byte: most captions need not be encoded to know that they fit.
        room = max_length - length - added
        length += max((answer_length(text) for text in captions if len(text.encode()) > room), default=0)
        if length > max_length:
            too_long += 1
            first = first or f"{key} needs {length}"
            largest = max(largest, length)
    if too_long:
        raise ConfigError(
            f"model.max_length is {max_length}: {too_long} of {num_samples} samples do not fit, {first} tokens; set it "
            f"to {largest} or more, an answer is never cut"
        )
