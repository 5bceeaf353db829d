"""Files at ``s3://``, ``gs://``, ``https://`` and what else fsspec knows. Credentials are what the environment gives."""

import random
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from shards.errors import ConfigError, ShardsError

T = TypeVar("T")

TRIES = 5
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 8.0
CONNECT_S, READ_S = 10, 60  # patience with a server

_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}
_EXTRAS = {"s3fs": "s3", "gcsfs": "gs", "aiohttp": "https"}
_NO_USE_TRYING = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
# Of botocore and google-auth, by name as neither is imported: another try finds no other credentials.
_NO_CREDENTIALS = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "DefaultCredentialsError",
    "RefreshError",
)


class RemoteError(ShardsError):
    """A store or server refused."""


class NoRangesError(RemoteError):
    """A web server sends whole files only."""


class NoBucketError(ConfigError):
    """There is nothing at an address that files could be in."""


class UnreachableError(RemoteError):
    """It did not answer, or failed, several times in a row: later it may be well again."""


@dataclass(frozen=True)
class Found:
    """What a store says of a file: its size in bytes, and a text that changes with its content where there is one."""

    num_bytes: int
    version: str


def is_remote(location: str | Path) -> bool:
    """Whether a location is an address rather than a path."""
    return isinstance(location, str) and re.match(r"[a-z][a-z0-9+.-]*://", location) is not None


def shown(location: str) -> str:
    """An address without what may be secret: user, password, query."""
    scheme, _, rest = location.partition("://")
    rest = rest.partition("?")[0] if scheme.startswith("http") else rest
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


class Remote:
    """A folder at an address; files by their names below it. Passing errors are tried again, others raised at once.

    Raises, from every method:
        FileNotFoundError: there is no such file.
        NoBucketError: there is no such bucket.
        RemoteError: the store refuses, or does not answer.
    """

    def __init__(self, location: str, tries: int = TRIES, patience_s: float | None = None) -> None:
        """``patience_s``: seconds after which an answer, its tries included, is waited for no longer.

        Raises ConfigError: the package for such addresses is not installed, or there is none.
        """
        self.location = location.rstrip("/")
        self._tries = tries
        self._patience_s = patience_s
        self._fs, self._root = _filesystem(self.location, READ_S if patience_s is None else patience_s / 3)

    def __str__(self) -> str:
        return shown(self.location)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _try(self, name: str, function: Callable[[], T]) -> T:
        what = shown(f"{self.location}/{name}" if name else self.location)
        try:
            return retried(what, function, self._tries, self._patience_s)
        except FileNotFoundError as error:
            if "bucket does not exist" in str(error):
                raise self._no_bucket() from None
            raise

    def _no_bucket(self) -> NoBucketError:
        bucket = self._root.partition("/")[0]
        return NoBucketError(f"{self}: there is no bucket {bucket}; make it, or check the address", path=str(self))

    def read(self, name: str = "", start: int | None = None, stop: int | None = None) -> bytes:
        """The bytes of a file, or of a range of it."""
        data: bytes = self._try(name, lambda: self._fs.cat_file(self._path(name), start=start, end=stop))
        if start is not None and stop is not None and len(data) > stop - start:
            data = data[start:stop]  # a web server that knows no ranges sends everything
        return data

    def read_range(self, name: str, start: int, stop: int, num_bytes: int) -> bytes:
        """The bytes [start, stop) of a file of ``num_bytes`` bytes, all of them, and no others sent.

        Raises:
            NoRangesError: the server sends whole files only.
        """

        def read() -> bytes:
            if not self.location.startswith("http"):
                data: bytes = self._fs.cat_file(self._path(name), start=start, end=stop)
            else:
                data = self._http_range(name, start, stop, num_bytes)
            if len(data) > stop - start:
                raise _NoRangesError(f"{len(data)} bytes for a range of {stop - start}")
            if len(data) < stop - start:
                raise ConnectionError(f"sent {len(data)} of the {stop - start} bytes from {start}")
            return data

        return self._try(name, read)

    def _http_range(self, name: str, start: int, stop: int, num_bytes: int) -> bytes:
        """As fsspec's files do it: unlike ``cat_file`` they look at the answer's head before they take its body."""
        try:
            with self._fs.open(self._path(name), "rb", size=num_bytes, cache_type="none") as file:
                file.seek(start)
                return cast(bytes, file.read(stop - start))
        except ValueError as error:
            raise _NoRangesError(str(error)) from None
        except Exception as error:
            if getattr(error, "status", None) in (404, 410):
                raise FileNotFoundError(name) from None
            raise

    def find(self, name: str = "") -> Found | None:
        """What the store says of a file; None where there is none."""
        try:
            return _found(self._try(name, lambda: self._fs.info(self._path(name))))
        except FileNotFoundError:
            return None

    def list(self) -> dict[str, Found]:
        """All files below the address by name; of a web server, none, as it has no list."""
        if self.location.startswith("http"):
            return {}
        try:
            files = self._try("", lambda: self._fs.find(self._root, detail=True))
        except FileNotFoundError:
            return {}
        return {path.removeprefix(self._root).lstrip("/"): _found(values) for path, values in files.items()}

    def fetch(self, name: str, path: Path) -> None:
        """Copy a file here."""
        self._try(name, lambda: self._fs.get_file(self._path(name), str(path)))

    def require_bucket(self) -> None:
        """Check that there is something to store files in.

        Raises:
            NoBucketError: there is no such bucket.
        """
        try:
            self._try("", lambda: self._fs.info(self._root.partition("/")[0]))
        except FileNotFoundError:
            raise self._no_bucket() from None

    def put(self, name: str, path: Path) -> None:
        """Store a local file under ``name``: whole or not at all, in place of what was there."""
        try:
            self._try(name, lambda: self._fs.put_file(str(path), self._path(name)))
        except FileNotFoundError as error:
            raise RemoteError(f"{self}/{name}: {_said(error)}; check the address") from None
        found, size = self.find(name), path.stat().st_size
        if found is None or found.num_bytes != size:
            where = f"has {found.num_bytes} bytes" if found else "is not there"
            raise RemoteError(f"{self}/{name}: {where} after {size} bytes were stored; run it again")

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with suppress(FileNotFoundError):
            self._try(name, lambda: self._fs.rm_file(self._path(name)))


