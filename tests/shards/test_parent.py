"""Processes that end with the one that started them, whenever that is killed."""

import os
import signal
import subprocess
import sys

import pytest

START = """
import os, subprocess, sys
from shards.parent import die_with_parent
parent = os.getpid()
def between_fork_and_exec():
    {late}
    die_with_parent(parent)
subprocess.Popen(["sleep", "60"], preexec_fn=between_fork_and_exec, start_new_session=True)
os.kill(parent, 9)
"""
LATE = "os.kill(parent, 9)\n    while os.getppid() == parent: pass"


def child(code):
    return subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=30, check=False)


@pytest.mark.parametrize("late", ["pass", LATE], ids=["running", "before it could ask"])
def test_a_process_ends_with_its_parent(late):
    """``run`` returns once nobody has its pipe open any more."""
    assert child(START.format(late=late)).returncode == -signal.SIGKILL


def test_a_process_whose_parent_was_gone_before_it_asked_ends():
    ended = child("from shards.parent import die_with_parent; die_with_parent(1); print('still here')")
    assert (ended.returncode, ended.stdout) == (1, b"")


def test_a_process_lives_while_its_parent_does():
    code = f"from shards.parent import die_with_parent; die_with_parent({os.getpid()}); print('still here')"
    assert child(code).stdout == b"still here\n"
