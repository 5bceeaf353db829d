"""Signals, and processes that do not outlive the one that started them."""

import signal
import sys
import time

import runs


def child(code: str) -> "runs.subprocess.Popen[str]":
    return runs.start([sys.executable, "-c", code])


STOP = """
import time
from xctrain import processes
{before}
stop = processes.StopRequest()
print("ready", flush=True)
while not stop:
    time.sleep(0.01)
print("asked", flush=True)
{after}
"""


SAID = "asked\nasked to stop: that is after this step and its save; a second signal ends at once, unsaved\n"


def test_one_signal_asks_and_does_not_end() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        process = child(STOP.format(before="", after="raise SystemExit(75)"))
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert runs.finish(process, code=75) == SAID


def test_second_signal_leaves_at_once() -> None:
    process = child(STOP.format(before="processes.SAME_SIGNAL_S = 0.05", after="time.sleep(60)"))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "asked\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    runs.finish(process, code=1)


def test_one_ctrl_c_that_arrives_twice_is_one_signal() -> None:
    process = child(STOP.format(before="processes.SAME_SIGNAL_S = 60", after="time.sleep(0.2); raise SystemExit(75)"))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    assert runs.finish(process, code=75) == SAID


def test_no_torch_is_needed_to_launch() -> None:
    code = "import sys; import xctrain.launch, xctrain.__main__; assert 'torch' not in sys.modules"
    runs.finish(child(code))
