import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines.errors import BuildError, InterruptedBuildError
from pipelines.signals import ended_by_signals

SIGNALS = pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])


def get_signal(signum: int) -> None:
    os.kill(os.getpid(), signum)
    time.sleep(10)


def get_signal_in_a_lock(signum: int) -> None:
    try:
        get_signal(signum)
    finally:
        raise RuntimeError("cannot release un-acquired lock")


@SIGNALS
def test_signal_ends_the_block_and_is_as_before_after_it(signum: int) -> None:
    before = signal.getsignal(signum)
    with pytest.raises(InterruptedBuildError, match=r"^it was stopped$") as error, ended_by_signals("it was stopped"):
        get_signal(signum)
    assert error.value.exit_code == 75
    assert signal.getsignal(signum) is before


@SIGNALS
def test_signal_counts_also_where_a_library_makes_another_error_of_it(signum: int) -> None:
    with pytest.raises(InterruptedBuildError, match=r"^it was stopped$"), ended_by_signals("it was stopped"):
        get_signal_in_a_lock(signum)


def test_error_without_a_signal_stays_itself() -> None:
    with pytest.raises(BuildError, match=r"^a disk$") as error, ended_by_signals("it was stopped"):
        raise BuildError("a disk")
    assert error.value.exit_code == 1


IN_EXEC = """
import sys
from pipelines.errors import InterruptedBuildError
from pipelines.signals import ended_by_signals
try:
    with ended_by_signals(""):
        exec("import os, time; os.kill(os.getpid(), SIGNUM); time.sleep(10)")
except InterruptedBuildError as error:
    sys.exit(error.exit_code)
"""


@SIGNALS
def test_exit_code_holds_where_a_text_is_executed_meanwhile(signum: int, tmp_path: Path) -> None:
    (tmp_path / "ended.py").write_text(IN_EXEC.replace("SIGNUM", str(int(signum))))
    path = os.pathsep.join([str(tmp_path), *sys.path])
    program = [sys.executable, "-m", "ended"]  # as the command lines are started: with -c Python ends otherwise
    assert subprocess.run(program, env={**os.environ, "PYTHONPATH": path}, check=False).returncode == 75
