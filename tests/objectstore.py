"""An S3 server of the tests' own (moto) on this machine, in a process that can be killed."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import s3fs

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
BUCKET = "pictures"


class ObjectStore:
    """``start`` gives an empty bucket; what was stored is gone after ``kill``, as it is in memory."""

    def __init__(self) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.port = listener.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        code = f"import moto.server; moto.server.main(['-H', '127.0.0.1', '-p', '{self.port}'])"
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                request = urllib.request.Request(f"{self.url}/{BUCKET}", method="PUT")
                with urllib.request.urlopen(request, timeout=10):
                    return
            except OSError:
                assert time.monotonic() < deadline, "the S3 server does not start"
                time.sleep(0.05)

    def pause(self) -> None:
        """Answer nothing until ``resume``."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


@contextmanager
def running() -> Iterator[ObjectStore]:
    """A store that lives as long as the block, in which the environment names it and its credentials."""
    store = ObjectStore()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": store.url}.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()  # they remember the store of another block
        store.start()
        try:
            yield store
        finally:
            store.kill()
            s3fs.S3FileSystem.clear_instance_cache()