class _NoRangesError(Exception):
    """A server that sends whole files only."""


def retried(what: str, function: Callable[[], T], tries: int = TRIES, patience_s: float | None = None) -> T:
    """What the function returns; errors that may pass are tried again, with growing waits.

    Raises:
        FileNotFoundError: there is no such file.
        UnreachableError: ``tries`` in a row failed, or ``patience_s`` seconds have passed. RemoteError: it is refused.
    """
    began = time.monotonic()
    for failures in range(1, tries + 1):
        try:
            return function()
        except FileNotFoundError:
            raise
        except Exception as error:  # noqa: BLE001 - each store has its own kinds
            if (problem := _permanent(error)) is not None:
                kind = NoRangesError if isinstance(error, _NoRangesError) else RemoteError
                raise kind(f"{what}: {problem}") from None
            late = patience_s is not None and time.monotonic() - began >= patience_s
            if failures == tries or late:
                failed = "1 try" if failures == 1 else f"{failures} tries in a row"
                raise UnreachableError(
                    f"{what}: {_said(error)} ({failed} failed); check the network and the server, then run it again, it goes "
                    "on where it stopped"
                ) from None
        time.sleep(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (failures - 1)) * random.uniform(0.5, 1))
    raise AssertionError


def _permanent(error: Exception) -> str | None:
    """What to say of an error that another try would not change; None of one that may pass."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & set(_NO_CREDENTIALS):
        return (
            f"there are no credentials for it ({_said(error)}); set those of the store in the environment, such as "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or FSSPEC_S3_ANON=true for a public bucket"
        )
    if isinstance(error, _NoRangesError):
        return (
            f"the server sends whole files where ranges are asked for ({error}); use one that answers range requests, or "
            "copy the folder to a disk here"
        )
    status = getattr(error, "status", None)
    if isinstance(error, PermissionError) or status in (401, 403):
        return f"access is denied ({_said(error)}); check the credentials in the environment, and the rights they give"
    if isinstance(error, _NO_USE_TRYING) or (
        isinstance(status, int) and 400 <= status < 500 and status not in (408, 425, 429)
    ):
        return f"{_said(error)}; check the address"
    if isinstance(error, ValueError | TypeError | AttributeError | NotImplementedError):
        return f"{_said(error)}; check the address"
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return f"{_said(error)}; check the host, or its certificate"
    return None


def _said(error: Exception) -> str:
    """The error's words, without the query of any address in it."""
    text = " ".join(str(error).split())[:300] or type(error).__name__
    return re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]*", r"\1", text)


def _found(values: dict[str, Any]) -> Found:
    names = ("ETag", "etag", "md5Hash", "generation", "LastModified", "mtime", "updated", "last_modified")
    version = next((str(values[name]) for name in names if values.get(name)), "")
    size = values.get("size")
    return Found(-1 if size is None else int(size), version)


def _filesystem(location: str, read_s: float) -> tuple[Any, str]:
    scheme = location.partition("://")[0]
    package = _PACKAGES.get(scheme, "fsspec")
    options: dict[str, Any] = {"use_listings_cache": False}
    try:
        import fsspec

        if package == "s3fs":
            # Tries are ours: both libraries' own ones multiply to minutes with a server that is down.
            retries = {"max_attempts": 1}
            options["config_kwargs"] = {"connect_timeout": CONNECT_S, "read_timeout": read_s, "retries": retries}
        elif package == "aiohttp":
            import aiohttp

            # Its own limit is five minutes for a file, however long that is.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=read_s)
            options["client_kwargs"] = {"timeout": timeout, "trust_env": True}
        fs, root = fsspec.core.url_to_fs(location, **options)
    except ImportError:
        extra = f"; pip install 'xctrain[{_EXTRAS[package]}]'" if package in _EXTRAS else ""
        raise ConfigError(
            f"{shown(location)}: addresses that begin with {scheme}:// need the Python package {package}{extra}, or give a "
            "local path"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{shown(location)}: {error}; expected s3://, gs://, https:// or a local path") from None
    if package == "s3fs":
        fs.retries = 1
    return fs, str(root).rstrip("/")
