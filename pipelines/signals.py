"""SIGTERM and Ctrl-C as the end of a command that keeps what is finished."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shards.cli import SAME_SIGNAL_S, STOPPED
from shards.errors import Stopped

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def ended_by_signals(message: str) -> Iterator[None]:
    """A command's last block, which a signal ends. Further signals change nothing, nor do those after the block.

    Only where what is to be tidied up hangs, one that comes a second or more after the first ends the process, with the
    same exit code. Handlers stay: ``shards.cli.run`` gives them back.

    The exception of a signal may come up inside a lock's own code, which then objects to a lock that is half taken. So
    what counts is that a signal came, not as what it comes out of the block.

    Raises:
        Stopped: with ``message``.
    """
    asked: float | None = None
    over = False

    def interrupt(_number: int, _frame: object) -> None:
        nonlocal asked
        if over:
            return
        if asked is None:
            asked = time.monotonic()
            raise Stopped(message)
        if time.monotonic() - asked > SAME_SIGNAL_S:
            os.write(2, f"{message}\n".encode())
            os._exit(STOPPED)

    _handle(interrupt)
    try:
        try:
            yield
        finally:
            over = True
            _handle(interrupt)  # a library's may still be there
    except BaseException as error:
        if asked is not None or _signal_in(error):
            raise Stopped(message) from None
        raise


@contextmanager
def uncovered() -> Iterator[None]:
    """The body of a flow, out of which what a library's handler raised at a signal comes as that.

    Prefect fails to tidy up a task that was still being made, with a ValueError: the run would count as failed, not crashed.
    """
    try:
        yield
    except Exception as error:
        if found := _signal_in(error):
            raise found from None
        raise


def _signal_in(error: BaseException | None) -> BaseException | None:
    """What a signal raised, such as Prefect's TerminationSignal, which is no Exception: this, or what this came up after."""
    while isinstance(error, Exception | SystemExit | GeneratorExit):
        error = error.__cause__ or error.__context__
    return error


def _handle(handler: Callable[[int, object], None]) -> None:
    for number in _SIGNALS:
        signal.signal(number, handler)
