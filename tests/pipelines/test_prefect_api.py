"""A Prefect API that is not there: said at once, with both ways out."""

import json
import os
import socket
import threading
import time
from contextlib import contextmanager, suppress

import pytest

from pipelines import prefect_api


@contextmanager
def server(answer):
    """A server that does ``answer(connection)`` to whoever connects; its port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def accept():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

        def serve(connection):
            with connection, suppress(OSError):  # who asked has gone
                answer(connection)

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def say(text):
    def answer(connection):
        connection.recv(1000)
        connection.sendall(text)

    return answer


def keep_silent(connection):
    time.sleep(60)


def trickle(connection):
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    for i in range(60):
        connection.sendall(b"x-%d: 1\r\n" % i)
        time.sleep(1)


ERROR_500 = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
PAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi"


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (say(ERROR_500), "HTTP 500 Internal Server Error"),
        (say(PAGE), "it sends text/html, expected application/json"),
        (say(b"SSH-2.0-OpenSSH\r\n"), "SSH-2.0-OpenSSH"),
        (lambda connection: None, "Remote end closed connection without response|Connection reset by peer"),
        (keep_silent, "timed out"),
        (trickle, "no whole answer within 4 s"),
    ],
    ids=["500", "page", "ssh", "closed", "silent", "trickle"],
)
def test_a_server_that_is_no_prefect_api_is_named_with_both_ways_out(monkeypatch, answer, found):
    monkeypatch.setattr(prefect_api, "ANSWER_S", 2)
    with server(answer) as port:
        url = f"http://127.0.0.1:{port}/api"
        began = time.monotonic()
        with pytest.raises(prefect_api.BuildError, match=found) as error:
            prefect_api.require_answer(url)
        assert time.monotonic() - began < 30  # the server would go on for 60
    assert f"PREFECT_API_URL is {url}, but no Prefect API answers there" in str(error.value)
    assert "unset PREFECT_API_URL, which uses an embedded API, or add --plain, which uses no Prefect at all" in str(
        error.value
    )


@pytest.mark.parametrize("kind", ["refused", "silent", "unknown host"])
def test_a_build_with_a_dead_api_ends_within_30_seconds_and_writes_nothing(command, photos, tmp_path, kind):
    with server(keep_silent) as port, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        place = {
            "refused": f"127.0.0.1:{closed.getsockname()[1]}",
            "silent": f"127.0.0.1:{port}",
            "unknown host": "nobody.invalid:4200",
        }[kind]
        path = tmp_path / "build.yaml"
        path.write_text(json.dumps({"source": str(photos), "out": str(tmp_path / "out")}))
        began = time.monotonic()
        environment = {**os.environ, "PREFECT_API_URL": f"http://{place}/api", "PREFECT_HOME": str(tmp_path / "home")}
        process = command("build", path, env=environment)
        _, errors = process.communicate(timeout=200)
        assert time.monotonic() - began < 30
    assert process.returncode == 1
    assert errors.startswith(f"error: PREFECT_API_URL is http://{place}/api, but no Prefect API answers there (")
    assert "unset PREFECT_API_URL" in errors
    assert "add --plain" in errors
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_api_that_dies_meanwhile_ends_the_build_in_words_and_a_rerun_goes_on(
    command, coco, pictures, tmp_path, monkeypatch
):
    for name, value in {**prefect_api.ENVIRONMENT, "PREFECT_HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "home").mkdir()
    files = {f"{i}.png": pictures.encode(pictures.photo(i, 500, 400, "RGBA"), "PNG") for i in range(60)}
    path, out = tmp_path / "build.yaml", tmp_path / "out"
    build = {"records_per_shard": 2, "processes": 1}
    path.write_text(json.dumps({"source": str(coco(tmp_path / "source", files)), "out": str(out), "build": build}))
    with prefect_api.embedded_api() as url:
        process = command("build", path, env={**os.environ, "PREFECT_API_URL": url})
        while not list(out.glob("*.tar")):
            assert process.poll() is None
            time.sleep(0.05)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 1
    assert f"error: the Prefect API at {url} has not answered for 60 s (" in errors
    process = command("build", path, "--plain")
    output, _ = process.communicate(timeout=200)
    assert "60 kept" in output
