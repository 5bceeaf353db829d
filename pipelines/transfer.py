"""One file over HTTP into a partial file: goes on from the bytes that are there, and never joins two versions of it."""

import json
import logging
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx

from pipelines.errors import DownloadError, InterruptedBuildError
from pipelines.progress import Progress
from shards.atomic import write_file
from shards.errors import describe

NEWS = 1 << 20  # so many new bytes make the failures before them forgotten
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
LONGEST_ASKED_S = 300  # a server that asks for more with Retry-After is not waited for
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})  # answers that another try may change


@dataclass(frozen=True)
class Wanted:
    """A file to fetch, and what is known of it beforehand; digests in hex."""

    name: str
    url: str
    num_bytes: int | None = None
    sha256: str | None = None
    md5: str | None = None

    @property
    def has_digest(self) -> bool:
        return bool(self.sha256 or self.md5)

    @property
    def shown(self) -> str:
        """The URL without what may be secret: user, password, query."""
        return shown_url(self.url)


@dataclass(frozen=True)
class Version:
    """What the server said of the file that the bytes so far are from; ``num_bytes`` is the whole size."""

    etag: str | None = None
    last_modified: str | None = None
    num_bytes: int | None = None

    @property
    def validator(self) -> str | None:
        """For If-Range, which takes no weak ETag (RFC 9110, section 13.1.5)."""
        return self.etag if self.etag and not self.etag.startswith("W/") else self.last_modified

    def contradicts(self, other: "Version") -> bool:
        """Both speak of the same thing differently."""
        pairs = zip(asdict(self).values(), asdict(other).values(), strict=True)
        return any(a is not None and b is not None and a != b for a, b in pairs)


