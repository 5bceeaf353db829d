"""Images at addresses: below a folder of an object store or web server, in a zip there, or each at its own URL."""

import hashlib
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import PurePosixPath
from typing import TypeVar
from urllib.parse import urlsplit

from pipelines.errors import BuildError, PassingError
from pipelines.filters import Reason, Rejection
from pipelines.images import Images, Stamp, unsafe
from pipelines.sources.paths import leads_out
from shards.remote import TRIES, Found, NoBucketError, Remote, RemoteError, UnreachableError, is_remote

T = TypeVar("T")

MOST_SILENT = 20  # addresses in a row that could not be reached, while none ever could: then it is not they
_RUN = time.time_ns()  # stands for a version where none is known: another run reads the file again


class RemoteImages:
    """The files below an address. A store lists them once; of a web server each is asked for."""

    def __init__(self, location: str) -> None:
        """Raises ConfigError: the package for such addresses is missing."""
        self._remote = Remote(location)
        self._has_list = not location.startswith("http")

    def are_far(self, names: Sequence[str]) -> bool:
        return True

    @cached_property
    def _files(self) -> dict[str, Found]:
        return _or_fail(self._remote.list)

    def stamp(self, file_name: str) -> Stamp | Rejection:
        if verdict := unsafe(file_name):
            return verdict
        if not self._has_list:
            return (1, _RUN)
        found = self._files.get(str(PurePosixPath(file_name)))
        return missing() if found is None else _stamp(found)

    def read(self, file_name: str) -> bytes | Rejection:
        """A store that does not answer fails the build: the file may be a good one."""
        try:
            return _or_fail(lambda: self._remote.read(str(PurePosixPath(file_name))))
        except FileNotFoundError:
            return missing()


class UrlImages:
    """Images whose name is an address are fetched from there, others are those of ``local``."""

    def __init__(self, local: Images) -> None:
        self._local = local
        self._answered: set[str] = set()
        self._silent: dict[str, int] = {}  # hosts that never answered, and how often

    def are_far(self, names: Sequence[str]) -> bool:
        return any(map(is_remote, names))

    def stamp(self, file_name: str) -> Stamp | Rejection:
        if is_remote(file_name):
            return (1, _RUN)
        if isinstance(file_name, str) and leads_out(file_name):
            return Rejection(
                Reason.MISSING_FILE,
                "leads out of the folder of images and was not followed; source.images has to be a folder above it",
            )
        return self._local.stamp(file_name)

    def read(self, file_name: str) -> bytes | Rejection:
        """A dead address is a rejection; a host that answered before and does not any more fails the build."""
        if not is_remote(file_name):
            return self._local.read(file_name)
        host = urlsplit(file_name).netloc.rpartition("@")[2]
        data: bytes | Rejection
        try:
            data = Remote(file_name, tries=1 if host in self._silent else TRIES).read()
        except (FileNotFoundError, NoBucketError):
            data = Rejection(Reason.MISSING_FILE, "no such file at this address")
        except UnreachableError as error:
            return self._unreachable(host, error)
        except RemoteError as error:
            data = Rejection(Reason.UNREADABLE_FILE, _short(error))
        self._answered.add(host)
        self._silent.pop(host, None)
        return data

    def _unreachable(self, host: str, error: UnreachableError) -> Rejection:
        if host in self._answered:
            raise PassingError(f"{error}; {host} has answered before, so this may pass; finished shards are kept")
        self._silent[host] = self._silent.get(host, 0) + 1
        if not self._answered and sum(self._silent.values()) >= MOST_SILENT:
            raise PassingError(f"{error}; none of {MOST_SILENT} images could be reached; finished shards are kept")
        return Rejection(Reason.UNREADABLE_FILE, f"{host} does not answer")


def missing() -> Rejection:
    """What is said of a file that is not there."""
    return Rejection(Reason.MISSING_FILE, "no such file among the images")


def _or_fail(function: Callable[[], T]) -> T:
    try:
        return function()
    except UnreachableError as error:
        raise PassingError(f"{error}; finished shards are kept") from None
    except RemoteError as error:
        raise BuildError(f"{error}; finished shards are kept") from None


def _stamp(found: Found) -> Stamp:
    version = int.from_bytes(hashlib.sha256(found.version.encode()).digest()[:8], "big") if found.version else _RUN
    return found.num_bytes, version


def _short(error: Exception) -> str:
    """The first part of a message: what is to be done about an address is not for a list of rejections."""
    return str(error).partition("; ")[0].partition(": ")[2][:200]
