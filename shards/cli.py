"""What every command line of the project shares: errors as one paragraph, and exit codes."""

import argparse
import atexit
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from shards.errors import Stopped, UserError, describe

OURS = ("shards", "pipelines", "xctrain")
STOPPED = 75
SAME_SIGNAL_S = 1.0  # a terminal and a launcher may both deliver one Ctrl-C
_ENDING_S = 60.0


def run_and_exit(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """``main`` as the whole of a process. Its exit code stands whatever signals come while Python ends.

    Where a library hangs then, a signal ends the process, and a minute does if a signal had stopped ``main``.
    """
    atexit.register(_handle, signal.SIG_IGN)  # the first one registered is called last; then nothing is left to hang
    code = _run(main, sys.argv[1:])
    ended = time.monotonic()

    def leave(_number: int, _frame: object) -> None:
        if time.monotonic() - ended > SAME_SIGNAL_S:
            os._exit(code)

    _handle(leave)
    if code == STOPPED:
        timer = threading.Timer(_ENDING_S, os._exit, [code])
        timer.daemon = True
        timer.start()
    sys.exit(code)


def _handle(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def run(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """The exit code of ``main`` in a process that goes on: what it does at signals is undone."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _run(main, argv)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Call ``main`` and turn what a user can cause into a message and an exit code; ``--debug`` shows the traceback.

    0 done, 1 failed, 2 wrong usage or config, 75 stopped by a signal after saving. ``main`` may return any of them.
    """
    debug = "--debug" in argv
    arguments = [a for a in argv if a != "--debug"]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # no name or caption is odd enough to end a command
    try:
        return main(arguments)
    except UserError as error:
        if debug:
            raise
        print(f"{'' if error.exit_code == STOPPED else 'error: '}{error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if debug or not error.name or error.name.partition(".")[0] in OURS:
            raise
        print(
            f"error: {sys.executable}: the Python package {error.name.partition('.')[0]} is not installed there; run "
            "`make install` once, then `source .venv/bin/activate`, or call .venv/bin/python instead",
            file=sys.stderr,
        )
        return 2
    except BrokenPipeError:
        # The reader of our output (head, less) has gone; there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if debug:
            raise
        print(f"error: {describe(error)}", file=sys.stderr)
        return 1
    except MemoryError:
        if debug:
            raise
        print("error: memory ran out; give this process more, or less to do at once, and run it again", file=sys.stderr)
        return 1
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return STOPPED
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return 130


class ShowVersion(argparse.Action):
    """``--version``: that of the project, whose three command lines belong together."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: object) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show the version of the project and end")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print it and end the process."""
        from importlib.metadata import version

        print(f"xctrain {version('xctrain')}")
        parser.exit()


def parse_with_settings(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse ``argv``; ``section.field=value`` texts may stand anywhere, also behind an option, where argparse takes none.

    They are collected in ``overrides``, for the commands that have such an argument.
    """
    arguments, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(arguments, "overrides") or any(text.startswith("-") for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest
    return arguments
