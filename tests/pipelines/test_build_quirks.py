"""Datasets full of the damage that real image folders hold: one drawn here, and those that lie beside the checkout."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipelines.run import run_plain
from shards.manifest import Manifest
from shards.reader import SplitReader
from shards.verify import verify

SHARED = Path(__file__).parents[2] / "../shared"


def of_split(out):
    reader = SplitReader(out, "train")
    return {s.meta["file_name"]: s for s in map(reader.read, range(len(reader)))}


def odd_but_good(pictures):
    encode, photo = pictures.encode, pictures.photo
    exif = Image.Exif()
    exif[0x0112] = 6
    return {
        "plain.jpg": encode(photo(1)),
        "portrait.jpg": encode(photo(2, 48, 64)),
        "progressive.jpg": encode(photo(3), progressive=True),
        "gray.jpg": encode(photo(4, mode="L")),
        "cmyk.jpg": encode(photo(5, mode="CMYK")),
        "palette.png": encode(photo(6).convert("P"), "PNG", transparency=0),
        "rgba.png": encode(photo(7, mode="RGBA"), "PNG"),
        "lying.jpg": encode(photo(8), exif=exif),
        "dots.in.name.jpg": encode(photo(9)),
        "space in name.JPG": encode(photo(10)),
        "\u00fcmlaut.jpeg": encode(photo(11)),
        "png_named.jpg": encode(photo(12), "PNG"),
        "webp.webp": encode(photo(13), "WEBP"),
        "sixteen.png": encode(Image.fromarray(np.arange(3072, dtype=np.uint16).reshape(48, 64) * 20), "PNG"),
        "trailing.jpg": encode(photo(14)) + b"\0" * 500,
    }


def damaged(pictures):
    encode, whole = pictures.encode, pictures.encode(pictures.photo(20, 320, 240))
    half = len(whole) // 2
    return {
        "cut.jpg": (whole[: int(len(whole) * 0.6)], "truncated"),
        "zeros_inside.jpg": (whole[:half] + b"\0" * 4096 + whole[half + 4096 :], "corrupt_data"),
        "zero_bytes.jpg": (b"", "empty_file"),
        "page.jpg": (b"<!DOCTYPE html><html><body>404 Not Found</body></html>", "not_an_image"),
        "missing.jpg": (None, "missing_file"),
        "dot.png": (encode(Image.new("RGB", (1, 1)), "PNG"), "too_small"),
        "strip.png": (encode(pictures.photo(21, 900, 20), "PNG"), "aspect_ratio"),
        "bomb.png": (pictures.png_bomb(40_000), "too_many_pixels"),
        "nan.tiff": (pictures.float_tiff(np.nan), "not_finite"),
        "inf.tiff": (pictures.float_tiff(np.inf), "not_finite"),
        "black.png": (encode(Image.new("RGB", (320, 240)), "PNG"), "constant_image"),
        "copy.jpg": (encode(pictures.photo(1)), "duplicate_image"),
        "silent.jpg": (encode(pictures.photo(22)), "no_caption"),
    }


def test_odd_pictures_are_kept_and_damaged_ones_rejected_with_their_reason(
    coco, make_config, rejects, pictures, tmp_path
):
    good, bad = odd_but_good(pictures), damaged(pictures)
    files = {**good, **{name: data for name, (data, _) in bad.items()}}
    source = coco(tmp_path / "source", files, {"silent.jpg": ["...", "  "]})
    run_plain(make_config(source, tmp_path / "out"))
    assert rejects(tmp_path / "out") == {name: reason for name, (_, reason) in bad.items()}
    samples = of_split(tmp_path / "out")
    assert samples.keys() == good.keys()
    for sample in samples.values():
        image = sample.open_image()
        assert (image.mode, image.size) == ("RGB", (sample.meta["width"], sample.meta["height"]))
    assert samples["lying.jpg"].open_image().size == (48, 64)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["statistics"]["modes"] == {"RGB": 10, "CMYK": 1, "I;16": 1, "L": 1, "P": 1, "RGBA": 1}
    assert report["statistics"]["flags"]["orientation=6"] == 1
    assert verify(tmp_path / "out") == []


@pytest.mark.skipif(not (SHARED / "make_quirks.py").exists(), reason="no ../shared/make_quirks.py beside the checkout")
@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_the_shared_quirks_come_out_as_expected(make_config, rejects, zipped, tmp_path, kind):
    quirks = tmp_path / "quirks"
    subprocess.run([sys.executable, SHARED / "make_quirks.py", quirks], check=True, capture_output=True)
    images = quirks / "images" if kind == "folder" else zipped(quirks / "images", tmp_path / "images.zip", "images/")
    source = {"annotations": quirks / "annotations" / "captions_quirks.json", "images": images}
    run_plain(make_config(source, tmp_path / "out", build={"processes": 2}))
    reasons, samples = rejects(tmp_path / "out"), of_split(tmp_path / "out")
    for row in json.loads((quirks / "expected.json").read_text()):
        if row["kept"]:
            assert list(samples.pop(row["file_name"]).captions) == row["captions"]
        else:
            assert reasons.pop(row["file_name"]) in row["reason"].split("_or_")
    assert (samples, reasons) == ({}, {})
    left_aside = json.loads((tmp_path / "out" / "report.json").read_text())["splits"]["train"]["left_aside"]
    assert left_aside == {"annotations_of_unlisted_images": 1, "annotation_ids_used_twice": 1}


@pytest.mark.skipif(not (SHARED / "coco-mini").exists(), reason="no ../shared/coco-mini beside the checkout")
def test_real_pictures_are_all_kept_and_a_zip_gives_the_same_bytes(make_config, data_files, zipped, tmp_path):
    root = SHARED / "coco-mini"
    build = {"records_per_shard": 40, "processes": 2}
    run_plain(make_config(root, tmp_path / "a", build=build))
    archive = zipped(root / "train2017", tmp_path / "train2017.zip", "train2017/")
    run_plain(make_config({"root": root, "images": archive}, tmp_path / "b", build=build))
    assert Manifest.load(tmp_path / "a").splits == {"train": 80}
    assert data_files(tmp_path / "a") == data_files(tmp_path / "b")
