import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.errors import BuildError
from pipelines.signals import ended_by_signals, uncovered
from shards import cli
from shards.errors import Stopped

SIGNALS = pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def get_signal(signum: int) -> None:
    os.kill(os.getpid(), signum)
    time.sleep(10)


def get_signal_in_a_lock(signum: int) -> None:
    try:
        get_signal(signum)
    finally:
        raise RuntimeError("cannot release un-acquired lock")


def get_signals(signum: int, tidied: list[str]) -> None:
    try:
        get_signal(signum)
    finally:
        os.kill(os.getpid(), signum)
        time.sleep(0.01)
        tidied.append("up")


@SIGNALS
def test_signal_ends_the_block_and_further_ones_change_nothing(signum: int) -> None:
    with pytest.raises(Stopped, match=r"^it was stopped$"), ended_by_signals("it was stopped"):
        get_signal(signum)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)
    time.sleep(0.01)


@SIGNALS
def test_signal_after_the_block_changes_nothing(signum: int) -> None:
    with ended_by_signals("it was stopped"):
        pass
    os.kill(os.getpid(), signum)
    time.sleep(0.01)


@SIGNALS
def test_further_signals_disturb_no_tidying_up(signum: int) -> None:
    tidied: list[str] = []
    with pytest.raises(Stopped), ended_by_signals("it was stopped"):
        get_signals(signum, tidied)
    assert tidied


@SIGNALS
def test_signal_counts_also_where_a_library_makes_another_error_of_it(signum: int) -> None:
    with pytest.raises(Stopped, match=r"^it was stopped$"), ended_by_signals("it was stopped"):
        get_signal_in_a_lock(signum)


class LibrarysSignalError(BaseException):
    """What a library's own handler raises."""


def get_signal_of_a_library(signum: int) -> None:
    """It has a handler of its own, and fails to tidy up."""

    def interrupt(_number: int, _frame: object) -> None:
        raise LibrarysSignalError

    signal.signal(signum, interrupt)
    try:
        get_signal(signum)
    except LibrarysSignalError:
        raise ValueError("Task run is not set")  # noqa: B904 - as libraries do


@SIGNALS
def test_signal_counts_also_where_it_came_to_a_library_which_fails_at_it(signum: int) -> None:
    with pytest.raises(Stopped, match=r"^it was stopped$"), ended_by_signals("it was stopped"):
        get_signal_of_a_library(signum)
    with pytest.raises(LibrarysSignalError), uncovered():
        get_signal_of_a_library(signum)


def test_error_without_a_signal_comes_out_of_a_flow_as_itself() -> None:
    with pytest.raises(BuildError, match=r"^a disk$"), uncovered():
        raise BuildError("a disk") from OSError("full")


@SIGNALS
def test_a_command_that_a_signal_ends_has_code_75_and_gives_the_signals_back(
    signum: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(_: object) -> int:
        with ended_by_signals("it was stopped"):
            get_signal(signum)
        return 0

    before = signal.getsignal(signum)
    assert cli.run(main, []) == 75
    assert capsys.readouterr().err == "it was stopped\n"
    assert signal.getsignal(signum) is before


def test_error_without_a_signal_stays_itself() -> None:
    with pytest.raises(BuildError, match=r"^a disk$") as error, ended_by_signals("it was stopped"):
        raise BuildError("a disk")
    assert error.value.exit_code == 1


COMMAND = """
import os, time
from pipelines.signals import ended_by_signals
from shards import cli

def main(_):
    with ended_by_signals("it was stopped"):
        WORK
    return 0

cli.run_and_exit(main)
"""


def start(work: str, tmp_path: Path) -> "subprocess.Popen[str]":
    """A command of its own that does some work in the block, as the command lines are started: with -c Python ends otherwise."""
    (tmp_path / "ended.py").write_text(COMMAND.replace("WORK", work))
    path = os.pathsep.join([str(tmp_path), *sys.path])
    program = [sys.executable, "-m", "ended"]
    return subprocess.Popen(
        program, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@SIGNALS
def test_exit_code_holds_where_a_text_is_executed_meanwhile(signum: int, tmp_path: Path) -> None:
    work = f'exec("os.kill(os.getpid(), {int(signum)}); time.sleep(10)")'
    process = start(work, tmp_path)
    assert process.communicate()[1] == "it was stopped\n"
    assert process.returncode == 75


@SIGNALS
def test_a_second_signal_a_second_later_ends_what_hangs_with_the_same_code(signum: int, tmp_path: Path) -> None:
    work = """
        try:
            print("at work", flush=True)
            time.sleep(60)
        finally:
            print("tidying up", flush=True)
            time.sleep(60)
    """.strip()
    with start(work, tmp_path) as process:
        assert process.stdout
        assert process.stdout.readline() == "at work\n"
        process.send_signal(signum)
        assert process.stdout.readline() == "tidying up\n"
        process.send_signal(signum)  # the same signal delivered twice, by a terminal and a launcher
        time.sleep(1.1)
        assert process.poll() is None
        process.send_signal(signum)
        _, errors = process.communicate(timeout=200)
    assert errors == "it was stopped\n"
    assert process.returncode == 75


def test_a_storm_of_signals_ends_a_command_with_0_or_75(tmp_path: Path) -> None:
    work = 'print("at work", flush=True)\n        time.sleep(0.01)'
    codes = set()
    for _ in range(10):
        with start(work, tmp_path) as process:
            assert process.stdout
            process.stdout.readline()
            while process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.send_signal(signal.SIGTERM)
            _, errors = process.communicate()
        codes.add(process.returncode)
        assert "Traceback" not in errors
    assert codes <= {0, 75}
