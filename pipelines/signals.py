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
        # A library's own handler raises what is no Exception either, such as Prefect's TerminationSignal.
        if asked is not None or not isinstance(error, Exception | SystemExit | GeneratorExit):
            raise Stopped(message) from None
        raise


def _handle(handler: Callable[[int, object], None]) -> None:
    for number in _SIGNALS:
        signal.signal(number, handler)