class Partial:
    """The bytes that are there, and the version they are from, beside them: both outlive a kill."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.part"
        self._version_path = folder / f"{name}.json"

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    @property
    def version(self) -> Version:
        """Empty where it was never written or is damaged."""
        with suppress(OSError, ValueError, TypeError):
            return Version(**json.loads(self._version_path.read_bytes()))
        return Version()

    def start_over(self, version: Version = Version()) -> None:
        """Forget the bytes; what comes now is from ``version``."""
        self.path.unlink(missing_ok=True)
        write_file(self._version_path, json.dumps(asdict(version)).encode())

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self._version_path.unlink(missing_ok=True)


class _PassingError(Exception):
    """Another try may go well; ``wait_s`` is what the server asked for."""

    def __init__(self, message: str, wait_s: float = 0) -> None:
        super().__init__(message)
        self.wait_s = wait_s


def open_client(timeout_s: float) -> httpx.Client:
    """A client that follows a few redirects, takes bytes as they are, and waits ``timeout_s`` for the next of them."""
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs whole URLs, which may hold a signature
    headers = {"Accept-Encoding": "identity", "User-Agent": "xctrain"}
    client = httpx.Client(follow_redirects=True, timeout=timeout_s, headers=headers)
    client.max_redirects = 5
    return client


def shown_url(url: str) -> str:
    parts = httpx.URL(url)
    return str(parts.copy_with(userinfo=b"", query=None, fragment=None))


def ask_size(client: httpx.Client, wanted: Wanted) -> int | None:
    """What the server says of the size before anything is fetched; None where it says nothing."""
    with suppress(httpx.HTTPError, ValueError):
        reply = client.head(wanted.url)
        if reply.status_code == 200 and "content-length" in reply.headers:
            return int(reply.headers["content-length"])
    return None


def fetch(
    client: httpx.Client, wanted: Wanted, partial: Partial, tries: int, stop: threading.Event, progress: Progress
) -> bool:
    """Bring ``partial`` to its end. True if it began with bytes of an earlier try.

    Raises:
        DownloadError: what the server sends is not that file, or ``tries`` in a row brought next to nothing.
        InterruptedBuildError: ``stop`` was set.
    """
    failures, most = 0, partial.size
    began_with = partial.size
    progress(began_with)
    while True:
        try:
            _try_once(client, wanted, partial, stop, progress)
            return began_with > 0 or failures > 0
        except (_PassingError, httpx.TransportError) as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise DownloadError(
                    f"{wanted.name}: {wanted.shown}: {error}; check the host, or its certificate"
                ) from None
            if partial.size >= most + NEWS:  # a server that always breaks off at the same byte brings no news
                failures = 0
            most = max(most, partial.size)
            failures += 1
            what, asked_s = str(error) or type(error).__name__, getattr(error, "wait_s", 0)
        if failures >= tries or asked_s > LONGEST_ASKED_S:
            asked = f", which asks to come back in {asked_s:.0f} s" if asked_s > LONGEST_ASKED_S else ""
            raise DownloadError(
                f"{wanted.name}: {wanted.shown}: {what} ({failures} tries in a row failed{asked}); {partial.size} bytes "
                "are kept, the same command goes on from there",
                path=partial.path,
            )
        if stop.wait(max(asked_s, backoff_s(failures))):
            raise _stopped(wanted)


def backoff_s(failures: int) -> float:
    """How long to wait after so many failures in a row: doubled each time, with chance in it so that clients spread."""
    return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (failures - 1)) * random.uniform(0.5, 1.0)


def _try_once(
    client: httpx.Client, wanted: Wanted, partial: Partial, stop: threading.Event, progress: Progress
) -> None:
    version, offset = partial.version, partial.size
    if offset and not version.validator and not wanted.has_digest:
        progress(-offset)  # nothing would tell whether the rest is of the same file
        partial.start_over()
        offset = 0
    if offset and offset == (version.num_bytes or wanted.num_bytes):
        return
    headers = {"Range": f"bytes={offset}-"} if offset else {}
    if offset and version.validator:
        headers["If-Range"] = version.validator
    try:
        with client.stream("GET", wanted.url, headers=headers) as reply:
            if reply.status_code == 416:
                if reply.headers.get("content-range") == f"bytes */{offset}":
                    return  # they were all there
                progress(-offset)
                partial.start_over()
                raise _PassingError(f"the server has no bytes from {offset} on")
            _require_answer(wanted, reply)
            found = _version(reply)
            if reply.status_code == 206:
                if not offset or not _continues(reply, offset) or version.contradicts(found):
                    progress(-offset)
                    partial.start_over()
                    raise _PassingError("the file has changed since its first bytes came")
            else:
                _require_file(wanted, reply, found)
                progress(-offset)
                partial.start_over(found)
            _receive(wanted, partial, reply.iter_raw(), stop, progress)
    except (httpx.TooManyRedirects, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise DownloadError(f"{wanted.name}: {wanted.shown}: {str(error).rstrip('.')}; check the URL") from None
    except OSError as error:
        error.filename = error.filename or str(partial.path)
        raise DownloadError(f"{describe(error)}; {partial.size} bytes of it are kept", path=partial.path) from None
    expected = found.num_bytes or wanted.num_bytes
    if expected is not None and partial.size != expected:
        raise _PassingError(f"{partial.size} bytes came, expected {expected}")


def _receive(
    wanted: Wanted, partial: Partial, chunks: Iterator[bytes], stop: threading.Event, progress: Progress
) -> None:
    with partial.path.open("ab", buffering=0) as file:
        for chunk in chunks:
            view = memoryview(chunk)
            while view:  # unbuffered: a nearly full disk takes a part of it
                view = view[file.write(view) :]
            progress(len(chunk))
            if stop.is_set():
                raise _stopped(wanted)


def _require_answer(wanted: Wanted, reply: httpx.Response) -> None:
    status = reply.status_code
    if status in (200, 206):
        return
    what = f"HTTP {status} {reply.reason_phrase}".rstrip()
    if status in PASSING:
        raise _PassingError(what, _asked_wait_s(reply.headers.get("retry-after", "")))
    raise DownloadError(
        f"{wanted.name}: {shown_url(str(reply.url))}: {what}, expected the file; check the URL, and whether it is open to you"
    )


def _asked_wait_s(value: str) -> float:
    """Retry-After: seconds, or a date."""
    if value.strip().isdigit():
        return float(value)
    with suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return 0.0


def _version(reply: httpx.Response) -> Version:
    found = Version(reply.headers.get("etag"), reply.headers.get("last-modified"))
    if reply.status_code == 206:
        total = re.fullmatch(r"bytes \d+-\d+/(\d+)", reply.headers.get("content-range", ""))
        return replace(found, num_bytes=int(total[1]) if total else None)
    size = reply.headers.get("content-length", "")
    return replace(found, num_bytes=int(size) if size.isdigit() else None)


def _continues(reply: httpx.Response, offset: int) -> bool:
    return str(reply.headers.get("content-range", "")).startswith(f"bytes {offset}-")


def _require_file(wanted: Wanted, reply: httpx.Response, found: Version) -> None:
    """Refuse what is not the file before any byte of it replaces those that are there."""
    url = shown_url(str(reply.url))
    kind = reply.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in ("text/html", "application/xhtml+xml") and not wanted.name.lower().endswith((".html", ".htm", ".xhtml")):
        raise DownloadError(
            f"{wanted.name}: {url}: the server sends a web page ({kind}), expected the file; open the URL in a browser to "
            "see what it says"
        )
    if wanted.num_bytes is not None and found.num_bytes not in (None, wanted.num_bytes):
        raise DownloadError(
            f"{wanted.name}: {url}: the server's file has {found.num_bytes} bytes, expected {wanted.num_bytes}; check the "
            "URL or the mirror"
        )
    if wanted.has_digest or wanted.name.endswith(".zip"):
        return  # what is wrong with it will be noticed
    encoding = reply.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise DownloadError(
            f"{wanted.name}: {url}: comes packed as {encoding}, which was not asked for; give its sha256"
        )
    if found.num_bytes is None and wanted.num_bytes is None and reply.headers.get("transfer-encoding") != "chunked":
        raise DownloadError(
            f"{wanted.name}: {url}: the server does not say how long the file is, so that nothing would tell a part from "
            "the whole; give its num_bytes or sha256"
        )


def _stopped(wanted: Wanted) -> InterruptedBuildError:
    return InterruptedBuildError(
        f"{wanted.name}: the download was stopped; the same command goes on from the bytes there"
    )
