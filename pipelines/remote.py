"""A shard built by a worker of a Dask or Ray cluster, on this machine or another one that sees the same folders."""

import shutil
import socket
import uuid
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from pipelines import plan
from pipelines.errors import BuildError, system_error
from pipelines.folder_lock import FolderLock
from pipelines.workers import Processes
from shards.errors import ConfigError, UserError

SAME_PATHS = "every worker must see the source and the shard folder under the paths that they have where the flow runs"


def versions() -> dict[str, str]:
    """What the bytes of a shard depend on besides its records."""
    from PIL import features

    return {
        "xctrain plan": str(plan.VERSION),
        "pillow": version("pillow"),
        "simplejpeg": version("simplejpeg"),
        "zlib": str(features.version("zlib")),
    }


def build_shard(name: str, order: str, run: str, expected: Mapping[str, str]) -> dict[str, int]:
    """Counts of what became of the shard's records. ``order``: path of what ``Build.write_order`` wrote for it.

    The work is done by a process of its own, as on one machine: it ends with this worker and with the build, and a decoder
    that crashes does not take the worker along.

    Raises:
        BuildError: names this machine, and the path where one is the reason.
    """
    lock = FolderLock(Path(order).parents[1], run)
    attempt = lock.folder / "attempts" / f"{name}-{uuid.uuid4().hex}"
    try:
        if not Path(order).exists():
            raise BuildError(f"{order} cannot be seen there; {SAME_PATHS}", path=order)
        _require(expected)
        attempt.mkdir(parents=True)
        workers = Processes(1, lock)
        try:
            counts: dict[str, int] = workers.call("build", {"slice": order, "attempt": str(attempt)})
        finally:
            workers.close()
            shutil.rmtree(attempt, ignore_errors=True)
    except OSError as error:
        raise _there(system_error(error)) from None
    except UserError as error:
        raise _there(error) from None
    return counts


def _require(expected: Mapping[str, str]) -> None:
    found = versions()
    if wrong := [f"{name} {found[name]} (here {here})" for name, here in expected.items() if found[name] != here]:
        raise BuildError(f"has {', '.join(wrong)}; other versions can write other bytes; install the same ones there")


def _there(error: UserError) -> UserError:
    advice = f"; {SAME_PATHS}" if isinstance(error, ConfigError) else ""
    return type(error)(f"on {socket.gethostname()}: {error}{advice}", path=error.path)
