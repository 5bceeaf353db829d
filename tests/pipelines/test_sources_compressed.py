"""Compressed files of every kind of source: read where Python can, else said to be just that."""

import bz2
import gzip
import lzma
import shutil

import pytest
from kinds import KINDS
from tables import read, source_of

from pipelines.config import BuildConfig
from pipelines.run import run_plain
from pipelines.sources import open_sources
from shards.errors import ConfigError

PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
ROWS = [{"image": "a.jpg", "caption": "one"}, {"image": "b.jpg", "caption": "two, and\nmore"}]


def pack(path, suffix, compress):
    packed = path.with_name(f"{path.name}{suffix}")
    packed.write_bytes(compress(path.read_bytes()))
    path.unlink()
    return packed


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_tables_are_read_compressed(tmp_path, kind, suffix):
    source = source_of(kind, ROWS, tmp_path)
    plain = read(source)
    assert read({**source, "path": pack(source["path"], suffix, PACKERS[suffix])}) == plain


def test_a_folder_of_compressed_tables_is_read(tmp_path):
    pack(source_of("jsonl", ROWS, tmp_path)["path"], ".gz", gzip.compress)
    assert [r.file_name for r in read({"kind": "jsonl", "path": tmp_path})] == ["a.jpg", "b.jpg"]


@pytest.mark.parametrize("kind", ["coco", "karpathy"])
def test_caption_files_are_read_compressed(tmp_path, kind, pictures):
    rows = [(i, f"{i}.jpg", pictures.encode(pictures.photo(i)), ["x"]) for i in range(3)]
    source = KINDS[kind](tmp_path, rows)
    (path,) = tmp_path.rglob("*.json")
    source = {**source, "annotations": pack(path, ".gz", gzip.compress)}
    (origin,) = open_sources(BuildConfig.model_validate({"source": source, "out": "o", "held_out": "none"}))
    assert len(list(origin.source.records())) == 3


BROKEN = {
    "cut.jsonl": (gzip.compress(b'{"image": "a.jpg", "caption": "one"}\n' * 99)[:40], r"cut.jsonl: .*it is compressed \(gzip\)"),
    "cut.csv": (lzma.compress(b"image,caption\n" * 99)[:40], r"cut.csv: .*it is compressed \(xz\); decompress it first"),
    "a.jsonl": (b"\x28\xb5\x2f\xfd    ", r"a.jsonl: is compressed \(zstd\); decompress it first \(`unzstd a.jsonl`\)"),
    "z.csv": (b"PK\3\4    ", r"z.csv: is compressed \(zip\); decompress it first \(`unzip z.csv`\)"),
    "a.parquet": (gzip.compress(b"PAR1"), r"a.parquet: .*it is compressed \(gzip\); decompress it first \(`gunzip a.p"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_decompressed_is_said_to_be_compressed(tmp_path, name):
    data, message = BROKEN[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=message) as caught:
        read({"kind": name.rpartition(".")[2], "path": tmp_path / name})
    assert "\n" not in str(caught.value)


def test_compressed_tars_and_images_are_said_to_be_that(tmp_path, make_config, photos):
    tars = tmp_path / "tars"
    tars.mkdir()
    packed = shutil.make_archive(str(tars / "a"), "gztar", photos / "train2017")
    with pytest.raises(
        ConfigError, match=r"a.tar.gz: .*expected an uncompressed tar .*; it is compressed \(gzip\); de"
    ):
        run_plain(make_config({"kind": "webdataset", "path": packed}, tmp_path / "out"))
    with pytest.raises(
        ConfigError, match=r"no file that ends in .tar, and a.tar.gz is compressed: decompress it first"
    ):
        run_plain(make_config({"kind": "webdataset", "path": tars}, tmp_path / "out"))
    source = {"annotations": photos / "annotations" / "captions_train2017.json", "images": packed}
    with pytest.raises(ConfigError, match=r"a.tar.gz: is compressed \(gzip\); .*images are a folder or a zip"):
        run_plain(make_config(source, tmp_path / "out"))
