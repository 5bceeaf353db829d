"""Where the flow finds a Prefect API: the one in ``PREFECT_API_URL``, or an embedded one that lives as long as the run."""

import http.client
import logging
import os
import queue
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from pipelines.errors import BuildError
from pipelines.retries import trying_again
from shards.errors import ConfigError, UserError
from shards.parent import die_with_parent

GONE_S = 60  # without an answer, a server that only starts anew is back
LOOK_EVERY_S = 5
ANSWER_S = 10  # patience with an API that should be there
SERVE_PID = "XCTRAIN_SERVE_PID"
START_S = 180  # the first start sets up the database, which has taken over a minute on slow disks

# Set before Prefect is imported, and only where the environment does not say otherwise.
ENVIRONMENT = {
    "PREFECT_HOME": str(Path(".prefect").absolute()),
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
    # SQLite has one writer at a time; the others wait for it instead of giving up with "database is locked".
    "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "60",
    "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": str(START_S),
}
# As Prefect starts its own temporary server: no pages, no services that only a lasting server needs. States of task runs
# are written many at a time; one by one, as is the default, some hundred are still unwritten when the flow has ended.
SERVER_ENVIRONMENT = {
    "PREFECT_UI_ENABLED": "0",
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT__SERVER_FINAL": "1",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "1000",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
}


def prepare_environment() -> None:
    """Project-local Prefect home, no telemetry, patient database. Call it before Prefect is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def require_home() -> None:
    """Check that Prefect can keep its database where ``PREFECT_HOME`` says.

    Raises:
        ConfigError: it cannot; nothing was started.
    """
    home = Path(os.environ["PREFECT_HOME"])
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            pass
    except OSError as error:
        raise ConfigError(
            f"{home}: Prefect cannot keep its database there ({error.strerror}); set PREFECT_HOME to a folder that this "
            "user may write to, or add --plain, which uses no Prefect at all",
            path=home,
        ) from None


def end_with_server() -> None:
    """In a flow run that a worker of ``serve`` started: end this process when that of ``serve`` ends, however it does.

    The worker starts flow runs in sessions of their own, which outlive it.
    """
    if not (pid := os.environ.get(SERVE_PID)):
        return

    def watch(descriptor: int) -> None:
        select.select([descriptor], [], [])
        os._exit(1)

    try:
        descriptor = os.pidfd_open(int(pid))
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=watch, args=(descriptor,), daemon=True).start()


def say_in_one_paragraph() -> None:
    """In a flow run: what a user can cause is logged once, as its message, instead of three times with a traceback."""
    said: list[BaseException] = []

    def shorten(record: logging.LogRecord) -> bool:
        if _is_retry(record):
            return True
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, UserError):
            return True
        if record.name != "prefect.flow_runs" or error in said:
            return False
        said.append(error)
        record.msg, record.args, record.exc_info, record.exc_text = str(error), (), None, None
        return True

    for name in ("prefect.engine", "prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(shorten)


@contextmanager
def api() -> Iterator[str]:
    """URL of the API to use inside the block.

    Raises:
        BuildError: ``PREFECT_API_URL`` is set and nothing answers there, or the embedded API does not start.
    """
    from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    say_what_matters()
    with ExitStack() as stack:
        if url := PREFECT_API_URL.value():
            require_answer(url)
        else:
            url = stack.enter_context(embedded_api())
            # Heartbeats tell a lasting server which runs have died; ending them takes up to a second.
            stack.enter_context(temporary_settings({PREFECT_API_URL: url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}))
        stack.enter_context(_ended_without(url))
        try:
            yield url
        finally:
            _send_what_waits()


@contextmanager
def _ended_without(url: str) -> Iterator[None]:
    """End this process in the block when the API is gone for good; its build processes and locks end with it.

    Prefect itself would try seven seconds for each line and state of each task, and show a traceback each time.
    """
    done = threading.Event()

    def watch() -> None:
        answered = time.monotonic()
        while not done.wait(LOOK_EVERY_S):
            found = _what_is_wrong(url)
            if found is None:
                answered = time.monotonic()
            elif time.monotonic() - answered > GONE_S and not done.is_set():
                print(
                    f"\nerror: the Prefect API at {url} has not answered for {GONE_S} s ({found}), so this run was given up; "
                    "finished shards are kept; start that API again and run the build again, or add --plain, which uses no "
                    "Prefect at all",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def say_what_matters() -> None:
    """Leave out the lines of Prefect's that say nothing new to who has started a build."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_worth_a_line)


