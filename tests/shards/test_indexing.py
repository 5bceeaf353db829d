"""Tars of other tools: made here with webdataset's own writer and with tarfile, then read by everything of ours."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shards import cli
from shards.__main__ import main
from shards.foreign import key_of
from shards.manifest import NAME, Manifest
from shards.reader import SplitReader
from shards.sample import MAX_KEY, is_key
from shards.verify import verify

Members = list[tuple[str, bytes]]


def picture(number: int, kind: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 255, (24 + number, 32, 3), np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(data, kind, **options)
    return data.getvalue()


def sample(number: int, name: str | None = None) -> Members:
    """As img2dataset lays it out: KEY.jpg, KEY.txt, KEY.json."""
    name = name or f"{number:09d}"
    fields = {"key": name, "caption": f"caption {number}", "status": "success", "width": 32, "height": 24 + number}
    return [
        (f"{name}.jpg", picture(number)),
        (f"{name}.json", json.dumps(fields).encode()),
        (f"{name}.txt", f"caption {number}".encode()),
    ]


def write_tar(path: Path, members: Members, **options: Any) -> None:
    with tarfile.open(path, "w", **options) as tar:
        for name, payload in members:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(payload), 1_700_000_000
            tar.addfile(info, io.BytesIO(payload))


def index(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    code = cli.run(main, ["index", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """Two tars of 3 and 2 samples, in the layout of img2dataset."""
    write_tar(tmp_path / "00000.tar", [m for n in range(3) for m in sample(n)])
    write_tar(tmp_path / "00001.tar", [m for n in range(3, 5) for m in sample(n)])
    return tmp_path


def test_tars_keep_their_bytes_and_read_like_shards(tars: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.read_bytes() for path in tars.glob("*.tar")}
    code, out = index(capsys, tars)
    assert (code, out) == (0, "indexed: train 5 samples in 2 shards, captions from .txt\n")
    assert {path.name: path.read_bytes() for path in tars.glob("*.tar")} == before
    reader = SplitReader(tars, "train")
    samples = [reader.read(i) for i in range(5)]
    assert [s.key for s in samples] == [f"{n:09d}" for n in range(5)]
    assert [s.captions for s in samples] == [(f"caption {n}",) for n in range(5)]
    assert [s.image for s in samples] == [picture(n) for n in range(5)]
    assert [(m.width, m.height) for m in reader.metas()] == [(32, 24 + n) for n in range(5)]
    assert [reader.read_json(i) for i in range(5)] == [s.meta for s in samples]
    assert verify(tars) == []


def test_stock_reader_sees_the_same_samples(tars: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index(capsys, tars)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves its files open
        stock = list(webdataset.WebDataset([str(p) for p in sorted(tars.glob("*.tar"))], shardshuffle=False))
    reader = SplitReader(tars, "train")
    assert [(s["__key__"], s["jpg"], s["txt"].decode()) for s in stock] == [
        (s.key, s.image, s.captions[0]) for s in (reader.read(i) for i in range(5))
    ]


def test_tars_of_webdatasets_own_writer_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for n in range(3):
            writer.write(
                {"__key__": f"{n:05d}", "png": picture(n, "PNG"), "json": {"captions": [f"a {n}", f"b  {n}\n"]}}
            )
    assert index(capsys, tmp_path)[0] == 0
    reader = SplitReader(tmp_path, "train")
    assert [reader.read(i).captions for i in range(3)] == [(f"a {n}", f"b {n}") for n in range(3)]


@pytest.mark.parametrize("layout", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_every_tar_dialect_is_read(tmp_path: Path, layout: int, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"./{'folder/' * 9}{n:02d}{'x' * (80 if layout == tarfile.USTAR_FORMAT else 300)}" for n in range(3)]
    write_tar(tmp_path / "a.tar", [m for n, name in enumerate(names) for m in sample(n, name)], format=layout)
    assert index(capsys, tmp_path)[0] == 0
    reader = SplitReader(tmp_path, "train")
    assert [reader.read(i).meta["file_name"] for i in range(3)] == [f"{name}.jpg" for name in names]
    assert verify(tmp_path) == []


def test_folders_and_members_of_no_sample_are_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        folder = tarfile.TarInfo("data")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, payload in [("README", b"x"), ("__index__", b"{}"), *sample(0), (".hidden", b""), *sample(1)]:
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            tar.addfile(info, io.BytesIO(payload))
    assert index(capsys, tmp_path)[0] == 0
    assert SplitReader(tmp_path, "train").keys() == ["000000000", "000000001"]
    assert verify(tmp_path) == []


def test_splits_go_by_file_names(tars: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert index(capsys, tars, "--split", "train=*0.tar", "--split", "val=*1.tar")[0] == 0
    assert Manifest.load(tars).splits == {"train": 3, "val": 2}
    code, out = index(capsys, tars, "--split", "train=*0.tar")
    assert code == 2
    assert "00001.tar: 0 of the splits train=*0.tar take it, expected one; change --split" in out


def test_captions_come_from_the_member_that_was_asked_for(tars: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert index(capsys, tars, "--captions", "json")[0] == 0
    meta = SplitReader(tars, "train").read(0).meta
    assert (meta["captions"], meta["status"]) == (["caption 0"], "success")
    code, out = index(capsys, tars, "--captions", "caption")
    assert code == 1
    assert "00000.tar: 000000000.jpg: 000000000 has no caption (members .jpg, .json, .txt), expected .caption" in out


def test_keys_that_the_format_does_not_allow_are_mapped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tar(
        tmp_path / "a.tar", [m for n, name in enumerate(("train/Ab c", "other/Ab c", "ü")) for m in sample(n, name)]
    )
    assert index(capsys, tmp_path)[0] == 0
    keys = SplitReader(tmp_path, "train").keys()
    assert keys[0] == "ab-c-4559c254"
    assert [key.rpartition("-")[0] for key in keys] == ["ab-c", "ab-c", "-"]
    assert cli.run(main, ["show", str(tmp_path), "other/Ab c"]) == 0
    assert json.loads(capsys.readouterr().out)["json"]["file_name"] == "other/Ab c.jpg"


@given(st.text(st.characters(exclude_characters="./"), min_size=1, max_size=200))
def test_every_name_has_a_legal_key_and_a_legal_name_keeps_its_own(name: str) -> None:
    assert is_key(key_of(name))
    assert len(key_of(name)) <= MAX_KEY
    assert not is_key(name) or key_of(name) == key_of(f"./{name}") == name


def test_an_orientation_is_applied_on_reading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = picture(0, exif=exif)
    write_tar(tmp_path / "a.tar", [("a.jpg", data), ("a.txt", b"a"), *sample(1)])
    assert index(capsys, tmp_path)[0] == 0
    reader = SplitReader(tmp_path, "train")
    image, meta = reader.read(0).open_image(), reader.meta(0)
    assert image.size == (meta.width, meta.height) == (24, 32)
    upright = np.asarray(Image.open(io.BytesIO(data))).transpose(1, 0, 2)[:, ::-1]
    np.testing.assert_array_equal(np.asarray(image), upright)


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def place(path: Path) -> tarfile.TarInfo:
    with tarfile.open(path) as tar:
        return tar.getmember("000000004.jpg")


def change(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


BAD_TARS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut inside a payload": (
        lambda p: cut(p, place(p).offset_data + 100),
        "00001.tar: cannot be read beyond 000000004.jpg: unexpected end of data; it is cut or damaged; fetch it again",
    ),
    "cut between members": (
        lambda p: cut(p, place(p).offset),
        "00001.tar: ends at byte {} behind 000000003.txt without a tar's closing zeros: it was cut, fetch it again",
    ),
    "a damaged header": (
        lambda p: change(p, b"000000004.json", b"00000000X.json"),
        "00001.tar: byte {} behind 000000004.jpg begins no member and no end: it is damaged, fetch it again",
    ),
    "compressed": (
        lambda p: write_gzip(p),
        "00001.tar: cannot be read beyond its start: {}; it is compressed (gzip); decompress it first (`gunzip 00001.tar`)",
    ),
    "empty": (lambda p: p.write_bytes(b""), "00001.tar: cannot be read beyond its start: empty file"),
    "no samples": (lambda p: write_tar(p, [("README", b"x")]), "00001.tar: holds no sample; remove it"),
    "interleaved": (
        lambda p: write_tar(p, [sample(3)[0], sample(4)[0], *sample(3)[1:], *sample(4)[1:]]),
        "00001.tar: 000000003.json: the other members of 000000003 are not beside it; write the tar sorted by name",
    ),
    "a key of another shard": (
        lambda p: write_tar(p, [*sample(2), *sample(3)]),
        "00001.tar: 000000002.jpg: its sample is in 00000.tar too; keys must be unique over the dataset",
    ),
    "a sample twice": (
        lambda p: write_tar(p, [*sample(3), *sample(4), *sample(3)]),
        "00001.tar: 000000003.jpg: 000000003 is in the tar twice; keys must be unique: rename one of them",
    ),
    "a doubled member": (
        lambda p: write_tar(p, [*sample(3), sample(3)[0]]),
        "00001.tar: 000000003.jpg: its sample has two members of one name",
    ),
    "no picture": (
        lambda p: write_tar(p, sample(3)[1:]),
        "00001.tar: 000000003.json: 000000003 has 0 pictures (members .json, .txt), expected one",
    ),
    "a key with a dot": (
        lambda p: write_tar(p, [(f"a.b{name[9:]}", payload) for name, payload in sample(3)]),
        "00001.tar: a.b.jpg: a has 0 pictures (members .b.jpg, .b.json, .b.txt), expected one; names are split at their "
        "first dot, so no key can hold one: rename the members",
    ),
    "two pictures": (
        lambda p: write_tar(p, [*sample(3), ("000000003.png", picture(3, "PNG"))]),
        "00001.tar: 000000003.jpg: 000000003 has 2 pictures (members .jpg, .json, .txt, .png), expected one",
    ),
    "no caption": (
        lambda p: write_tar(p, [*sample(3)[:2], *sample(4)]),
        "00001.tar: 000000003.jpg: 000000003 has no caption (members .jpg, .json), expected .txt",
    ),
    "a blank caption": (
        lambda p: write_tar(p, [sample(3)[0], ("000000003.txt", b" \n")]),
        "00001.tar: 000000003.txt: holds no caption",
    ),
    "a cut picture": (
        lambda p: write_tar(p, [("a.jpg", picture(3)[:-200]), ("a.txt", b"a")]),
        "00001.tar: a.jpg: cannot be decoded: image file is truncated",
    ),
    "no picture under its name": (
        lambda p: write_tar(p, [("a.jpg", b"<html>"), ("a.txt", b"a")]),
        "00001.tar: a.jpg: cannot be decoded: cannot identify image file",
    ),
    "a transparent picture": (
        lambda p: write_tar(p, [("a.png", picture(3, "PNG", "RGBA")), ("a.txt", b"a")]),
        "00001.tar: a.png: is a picture of mode RGBA, transparency, 1 frames; the build converts such ones",
    ),
}


def write_gzip(path: Path) -> None:
    with tarfile.open(path, "w:gz") as tar:
        info = tarfile.TarInfo("a.jpg")
        tar.addfile(info, io.BytesIO(b""))


@pytest.mark.parametrize(("damage", "text"), BAD_TARS.values(), ids=BAD_TARS)
def test_what_is_wrong_is_named_and_no_manifest_is_written(
    tars: Path, damage: Callable[[Path], Any], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(tars / "00001.tar")
    code, out = index(capsys, tars)
    assert code == 1
    assert all(part in out for part in text.split("{}")), out
    assert "no manifest was written" in out
    assert not (tars / NAME).exists()


def test_verify_names_a_changed_byte_of_an_indexed_tar(tars: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index(capsys, tars)
    with tarfile.open(tars / "00001.tar") as tar:
        at = tar.getmember("000000004.jpg").offset_data + 60
    data = bytearray((tars / "00001.tar").read_bytes())
    data[at] ^= 1
    (tars / "00001.tar").write_bytes(data)
    findings = [str(finding) for finding in verify(tars)]
    assert "00001.tar: sha256 is " in findings[0]
    assert findings[1].startswith("00001.tar: 000000004: crc32 of 000000004.jpg is ")


def test_a_builds_folder_is_left_alone(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (dataset / NAME).read_bytes()
    code, out = index(capsys, dataset)
    assert code == 2
    assert "a build wrote it, so there is nothing to index" in out
    assert (dataset / NAME).read_bytes() == before


def test_what_index_and_a_build_take_for_samples_is_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from pipelines.config import BuildConfig
    from pipelines.sources import open_sources

    members = [
        ("README", b"x"),
        ("__meta__", b"{}"),
        *((name.replace("jpg", "JPG").replace("txt", "TXT"), data) for name, data in sample(0)),
        (".hidden.jpg", b"x"),
        *((f"deep/er/{name}", data) for name, data in sample(1)),
        *((f"d.ots/{name}", data) for name, data in sample(2)),
    ]
    write_tar(tmp_path / "a.tar", members)
    assert index(capsys, tmp_path)[0] == 0
    reader = SplitReader(tmp_path, "train")
    indexed = [(s.meta["file_name"], s.captions) for s in map(reader.read, range(len(reader)))]
    source = {"kind": "webdataset", "path": str(tmp_path / "a.tar")}
    (origin,) = open_sources(BuildConfig.model_validate({"source": source, "out": "o"}))
    built = [(r.file_name.removeprefix("a.tar/"), r.captions) for r in origin.source.records()]
    assert indexed == built
    assert len(built) == 3


def test_a_folder_of_compressed_tars_is_said_to_be_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gzip(tmp_path / "a.tar.gz")
    code, out = index(capsys, tmp_path)
    assert (code, "ends in .tar, and a.tar.gz is compressed: decompress it first" in out) == (2, True)


def test_a_folder_without_tars_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert index(capsys, tmp_path)[0] == 2
    assert "holds no file that ends in .tar" in index(capsys, tmp_path)[1]


def test_indexing_again_takes_in_new_tars(tars: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index(capsys, tars)
    first = (tars / NAME).read_bytes()
    assert index(capsys, tars)[0] == 0
    assert (tars / NAME).read_bytes() == first
    write_tar(tars / "00002.tar", sample(9))
    assert index(capsys, tars)[0] == 0
    assert len(SplitReader(tars, "train")) == 6


def test_a_killed_index_leaves_no_manifest_and_a_rerun_ends_as_if_nothing_had_happened(tars: Path) -> None:
    for number in range(2, 12):
        write_tar(tars / f"{number:05d}.tar", [m for n in range(20) for m in sample(n, f"{number:05d}{n:04d}")])
    command = [sys.executable, "-m", "shards", "index", str(tars)]
    process = subprocess.Popen(command)
    while not list(tars.glob("*.idx")):
        assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tars / NAME).exists()
    subprocess.run(command, check=True)
    assert len(SplitReader(tars, "train")) == 205
    assert verify(tars) == []


def test_energon_is_told_of_shards_splits_and_captions(tars: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index(capsys, tars, "--split", "train=*0.tar", "--split", "val=*1.tar")
    assert cli.run(main, ["energon", str(tars)]) == 0
    info, split, dataset = (
        json.loads((tars / ".nv-meta" / n).read_bytes()) for n in (".info.json", "split.yaml", "dataset.yaml")
    )
    assert info["shard_counts"] == {"00000.tar": 3, "00001.tar": 2}
    assert split == {"split_parts": {"train": ["00000.tar"], "val": ["00001.tar"]}, "exclude": []}
    assert dataset["field_map"] == {"image": "jpg,png,webp", "caption": "txt"}
    (tars / ".nv-meta" / "index.sqlite").touch()
    capsys.readouterr()
    assert cli.run(main, ["energon", str(tars)]) == 2
    assert "Energon's own prepare wrote it; move it away first" in capsys.readouterr().err
