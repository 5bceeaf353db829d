"""Errors of the build that a user can cause."""

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shards.errors import UserError, describe

if TYPE_CHECKING:
    from shards.verify import Finding

# What the system says of disks, servers and connections that may be well again a moment later.
_PASSING = frozenset(
    getattr(errno, name)
    for name in (
        "EAGAIN", "EBUSY", "ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN", "EHOSTUNREACH", "EINTR", "EIO",
        "ENETDOWN", "ENETRESET", "ENETUNREACH", "ENOLINK", "EPIPE", "EREMOTEIO", "ESTALE", "ETIMEDOUT",
    )
)  # fmt: skip


class BuildError(UserError):
    """Base of what goes wrong while a build runs."""


class PassingError(BuildError):
    """What may be gone at the next try: a killed process, a disk or server that failed. ``build.retries`` tries again."""


class RejectShareError(BuildError):
    """More records were rejected than ``build.max_reject_share`` allows; nothing was published."""


class InterruptedBuildError(BuildError):
    """A signal ended the build. Finished shards are kept, so the same command goes on from there."""

    exit_code = 75


class DamageError(BuildError):
    """A shard folder is not what its manifest says; ``findings`` are all that were found."""

    def __init__(self, message: str, findings: "Sequence[Finding]" = ()) -> None:
        super().__init__(message)
        self.findings = findings


class DownloadError(BuildError):
    """A file could not be fetched, or is not the one that was asked for. What came of it is kept."""


@contextmanager
def enough_memory(file_name: str) -> Iterator[None]:
    """Raises PassingError: memory ran out over a file, which is no fault of the file."""
    try:
        yield
    except MemoryError:
        raise PassingError(
            f"{file_name}: there is too little memory to decode it; lower build.processes or filters.max_pixels, or give the "
            "process more; finished shards are kept"
        ) from None


def system_error(error: OSError) -> BuildError:
    """What the system refused while a shard was built, as an error that says whether it may pass."""
    passing = isinstance(error, ConnectionError | TimeoutError) or error.errno in _PASSING
    kind = PassingError if passing else BuildError
    return kind(f"{describe(error)}; finished shards are kept", path=error.filename)
