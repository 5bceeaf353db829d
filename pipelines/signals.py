"""SIGTERM and Ctrl-C as the end of a command that keeps what is finished."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from pipelines.errors import InterruptedBuildError


class _Ended(KeyboardInterrupt):
    """Not the plain one: where that has passed through ``exec`` of a text, as in a dataclass, Python ends by SIGINT after all."""


@contextmanager
def ended_by_signals(message: str) -> Iterator[None]:
    """A block of the main thread that a signal ends.

    The exception of a signal may come up inside a lock's own code, which then objects to a lock that is half taken. So
    what counts is that a signal came, not as what it comes out of the block.

    Raises:
        InterruptedBuildError: with ``message``.
    """
    asked = False

    def interrupt(_number: int, _frame: object) -> None:
        nonlocal asked
        asked = True
        raise _Ended

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    except BaseException as error:
        if asked or isinstance(error, KeyboardInterrupt):
            raise InterruptedBuildError(message) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
