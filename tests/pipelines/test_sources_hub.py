"""Datasets of a hub: a small one is served here, under the addresses of the real one."""

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.config import BuildConfig
from pipelines.sources import open_sources
from shards.errors import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# A process of its own, as the hub's library reads its environment once. Prints the records, or the error.
CODE = """
import sys
from pipelines.config import BuildConfig
from pipelines.sources import open_sources
from shards.errors import ConfigError
source = {"kind": "parquet", "path": sys.argv[1]}
try:
    (origin,) = open_sources(BuildConfig.model_validate({"source": source, "out": "o", "split": {"by": "official"}}))
    print(sorted((r.split, r.image_id, *r.captions) for r in origin.source.records()))
except ConfigError as error:
    print(error)
"""


def table(split):
    rows = {"image": [{"bytes": b"x", "path": f"{split}.jpg"}], "caption": [f"of {split}"]}
    out = io.BytesIO()
    pq.write_table(pa.table(rows), out)
    return out.getvalue()


FILES = {f"data/{split}-00000-of-00001.parquet": table(split) for split in ("train", "validation")}
FILES |= {"README.md": b"a dataset", "extra/test.parquet": table("test")}


@pytest.fixture(scope="module")
def address():
    """A hub that has one dataset, at one commit."""

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer()

        def do_GET(self):
            self.answer()

        def answer(self):
            path = self.path.partition("?")[0]
            name = path.partition(f"/datasets/some/pairs/resolve/{COMMIT}/")[2]
            if path.startswith("/api/datasets/some/pairs/revision/"):
                siblings = [{"rfilename": name} for name in FILES]
                content = json.dumps({"id": "some/pairs", "sha": COMMIT, "siblings": siblings}).encode()
            elif path.startswith("/api/datasets/some/pairs/tree/"):
                listed = [
                    {"type": "file", "path": f, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                    for f, d in FILES.items()
                ]
                content = json.dumps(listed).encode()
            else:
                content = FILES.get(name)
            self.send_response(404 if content is None else 200)
            for header, value in (
                ("Content-Length", str(len(content or b""))),
                ("ETag", f'"{hashlib.sha1(content or b"").hexdigest()}"'),
                ("X-Repo-Commit", COMMIT),
                *([("X-Error-Code", "RepoNotFound")] if content is None else []),
            ):
                self.send_header(header, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content or b"")

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def ask(location, cache, address):
    environment = {**os.environ, "HF_HOME": str(cache), "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0"}
    environment |= {"HF_HUB_OFFLINE": "1"} if address is None else {"HF_ENDPOINT": address}
    done = subprocess.run(
        [sys.executable, "-c", CODE, location], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_dataset_of_the_hub_is_downloaded_once_and_then_needs_no_network(tmp_path, address):
    both = "[('train', 'train.jpg', 'of train'), ('val', 'validation.jpg', 'of validation')]"
    assert ask("hf://datasets/some/pairs/data/*.parquet", tmp_path, address) == both
    assert ask("hf://datasets/some/pairs/data/*.parquet", tmp_path, None) == both
    assert (
        ask(f"hf://datasets/some/pairs@{COMMIT}/extra/*.parquet", tmp_path, address)
        == "[('test', 'test.jpg', 'of test')]"
    )


def test_what_cannot_be_had_is_said_in_one_line(tmp_path, address):
    for location, place, words in (
        ("hf://datasets/no/such", address, "hf://datasets/no/such: cannot be downloaded:"),
        ("hf://datasets/some/pairs", None, "cannot be downloaded:"),
        (
            "hf://datasets/some/pairs/none*.parquet",
            address,
            "has no file like none*.parquet; look at https://huggingface.co/",
        ),
    ):
        said = ask(location, tmp_path, place)
        assert words in said
        assert "\n" not in said


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "some/pairs",
            r"some/pairs: there is no such file or folder; for a dataset of .* give hf://datasets/some/pairs;",
        ),
        (
            "hf://datasets/pairs",
            r"expected hf://datasets/ORG/NAME, @REVISION and /PATTERN if you like; check source.path",
        ),
    ],
)
def test_a_name_without_the_hubs_address_asks_no_network(path, message):
    with pytest.raises(ConfigError, match=message):
        open_sources(BuildConfig.model_validate({"source": {"kind": "parquet", "path": path}, "out": "o"}))
