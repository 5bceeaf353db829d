"""Commands on a disk of a size of their own: a file system in memory, mounted in a name space that ends with them."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

_NO_RIGHT = 77
_TESTS = Path(__file__).parent


def run(disk: Path, size: str, script: str) -> "subprocess.CompletedProcess[str]":
    """``script`` in a shell that sees a disk of ``size`` (as tmpfs takes it) at ``disk``, with our packages in reach."""
    mount = f"mount -t tmpfs -o size={size} none {shlex.quote(str(disk))} || exit {_NO_RIGHT}"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f"{mount}\n{script}"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{_TESTS.parent}:{_TESTS}"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    if done.returncode == _NO_RIGHT or "unshare" in done.stderr:
        pytest.skip("this system lets no user mount a disk of its own")
    return done


def resize(disk: Path, size: str) -> str:
    """The line of a script that gives the disk another size."""
    return f"mount -o remount,size={size} {shlex.quote(str(disk))}"
