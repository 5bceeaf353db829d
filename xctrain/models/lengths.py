"""Tokens of samples, counted without laying rows out; they must fit in `model.max_length`: an answer is never cut."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from shards.errors import ConfigError


@dataclass(frozen=True)
class RowLengths:
    """Counts the tokens of a sample's rows."""

    prompt: Callable[[int, int], int]  # before the answer, by width and height of the picture
    answer: Callable[[str], int]  # of a caption with what ends it
    added: int  # an answer has at most so many tokens more than its caption has bytes
    _known: dict[tuple[int, int], int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def longest(self, width: int, height: int, captions: Iterable[str]) -> int:
        """Tokens of the longest row of a sample."""
        return self.of_prompt(width, height) + max((self.answer(text) for text in captions), default=0)

    def of_prompt(self, width: int, height: int) -> int:
        """Tokens before the answer; each size is counted once."""
        if (width, height) not in self._known:
            self._known[width, height] = self.prompt(width, height)
        return self._known[width, height]


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
    lengths: RowLengths,
) -> None:
    """Refuse a max_length that a sample does not fit in; samples are (key, width, height, captions).

    Raises:
        ConfigError: names the number of samples that do not fit, one of them, and the length that would do.
    """
    if not max_length:
        return
    num_samples, too_long, largest, first = 0, 0, 0, ""
    for key, width, height, captions in samples:
        num_samples += 1
        length = lengths.of_prompt(width, height)
        # A token is at least a byte: most captions need not be encoded to know that they fit.
        room = max_length - length - lengths.added
        length += max((lengths.answer(text) for text in captions if len(text.encode()) > room), default=0)
        if length > max_length:
            too_long += 1
            first = first or f"{key} needs {length}"
            largest = max(largest, length)
    if too_long:
        raise ConfigError(
            f"model.max_length is {max_length}: {too_long} of {num_samples} samples do not fit, {first} tokens; set it "
            f"to {largest} or more, an answer is never cut"
        )
