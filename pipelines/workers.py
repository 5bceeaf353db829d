"""Build processes: fresh Python processes, one JSON line in, one out. Nothing is forked and nothing is pickled.

A worker ends when its parent does, however that ends: its standard input closes. Until then it holds the build's lock,
so that a new build in the same folder waits for the last worker of a killed one.
"""

import fcntl
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipelines.errors import BuildError
from pipelines.progress import Progress
from shards.errors import describe


class Workers:
    """At most ``limit`` processes, started when first needed. ``call`` is for threads: each call occupies one process."""

    def __init__(self, limit: int, lock: Path) -> None:
        self._limit = limit
        self._lock_path = lock
        self._free: queue.LifoQueue[subprocess.Popen[str] | None] = queue.LifoQueue()
        for _ in range(limit):
            self._free.put(None)
        self._started: list[subprocess.Popen[str]] = []
        self._mutex = threading.Lock()
        self._closed = False

    def __len__(self) -> int:
        return self._limit

    def call(self, job: str, arguments: Mapping[str, Any], progress: Progress = lambda count: None) -> Any:
        """What ``job`` returns for ``arguments``, computed in a worker.

        Raises:
            BuildError: the job failed over something a user can cause, or its process was killed.
        """
        process = self._free.get()
        try:
            process = process or self._start()
            return self._exchange(process, {"job": job, "arguments": arguments}, progress)
        finally:
            self._free.put(process)

    def _start(self) -> subprocess.Popen[str]:
        root = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        with self._mutex:
            if self._closed:
                raise BuildError("the build was stopped")
            process = subprocess.Popen(
                [sys.executable, "-m", "pipelines.workers", str(self._lock_path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C reaches the parent alone, which then ends its workers
            )
            self._started.append(process)
        return process

    def _exchange(self, process: subprocess.Popen[str], request: Mapping[str, Any], progress: Progress) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        for line in process.stdout:
            reply = json.loads(line)
            if "progress" in reply:
                progress(reply["progress"])
            elif "error" in reply:
                raise BuildError(reply["error"])
            elif "bug" in reply:
                raise RuntimeError(f"in a build process:\n{reply['bug']}")
            else:
                return reply["result"]
        if self._closed:
            raise BuildError("the build was stopped")
        code = process.wait()
        ending = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        hint = " (the kernel does that when memory runs out)" if code == -signal.SIGKILL else ""
        raise BuildError(f"a build process {ending}{hint}; run the build again, finished shards are kept")

    def close(self) -> None:
        """End every worker, those at work too. Safe to call twice."""
        with self._mutex:
            self._closed = True
        for process in self._started:
            process.kill()
        for process in self._started:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError, ValueError):
                    pipe.close()  # type: ignore[union-attr]
        self._started.clear()


def serve(lock: Path, jobs: Mapping[str, Callable[[Any, Progress], Any]]) -> None:
    """The worker's side: answer requests from standard input until it closes."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library that prints must not write into the replies
    held = lock.open("rb")
    fcntl.flock(held, fcntl.LOCK_SH)
    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()

    def reply(**fields: Any) -> None:
        replies.write(json.dumps(fields) + "\n")
        replies.flush()

    while True:
        request = json.loads(requests.get())
        try:
            reply(result=jobs[request["job"]](request["arguments"], lambda count: reply(progress=count)))
        except BuildError as error:
            reply(error=str(error))
        except OSError as error:
            reply(error=f"{describe(error)}; finished shards are kept")
        except Exception:  # noqa: BLE001 - a bug, shown in the parent with this process's traceback
            import traceback

            reply(bug=traceback.format_exc())


def _listen(requests: "queue.Queue[str]") -> None:
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)  # the parent is gone: leave at once, in the middle of a shard too


if __name__ == "__main__":
    from pipelines import build

    serve(Path(sys.argv[1]), build.JOBS)
