"""A web server of the tests' own, which can drop, stall and lie."""

import hashlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from shards.remote import TRIES

_PASSING = ("status:503", "drop:100", "status:429", "shorter", "status:500", "drop:0")


def passing_faults(number: int) -> list[str]:
    """Tricks of the file of that number: fewer faults than a read has tries, in whatever turn its requests come."""
    return [trick for i in range(TRIES - 1) for trick in (_PASSING[(2 * number + i) % len(_PASSING)], "")]


@dataclass
class Resource:
    """A file and how each request in turn is answered; after the last trick the server is honest.

    Tricks: ``drop:N`` break off after N bytes · ``stall:N`` send nothing more after N bytes · ``status:N`` an error ·
    ``ignore-range`` 200 and everything · ``blind-range`` 206 whatever If-Range says · ``longer`` a Content-Length that is
    too large · ``shorter`` one that is too small · ``page`` an HTML page with 200 · ``redirect:URL`` · ``until-close``
    neither length nor chunks.
    """

    data: bytes
    tricks: Sequence[str] = ()
    etag: bool = True
    headers: dict[str, str] = field(default_factory=dict)  # sent with errors
    type: str = "application/octet-stream"
    requests: list[dict[str, str]] = field(default_factory=list)
    sent: int = 0  # bytes of bodies
    delay_s: float = 0  # per 64 kB
    at_once: int = 0  # GETs being answered
    most_at_once: int = 0

    @property
    def tag(self) -> str:
        return f'"{hashlib.md5(self.data).hexdigest()}"'


class WebServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, Resource] = {}
        self.ended = threading.Event()
        self.mutex = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients that go away are part of the tests


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WebServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        resource = self.server.files.get(self.path.partition("?")[0])
        self.send_response(200 if resource else 404)
        self.send_header("Content-Length", str(len(resource.data) if resource else 0))
        if resource and resource.etag:
            self.send_header("ETag", resource.tag)
        self.end_headers()

    def do_GET(self) -> None:
        resource = self.server.files.get(self.path.partition("?")[0])
        if resource is None:
            self.send_error(404)
            return
        with self.server.mutex:
            number = len(resource.requests)
            resource.requests.append(dict(self.headers.items()))
            resource.at_once += 1
            resource.most_at_once = max(resource.most_at_once, resource.at_once)
        try:
            trick, _, value = (resource.tricks[number] if number < len(resource.tricks) else "").partition(":")
            self.answer(resource, trick, value)
        finally:
            with self.server.mutex:
                resource.at_once -= 1

    def answer(self, resource: Resource, trick: str, value: str) -> None:
        if trick == "status":
            self.send_response(int(value))
            for name, text in {"Content-Length": "0", **resource.headers}.items():
                self.send_header(name, text)
            self.end_headers()
            return
        if trick == "redirect":
            self.send_response(302)
            self.send_header("Location", value)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data, kind = resource.data, resource.type
        if trick == "page":
            data, kind = b"<!DOCTYPE html>\n<html><body>Sign in to go on</body></html>", "text/html; charset=utf-8"
        whole = len(data)
        start, stop, total = 0, whole, whole + {"longer": 1000, "shorter": -1000}.get(trick, 0)
        if (wanted := self.headers.get("Range")) and trick not in ("ignore-range", "page"):
            same = self.headers.get("If-Range") in (None, resource.tag) or trick == "blind-range"
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start = int(first) if same else 0
            if same and last:
                total, stop = min(total, int(last) + 1), int(last) + 1
            if start >= total:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{total}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
        body = data[start:stop]
        partial = start > 0 or stop < whole
        self.send_response(206 if partial else 200)
        if partial:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{whole if stop < whole else total}")
        length = total - start
        if trick == "until-close":
            self.send_header("Connection", "close")
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(length))
        self.send_header("Content-Type", kind)
        if resource.etag:
            self.send_header("ETag", resource.tag)
        self.end_headers()
        sent = body[: int(value)] if trick in ("drop", "stall") else body[:length]
        for i in range(0, len(sent), 1 << 16):
            self.wfile.write(sent[i : i + (1 << 16)])
            resource.sent += len(sent[i : i + (1 << 16)])
            if resource.delay_s:
                time.sleep(resource.delay_s)
        if trick == "stall":
            self.server.ended.wait(60)
        if trick in ("drop", "stall", "longer"):
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def running() -> Iterator[WebServer]:
    """A server on a free port of this machine."""
    with WebServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
            thread.join()
