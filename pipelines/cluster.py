"""Prefect's own task runners for Dask and Ray, found by ``build.address`` or started for the time of a build."""

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

from pipelines.config import RunConfig
from pipelines.errors import BuildError
from shards.errors import ConfigError, UserError

ANSWER_S = 10
WORKERS_S = 60  # a cluster that grows on demand needs a while for its first machine
LIBRARIES = ("asyncio", "concurrent", "dask", "distributed", "grpc", "ray", "tornado")
LOCAL = ("127.0.0.1", "::1", "localhost")
START = {"dask": "`dask scheduler` and `dask worker`", "ray": "`ray start --head`"}


def task_runner(config: RunConfig) -> Any:
    """The task runner that ``config`` asks for.

    Raises:
        ConfigError: its library is not installed, or nothing answers at the address.
    """
    if config.address and config.address != "auto":
        _require_answer(config)
    try:
        return _dask(config) if config.runner == "dask" else _ray(config)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"build.runner is {config.runner}, the package {error.name} is not installed; "
            f"pip install 'xctrain[{config.runner}]', here and on every worker"
        ) from None


def _dask(config: RunConfig) -> Any:
    from prefect_dask import DaskTaskRunner

    logging.getLogger("distributed").setLevel(logging.WARNING)
    if config.address:
        return DaskTaskRunner(address=config.address)
    kwargs = {"n_workers": config.num_processes, "threads_per_worker": 1, "dashboard_address": ":0"}
    return DaskTaskRunner(cluster_kwargs=kwargs)


def _ray(config: RunConfig) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from prefect_ray import RayTaskRunner

    quiet = {"logging_level": "warning", "log_to_driver": False}
    if config.address:
        return RayTaskRunner(address=config.address, init_kwargs=quiet)
    own = {"address": "local", "num_cpus": config.num_processes, "include_dashboard": False}
    return RayTaskRunner(
        init_kwargs={**quiet, **own}
    )  # without it Ray would join whatever cluster runs on this machine


@contextmanager
def at_work(config: RunConfig, runner: Any) -> Iterator[None]:
    """The task runner at work. Later, while the cluster has no worker, it waits for new ones.

    Raises:
        BuildError: the cluster does not take the build in, or a Dask cluster has no worker from the start; later, that
            it lost workers or connections and what its library says of it.
    """
    with _errors_in_words(config), _started(config, runner):
        yield


@contextmanager
def _started(config: RunConfig, runner: Any) -> Iterator[None]:
    terminate = signal.getsignal(signal.SIGTERM)
    with ExitStack() as stack:
        try:
            stack.enter_context(runner)
        except (OSError, RuntimeError) as error:  # as builtins, so that nothing tells that the library raised them
            raise BuildError(
                f"the {config.runner} cluster{f' at {config.address}' if config.address else ''} did not start or take this "
                f"build in ({' '.join(str(error).split())[:500]}); see that it runs ({START[config.runner]}), then try again"
            ) from None
        if terminate and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, terminate)  # Ray's own handler would abort this process
        if config.runner == "dask":
            try:
                runner.client.wait_for_workers(1, timeout=WORKERS_S)
            except TimeoutError:
                raise BuildError(
                    f"the Dask scheduler at {config.address} has no workers, {WORKERS_S} s were waited; start some with "
                    f"`dask worker {config.address}`, on machines that see the source and the shard folder"
                ) from None
        yield


def _place(address: str) -> tuple[str, int]:
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise ConfigError(f"build.address is {address!r}, expected one such as tcp://HOST:8786 or ray://HOST:10001")
    return host, port


def _require_answer(config: RunConfig) -> None:
    host, port = _place(str(config.address))
    try:
        socket.create_connection((host, port), timeout=ANSWER_S).close()
    except OSError as error:
        raise ConfigError(
            f"build.address is {config.address}, but nothing answers there ({error.strerror or error}); start that cluster "
            f"({START[config.runner]}), or leave build.address out, which uses a cluster of its own on this machine"
        ) from None


def require_reachable_api(config: RunConfig, url: str) -> None:
    """Check that workers on other machines can reach the Prefect API at ``url``.

    Raises:
        ConfigError: they cannot, as it listens on this machine alone.
    """
    if config.address in (None, "auto") or _place(str(config.address))[0] in LOCAL:
        return
    if urlsplit(url).hostname in LOCAL:
        raise ConfigError(
            f"build.address is {config.address}, whose workers report to the Prefect API, but that one ({url}) can only be "
            "reached from this machine; start a server that they can reach and set PREFECT_API_URL to it"
        )


@contextmanager
def _errors_in_words(config: RunConfig) -> Iterator[None]:
    """Turn what the cluster's library raises over lost workers and connections into an error of the build."""
    try:
        yield
    except UserError:
        raise
    except SystemError as error:
        # What a signal raises inside Ray's compiled code comes out as the cause of this.
        raise error if isinstance(error.__cause__, Exception | None) else error.__cause__ from None
    except ModuleNotFoundError as error:
        raise BuildError(
            f"a worker of the cluster has no Python package {error.name}; install the same xctrain there as here"
        ) from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in LIBRARIES:
            raise
        what = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        raise BuildError(
            f"the {config.runner} cluster lost the work ({what}); see that its workers live and have memory, then run the "
            "build again, finished shards are kept"
        ) from None
