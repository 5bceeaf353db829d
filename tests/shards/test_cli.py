"""What the command lines share."""

import signal
import subprocess
import sys

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
