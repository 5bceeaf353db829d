"""Who does a build's jobs: processes of this machine, or threads of this process.

A build process is a fresh Python process, one JSON line in, one out; nothing is forked and nothing is pickled. It ends when
its parent does, however that ends (its standard input closes), and when its build no longer holds the folder.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

from pipelines.errors import BuildError, PassingError, system_error
from pipelines.folder_lock import LOST, FolderLock, lost
from pipelines.progress import Progress
from shards.errors import ConfigError, UserError

Jobs = Mapping[str, Callable[[Any, Progress], Any]]
_KINDS: dict[str, type[UserError]] = {kind.__name__: kind for kind in (BuildError, PassingError, ConfigError)}


class Workers(Protocol):
    """``call`` is for threads, as many as ``len``: it returns once the job is done."""

    def __len__(self) -> int: ...

    def call(self, job: str, arguments: Mapping[str, Any], progress: Progress = lambda count: None) -> Any:
        """What ``job`` returns for ``arguments``.

        Raises:
            PassingError: a process was killed, or a disk or server failed.
            BuildError: the job failed over something else that a user can cause.
        """

    def close(self) -> None:
        """End every job, those at work too. Safe to call twice."""


class Threads:
    """Jobs in the threads that call. ``close`` ends them at their next sign of progress."""

    def __init__(self, limit: int, lock: FolderLock, jobs: Jobs) -> None:
        self._limit = limit
        self._lock = lock
        self._jobs = jobs
        self._closed = False
        self._quiet = ExitStack()
        # Each job silences Pillow for itself; between threads such switches get mixed up, so it stays silent throughout.
        self._quiet.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")

    def __len__(self) -> int:
        return self._limit

    def call(self, job: str, arguments: Mapping[str, Any], progress: Progress = lambda count: None) -> Any:
        def go_on(count: int) -> None:
            if self._closed:
                raise _stopped()
            self._lock.require()
            progress(count)

        go_on(0)
        try:
            return self._jobs[job](arguments, go_on)
        except OSError as error:
            raise system_error(error) from None

    def close(self) -> None:
        self._closed = True
        self._quiet.close()


class Processes:
    """At most ``limit`` processes, started when first needed, or by ``start``. A call occupies one; a killed one is replaced."""

    def __init__(self, limit: int, lock: FolderLock) -> None:
        self._limit = limit
        self._lock = lock
        self._free: queue.LifoQueue[subprocess.Popen[str] | None] = queue.LifoQueue()
        for _ in range(limit):
            self._free.put(None)
        self._started: list[subprocess.Popen[str]] = []
        self._mutex = threading.Lock()
        self._closed = False

    def __len__(self) -> int:
        return self._limit

    def call(self, job: str, arguments: Mapping[str, Any], progress: Progress = lambda count: None) -> Any:
        process = self._free.get()
        try:
            process = process or self._start()
            return self._exchange(process, {"job": job, "arguments": arguments}, progress)
        finally:
            self._free.put(process if process and process.poll() is None else None)

    def start(self) -> None:
        """Start them all, to be ready when the first job comes. Call it before any job."""
        for _ in range(self._limit):
            self._free.get_nowait()
        for _ in range(self._limit):
            self._free.put(self._start())

    def _start(self) -> subprocess.Popen[str]:
        root = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        with self._mutex:
            if self._closed:
                raise _stopped()
            process = subprocess.Popen(
                [sys.executable, "-m", "pipelines.workers", str(self._lock.folder), self._lock.run],
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
                raise _KINDS.get(reply["kind"], BuildError)(reply["error"])
            elif "bug" in reply:
                raise RuntimeError(f"in a build process:\n{reply['bug']}")
            else:
                return reply["result"]
        if self._closed:
            raise _stopped()
        code = process.wait()
        if code == LOST:
            raise lost(self._lock.folder)
        ending = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        hint = " (the kernel does that when memory runs out)" if code == -signal.SIGKILL else ""
        raise PassingError(f"a build process {ending}{hint}; run the build again, finished shards are kept")

    def close(self) -> None:
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


def _stopped() -> BuildError:
    return BuildError("the build was stopped")


def serve(lock: FolderLock, jobs: Jobs) -> None:
    """The worker's side: answer requests from standard input until it closes."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library that prints must not write into the replies
    lock.join()
    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()

    def reply(**fields: Any) -> None:
        try:
            replies.write(json.dumps(fields) + "\n")
            replies.flush()
        except BrokenPipeError:
            os._exit(0)  # the parent is gone

    while True:
        request = json.loads(requests.get())
        try:
            reply(result=jobs[request["job"]](request["arguments"], lambda count: reply(progress=count)))
        except UserError as error:
            reply(error=str(error), kind=type(error).__name__)
        except OSError as error:
            failed = system_error(error)
            reply(error=str(failed), kind=type(failed).__name__)
        except Exception:  # noqa: BLE001 - a bug, shown in the parent with this process's traceback
            import traceback

            reply(bug=traceback.format_exc())


def _listen(requests: "queue.Queue[str]") -> None:
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)  # the parent is gone: leave at once, in the middle of a shard too


if __name__ == "__main__":
    from pipelines import jobs

    serve(FolderLock(Path(sys.argv[1]), sys.argv[2]), jobs.JOBS)
