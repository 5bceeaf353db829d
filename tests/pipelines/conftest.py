"""Pictures and COCO folders for the build's tests."""

import io
import json
import struct
import subprocess
import sys
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipelines import prefect_api
from pipelines.config import BuildConfig
from pipelines.run import run_plain

PROJECT = Path(__file__).resolve().parents[2]


def photo(seed: int, width: int = 64, height: int = 48, mode: str = "RGB") -> Image.Image:
    """A smooth picture with some noise, another one for each seed."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [127 + 90 * np.sin(x / (9 + 5 * c) + y / (14 - 3 * c) + rng.uniform(0, 6)) for c in range(3)]
    pixels = np.clip(np.stack(waves, -1) + rng.normal(0, 12, (height, width, 3)), 0, 255)
    return Image.fromarray(pixels.astype(np.uint8)).convert(mode)


def scene(seed: int) -> Image.Image:
    """A picture of large patches, unlike any other scene, as photos are; waves alone can look like other waves."""
    patches = np.random.default_rng(seed).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(patches).resize((320, 240), Image.Resampling.BICUBIC)


def encode(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def float_tiff(value: float, other: float = 0.25) -> bytes:
    pixels = np.full((48, 64), 0.5, np.float32)
    pixels[:, :32] = other
    pixels[10, 10] = value
    return encode(Image.fromarray(pixels), "TIFF")


def png_bomb(side: int) -> bytes:
    """A few hundred bytes whose header declares side x side pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


@pytest.fixture(scope="session")
def pictures() -> SimpleNamespace:
    return SimpleNamespace(photo=photo, scene=scene, encode=encode, float_tiff=float_tiff, png_bomb=png_bomb)


def write_coco(
    root: Path,
    files: Mapping[str, bytes | None],
    captions: Mapping[str, Sequence[Any]] | None = None,
    split: str = "train",
    first_id: int = 1,
    extra_annotations: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """A folder in the official COCO layout. A file that is None is listed but absent; ids count up in the order given."""
    images_dir = root / f"{split}2017"
    images_dir.mkdir(parents=True, exist_ok=True)
    (root / "annotations").mkdir(exist_ok=True)
    images, annotations = [], []
    for i, (name, data) in enumerate(files.items(), first_id):
        if data is not None:
            (images_dir / name).parent.mkdir(parents=True, exist_ok=True)
            (images_dir / name).write_bytes(data)
        images.append({"id": i, "file_name": name})
        for text in (captions or {}).get(name, [f"picture {i} seen once", f"picture {i} seen twice"]):
            annotations.append({"id": 1000 * first_id + len(annotations), "image_id": i, "caption": text})
    content = {"images": images, "annotations": [*annotations, *extra_annotations]}
    (root / "annotations" / f"captions_{split}2017.json").write_text(json.dumps(content))
    return root


@pytest.fixture(scope="session")
def coco() -> Callable[..., Path]:
    return write_coco


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 good pictures to train on and 5 held-out ones; do not change."""
    root = tmp_path_factory.mktemp("photos")
    write_coco(root, {f"{i:012d}.jpg": encode(photo(i)) for i in range(1, 25)})
    return write_coco(root, {f"{i:012d}.jpg": encode(photo(i)) for i in range(500, 505)}, split="val", first_id=500)


@pytest.fixture(scope="session")
def built(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed build of the photos, in three shards and one of held-out ones; do not change."""
    out = tmp_path_factory.mktemp("built") / "out"
    run_plain(config(photos, out))
    return out


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough work for a build of some seconds: 40 pictures that have to be converted; do not change."""
    files = {f"{i}.png": encode(photo(i, 640, 480, "RGBA"), "PNG") for i in range(40)}
    return write_coco(tmp_path_factory.mktemp("work"), files)


@pytest.fixture(scope="session")
def work_built(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """The data files of its undisturbed build, five records a shard."""
    out = tmp_path_factory.mktemp("work_built") / "out"
    run_plain(config(work, out, build={"records_per_shard": 5}))
    return read_data_files(out)


def config(source: Path | Mapping[str, Any], out: Path, **sections: Any) -> BuildConfig:
    """A config with small shards and one process."""
    build = {"records_per_shard": 8, "processes": 1, **sections.pop("build", {})}
    return BuildConfig.model_validate({"source": source, "out": out, "build": build, **sections})


@pytest.fixture(scope="session")
def make_config() -> Callable[..., BuildConfig]:
    return config


DATA_SUFFIXES = (".tar", ".idx", ".jsonl", "manifest.json")


@pytest.fixture(scope="session")
def data_files() -> Callable[[Path], dict[str, bytes]]:
    """Every file of a shard folder that must not depend on how it was built."""
    return read_data_files


def read_data_files(out: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(out.iterdir()) if p.name.endswith(DATA_SUFFIXES)}


@pytest.fixture(scope="session")
def rejects() -> Callable[[Path], dict[str, str]]:
    """Reason by file name."""

    def read(out: Path) -> dict[str, str]:
        rows = map(json.loads, (out / "rejects.jsonl").read_text().splitlines())
        return {row["file_name"]: row["reason"] for row in rows}

    return read


@pytest.fixture(scope="session")
def zipped() -> Callable[[Path, Path, str], Path]:
    """A folder as a zip whose members lie below ``top``."""

    def pack(folder: Path, path: Path, top: str) -> Path:
        with zipfile.ZipFile(path, "w") as archive:
            for file in sorted(p for p in folder.rglob("*") if p.is_file()):
                archive.write(file, f"{top}{file.relative_to(folder)}")
        return path

    return pack


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., "subprocess.Popen[str]"]:
    """Start ``python -m pipelines`` in a process of its own."""

    def start(*arguments: object, **options: Any) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "pipelines", *map(str, arguments)],
            cwd=PROJECT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **options,
        )

    return start


@pytest.fixture(scope="session")
def embedded_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """URL and home of one embedded Prefect API for all tests; its start takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("prefect")
        for name, value in {**prefect_api.ENVIRONMENT, "PREFECT_HOME": str(home)}.items():
            patch.setenv(name, value)
        patch.delenv("PREFECT_API_URL", raising=False)
        with prefect_api.embedded_api() as url:
            yield url, home


@pytest.fixture
def ask(embedded_api: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], Any]:
    """Put a question to the Prefect API that flows of this test run on."""
    url, home = embedded_api
    for name, value in {**prefect_api.ENVIRONMENT, "PREFECT_HOME": str(home), "PREFECT_API_URL": url}.items():
        monkeypatch.setenv(name, value)

    def answer(path: str, question: Any) -> Any:
        body = json.dumps(question).encode()
        request = urllib.request.Request(f"{url}{path}", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.load(reply)

    return answer