def _worth_a_line(record: logging.LogRecord) -> bool:
    """Of a run started here: no lines per task, which the bar shows, no traceback of what the caller reports itself, and
    no link, as the embedded API has no pages."""
    return _is_retry(record) or (
        record.name != "prefect.task_runs"
        and not record.exc_info
        # a build that was stopped is no crash, and its command says so
        and not record.getMessage().startswith(("Crash detected", "Finished in state Crashed"))
        and not record.getMessage().startswith("View at http://127.0.0.1")
    )


def _is_retry(record: logging.LogRecord) -> bool:
    """Whether Prefect says here that it tries a task again; that is put in our words."""
    if getattr(record, "retry", False):
        return True
    if not (record.name == "prefect.task_runs" and "Retry %s/%s" in str(record.msg) and isinstance(record.args, tuple)):
        return False
    _, error, attempt, retries, _ = record.args
    record.msg = trying_again(str(getattr(record, "task_run_name", "")), error, attempt, retries)
    record.args, record.retry = (), True
    return True


def _send_what_waits() -> None:
    """Prefect sends logs and events from threads of its own; without the server they would try again for a minute."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    EventsWorker.drain_all()
    APILogWorker.drain_all()


def require_answer(url: str) -> None:
    """Check that a Prefect API answers at ``url``.

    Raises:
        BuildError: it does not, or not in time.
    """
    reply: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=lambda: reply.put(_what_is_wrong(url)), daemon=True).start()
    try:
        found = reply.get(timeout=2 * ANSWER_S)  # a server may also send a byte now and then, or a resolver be slow
    except queue.Empty:
        found = f"no whole answer within {2 * ANSWER_S} s"
    if found:
        raise BuildError(
            f"PREFECT_API_URL is {url}, but no Prefect API answers there ({found}); start "
            "that server (`prefect server start`, or `make serve`), or do without it: unset PREFECT_API_URL, which "
            "uses an embedded API, or add --plain, which uses no Prefect at all"
        )


def _what_is_wrong(url: str) -> str | None:
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=ANSWER_S) as reply:
            kind = reply.headers.get_content_type()
        return None if kind == "application/json" else f"it sends {kind}, expected application/json"
    except urllib.error.HTTPError as error:
        # 401, 403: what a Prefect API does not allow, Prefect itself will say
        return None if error.code in (401, 403) else f"HTTP {error.code} {error.reason}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__


@contextmanager
def embedded_api() -> Iterator[str]:
    """A Prefect API on a free port of this machine, without web pages, in a process that ends with this one.

    Prefect has its own, but that one outlives a killed build and then holds the database against the next.
    """
    log = Path(os.environ["PREFECT_HOME"]) / "embedded-api.log"
    with socket.socket() as listener, log.open("wb") as log_file:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        command = "-m uvicorn --factory prefect.server.api.server:create_app --log-level error --lifespan on"
        server = subprocess.Popen(
            [sys.executable, *command.split(), "--fd", str(listener.fileno())],
            env={**os.environ, **SERVER_ENVIRONMENT},
            stdout=log_file,
            stderr=log_file,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C must not end it before the flow has reported its end
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    try:
        wait_for(url, server, f"look into {log}, remove {log.parent} and run again, or add --plain")
        yield url
    finally:
        server.terminate()
        try:
            server.wait(timeout=5)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def require_free(port: int) -> None:
    """Check that a server can listen on ``port``."""
    if not 0 < port < 65536:
        raise ConfigError(f"port {port}: expected 1 to 65535; choose another with --port")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            raise BuildError(
                f"port {port}: {error.strerror}; end what uses it, or choose another with --port"
            ) from None


def wait_for(url: str, server: "subprocess.Popen[bytes]", advice: str) -> None:
    """Return once the starting API answers; ``advice`` is for the case that it does not."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=START_S):
                return
        except OSError:
            time.sleep(0.1)
    ending = "" if server.poll() is None else f", it ended with code {server.poll()}"
    raise BuildError(f"the Prefect API did not answer within {START_S} s{ending}; {advice}")
