"""Prefect server, process worker and deployment on this machine, until Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pipelines import prefect_api
from pipelines.errors import BuildError
from shards.errors import ConfigError
from shards.parent import die_with_parent

PROJECT = Path(__file__).resolve().parents[1]
WORK_POOL = "xctrain"
GRACE_S = 10


def serve(port: int) -> int:
    """Start the parts in turn, say how to use them, wait for Ctrl-C or SIGTERM, and end them all."""
    if not (PROJECT / "prefect.yaml").is_file():
        raise ConfigError(f"{PROJECT}: has no prefect.yaml; run this from a checkout of the project")
    prefect_api.prepare_environment()
    prefect_api.require_home()
    prefect_api.require_free(port)
    url = f"http://127.0.0.1:{port}/api"
    os.environ["PREFECT_API_URL"] = url
    os.environ[prefect_api.SERVE_PID] = str(os.getpid())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    running: list[subprocess.Popen[bytes]] = []
    try:
        running.append(_start("server", "start", "--host", "127.0.0.1", "--port", str(port)))
        prefect_api.wait_for(url, running[0], "its own messages stand above")
        _do("work-pool", "create", "--type", "process", "--overwrite", WORK_POOL)
        _do("--no-prompt", "deploy", "--all")
        _close_runs(url)  # what an earlier serve left behind when it was killed
        running.append(_start("worker", "start", "--pool", WORK_POOL, "--type", "process", signum=signal.SIGKILL))
        print(
            f"\nReady: http://127.0.0.1:{port}\n"
            f"  PREFECT_API_URL={url} prefect deployment run build-shards/coco -p source=DIR -p out=DIR\n"
            "Ctrl-C ends server and worker.",
            flush=True,
        )
        while True:
            for process in running:
                if (code := process.poll()) is not None:
                    raise BuildError(f"{' '.join(map(str, process.args[3:5]))} ended by itself with code {code}")  # type: ignore[index]
            time.sleep(0.5)
    except KeyboardInterrupt:
        return 0
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave the parts running
        if len(running) > 1:
            _end(running[1:])
            with suppress(OSError):
                _close_runs(url)
        _end(running[:1])


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "prefect", *arguments]


def _start(*arguments: str, signum: int = signal.SIGTERM) -> "subprocess.Popen[bytes]":
    """A part; ``signum`` is what it gets when this process dies: a worker told to terminate would wait for its runs."""
    return subprocess.Popen(
        _command(*arguments),
        cwd=PROJECT,
        start_new_session=True,  # Ctrl-C reaches this process alone, which ends the worker before the server
        preexec_fn=partial(die_with_parent, os.getpid(), signum),
    )


def _do(*arguments: str) -> None:
    done = subprocess.run(_command(*arguments), cwd=PROJECT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"prefect {' '.join(arguments)}: {' '.join((done.stderr or done.stdout).split())[-800:]}")


def _close_runs(url: str) -> None:
    """Report the runs of our worker that are said to run as crashed: it is not there, so nobody else will."""
    found = _ask(
        f"{url}/flow_runs/filter",
        {
            "flow_runs": {"state": {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}},
            "work_pools": {"name": {"any_": [WORK_POOL]}},
        },
    )
    for run in found:
        message = "serve ended while the build was at work; run it again, finished shards are kept"
        state = {"type": "CRASHED", "message": message}
        _ask(f"{url}/flow_runs/{run['id']}/set_state", {"state": state, "force": True})


def _ask(url: str, question: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(question).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=prefect_api.ANSWER_S) as reply:
        return json.load(reply)


def _end(running: "list[subprocess.Popen[bytes]]") -> None:
    for process in reversed(running):
        process.terminate()
        try:
            process.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
