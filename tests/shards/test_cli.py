"""What the command lines share."""

import signal
import subprocess
import sys
import time

import pytest

ENDING = """
import atexit, time
from shards import cli
atexit.register(lambda: (print("ending", flush=True), time.sleep(1)))
cli.run_and_exit(lambda _: 75)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_that_comes_while_a_command_ends_leaves_its_exit_code(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", ENDING], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ending\n"
        process.send_signal(number)
    assert process.returncode == 75


HANGING = """
import atexit, time
from shards import cli

def main(_):
    atexit.register(lambda: (print("ending", flush=True), time.sleep(60)))
    return CODE

cli.run_and_exit(main)
"""


@pytest.mark.parametrize("code", [0, 75])
def test_signal_ends_a_command_that_hangs_at_its_end_with_its_exit_code(code: int) -> None:
    program = HANGING.replace("CODE", str(code))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ending\n"
        time.sleep(1.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == code


def test_a_command_that_was_stopped_and_hangs_at_its_end_is_ended() -> None:
    program = "from shards import cli\ncli._ENDING_S = 0.1\n" + HANGING.replace("CODE", "75")
    process = subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL, check=False, timeout=30)
    assert process.returncode == 75
