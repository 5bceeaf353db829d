"""Models from a hub: a small one is served here, under the addresses of the real one."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from pydantic import ValidationError
from small import data_of
from xcomposers import build_xcomposer

from shards.errors import ConfigError
from shards.settings import load_settings
from xctrain.basemodel import base_model, ensure_base_model, model_id
from xctrain.config import Config
from xctrain.modelconfig import ModelConfig

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SETTINGS = [
    "train.num_steps=1",
    "model.family=xcomposer",
    "model.source=huggingface",
    "model.path=some/xcomposer",
    f"model.revision={COMMIT}",
]
# A process of its own, as the hub's library reads its environment once. Prints the folder, or the error.
CODE = """
import sys
from shards.errors import ConfigError
from shards.settings import load_settings
from xctrain.basemodel import base_model, ensure_base_model, model_id
from xctrain.config import Config
config = load_settings(Config, None, sys.argv[2:])
try:
    if sys.argv[1] != "look":
        ensure_base_model(config, None, weights=sys.argv[1] != "plan")
    print(base_model(config, weights=sys.argv[1] != "plan"), model_id(config))
except ConfigError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_xcomposer(tmp_path_factory.mktemp("hub") / "model")


@pytest.fixture
def hub(folder: Path) -> Iterator[str]:
    """Address of a hub that has one model, at one commit."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            name = path.removeprefix(f"/some/xcomposer/resolve/{COMMIT}/")
            if path == f"/api/models/some/xcomposer/revision/{COMMIT}":
                content = json.dumps(
                    {"id": "some/xcomposer", "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]}
                ).encode()
            elif path == f"/api/models/some/xcomposer/tree/{COMMIT}":
                content = json.dumps(
                    [
                        {"type": "file", "path": f, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                        for f, d in files.items()
                    ]
                ).encode()
            elif name in files:
                content = files[name]
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RevisionNotFound" if "some/xcomposer" in path else "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def ask(what: str, cache: Path, hub: str, *settings: str) -> str:
    offline = {"HF_HUB_OFFLINE": "1" if hub == "offline" else "0"}
    address = {} if hub == "offline" else {"HF_ENDPOINT": hub}
    environment = {**os.environ, "HF_HOME": str(cache), "NO_PROXY": "127.0.0.1", **offline, **address}
    command = [sys.executable, "-c", CODE, what, *SETTINGS, *settings]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2], env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_pinned_model_is_downloaded_once_and_then_needs_no_network(hub: str, folder: Path, tmp_path: Path) -> None:
    where, name = ask("download", tmp_path, hub).split()

    assert name == f"some/xcomposer@{COMMIT}"
    found = {path.name: path.read_bytes() for path in Path(where).iterdir()}
    assert found == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert ask("look", tmp_path, "offline").split() == [where, name]


def test_for_a_plan_only_the_small_files_are_downloaded(hub: str, folder: Path, tmp_path: Path) -> None:
    where = Path(ask("plan", tmp_path, hub).split()[0])

    assert {path.name for path in where.iterdir()} == {path.name for path in folder.iterdir()} - {"model.safetensors"}
    assert Path(ask("download", tmp_path, hub).split()[0], "model.safetensors").exists()


def test_what_the_hub_has_not_is_said(hub: str, tmp_path: Path) -> None:
    other = "f" * 40
    text = ask("download", tmp_path, hub, f"model.revision={other}")

    assert text.startswith(f"model.path: some/xcomposer at {other} cannot be downloaded (model.source=huggingface): ")
    assert text.endswith("or copy the model here and give its folder with model.source=folder")


def test_without_a_network_it_is_said_what_to_do(tmp_path: Path) -> None:
    text = ask("download", tmp_path, "offline")

    assert text.startswith(f"model.path: some/xcomposer at {COMMIT} cannot be downloaded (model.source=huggingface): ")


def test_a_hub_model_must_be_pinned() -> None:
    for source, revision, message in (
        ("huggingface", None, "model.source is huggingface, model.revision is None; give the commit, 40 digits"),
        ("huggingface", "main", "model.source is huggingface, model.revision is main; give the commit, 40 digits"),
        ("modelscope", None, "model.source is modelscope, model.revision is empty; give a tag or commit"),
    ):
        with pytest.raises(ValidationError, match=message):
            ModelConfig(family="xcomposer", path="a/b", source=source, revision=revision)


def test_a_missing_library_of_modelscope_is_named(drawn_shards: Path) -> None:
    try:
        import modelscope  # noqa: F401
    except ImportError:
        pass
    else:
        pytest.skip("modelscope is installed here")
    config = load_settings(Config, None, [*SETTINGS, "model.source=modelscope"])

    with pytest.raises(
        ConfigError, match=r"model.source is modelscope, its library is not installed; pip install 'xctr"
    ):
        ensure_base_model(config, data_of(drawn_shards))


def test_a_folder_is_taken_as_it_is_and_a_hub_name_is_not_guessed(drawn_shards: Path, folder: Path) -> None:
    data = data_of(drawn_shards)
    settings = ["train.num_steps=1", "model.family=xcomposer"]
    config = load_settings(Config, None, [*settings, f"model.path={folder}"])
    ensure_base_model(config, data)
    assert (base_model(config), len(model_id(config))) == (str(folder), 16)

    with pytest.raises(ConfigError, match=r"model.path: a/b: there is no such folder; .* model.source=huggingface"):
        ensure_base_model(load_settings(Config, None, [*settings, "model.path=a/b"]), data)
