"""What every command line of the project shares: errors as one paragraph, and exit codes."""

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from shards.errors import UserError, describe

OURS = ("shards", "pipelines", "xctrain")
STOPPED = 75


def run_and_exit(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """``run`` as the whole of a process. Its exit code stands: a signal that comes while Python ends changes nothing."""
    code = run(main)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


def run(main: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> int:
    """Call ``main`` and turn what a user can cause into a message and an exit code; ``--debug`` shows the traceback.

    0 done, 1 failed, 2 wrong usage or config, 75 stopped by a signal after saving. ``main`` may return any of them.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]
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
