import io
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance

from pipelines.addition import Addition
from pipelines.captions import clean_captions
from pipelines.config import FilterConfig
from pipelines.fingerprint import fingerprint
from pipelines.known import Known, Likeness
from pipelines.records import Record
from pipelines.run import run_plain
from pipelines.spool import Spool
from shards.manifest import Manifest
from shards.verify import verify

ON = {"near_duplicate_bits": 4}


def details(out):
    rows = map(json.loads, (out / "rejects.jsonl").read_text().splitlines())
    return {row["file_name"]: (row["reason"], row["detail"]) for row in rows}


def altered(image, encode):
    """The same picture in other shapes, most of which phones and web sites give it."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return {
        "quality.jpg": encode(image, quality=30),
        "half.jpg": encode(image.resize((160, 120))),
        "lossless.png": encode(image, "PNG"),
        "webp.webp": encode(image, "WEBP"),
        "gray.jpg": encode(image.convert("L")),
        "bright.jpg": encode(ImageEnhance.Brightness(image).enhance(1.1)),
        "cmyk.jpg": encode(image.convert("CMYK")),
        "turned.jpg": encode(image.transpose(Image.Transpose.ROTATE_90), exif=exif),
    }


def test_near_duplicates_are_rejected_whatever_their_size_kind_and_quality(coco, make_config, pictures, tmp_path):
    first, others = pictures.scene(1), {f"other{i}.jpg": pictures.encode(pictures.scene(i)) for i in range(2, 8)}
    near = altered(first, pictures.encode)
    source = coco(tmp_path / "source", {"first.jpg": pictures.encode(first), **others, **near})
    run_plain(make_config(source, tmp_path / "out", filters=ON, build={"max_reject_share": 1}))
    found = details(tmp_path / "out")
    assert found.keys() == near.keys()
    assert {reason for reason, _ in found.values()} == {"near_duplicate"}
    assert all(detail.startswith("looks like image 1: ") for _, detail in found.values())
    assert found["lossless.png"][1] in (
        "looks like image 1: 0 of 64 bits differ",
        "looks like image 1: 2 of 64 bits differ",
    )


def test_what_looks_like_a_held_out_picture_is_a_leak(coco, make_config, pictures, tmp_path):
    held = pictures.scene(1)
    train = {f"{i}.jpg": pictures.encode(pictures.scene(i)) for i in range(2, 6)}
    source = coco(tmp_path / "source", {"like.jpg": pictures.encode(held.resize((200, 150))), **train})
    coco(source, {"held.jpg": pictures.encode(held)}, split="val", first_id=500)
    run_plain(make_config(source, tmp_path / "out", filters=ON))
    assert details(tmp_path / "out") == {
        "like.jpg": ("split_leak", "looks like image 500 of split val: 0 of 64 bits differ")
    }


def test_a_picture_that_is_rejected_itself_takes_no_other_with_it(coco, make_config, pictures, tmp_path):
    image = pictures.scene(1)
    whole = pictures.encode(image)
    files = {
        "tiny.jpg": pictures.encode(image.resize((20, 15))),
        "cut.jpg": whole[: len(whole) * 2 // 3],
        "gray.jpg": pictures.encode(image.convert("L")),
        "silent.jpg": pictures.encode(image, quality=70),
        "good.jpg": whole,
    }
    limits = {**ON, "color_modes": ["RGB"]}
    source = coco(tmp_path / "source", files, {"silent.jpg": ["..."]})
    run_plain(make_config(source, tmp_path / "out", filters=limits, build={"max_reject_share": 1}))
    reasons = {name: reason for name, (reason, _) in details(tmp_path / "out").items()}
    expected = {"tiny.jpg": "too_small", "cut.jpg": "truncated", "gray.jpg": "color_mode", "silent.jpg": "no_caption"}
    assert reasons == expected


def test_flat_and_nearly_flat_pictures_are_like_no_other(pictures):
    rng = np.random.default_rng(0)
    for noise in (0, 2, 10):
        pixels = np.clip(rng.normal(200, noise, (240, 320)), 0, 255).astype(np.uint8)
        assert fingerprint(pictures.encode(Image.fromarray(pixels)), FilterConfig(**ON)) is None
    page = Image.new("L", (320, 240), 250)
    prints = set()
    for x in range(0, 300, 30):
        image = page.copy()
        image.paste(20, (x, 100, x + 20, 120))
        prints.add(fingerprint(pictures.encode(image), FilterConfig(**ON)))
    assert len(prints) == 10


def test_a_hash_does_not_depend_on_the_scale_at_which_a_jpeg_is_decoded(pictures):
    limits = FilterConfig(**ON)
    for seed in range(5):
        image = pictures.scene(seed).resize((1280, 960), Image.Resampling.BICUBIC)
        data = pictures.encode(image, quality=95)
        whole = fingerprint(pictures.encode(Image.open(io.BytesIO(data)), "PNG"), limits)
        assert (whole ^ fingerprint(data, limits)).bit_count() <= 2


def test_hashes_are_remembered_until_what_they_depend_on_changes(coco, make_config, pictures, tmp_path):
    files = {f"{i}.jpg": pictures.encode(pictures.scene(i)) for i in range(8)}
    files["like.jpg"] = pictures.encode(pictures.scene(1).resize((160, 120)))
    source, out = coco(tmp_path / "source", files), tmp_path / "out"
    again = {"overwrite": True}
    assert run_plain(make_config(source, out)).splits == {"train": 9}
    assert run_plain(make_config(source, out, filters=ON, build=again)).rejected == {"near_duplicate": 1}
    first = (out / ".build" / "files.bin").stat().st_mtime_ns
    assert run_plain(make_config(source, out, filters={"near_duplicate_bits": 2}, build=again)).splits == {"train": 8}
    assert (out / ".build" / "files.bin").stat().st_mtime_ns == first
    strict = {**ON, "min_side_px": 130}
    assert run_plain(make_config(source, out, filters=strict, build=again)).rejected == {"too_small": 1}
    assert run_plain(make_config(source, out, filters=ON, build=again)).rejected == {"near_duplicate": 1}


def test_without_the_filter_nothing_of_it_stands_in_the_manifest(coco, make_config, pictures, tmp_path):
    data = pictures.encode(pictures.scene(1))
    source = coco(tmp_path / "source", {"a.jpg": data, "b.png": pictures.encode(pictures.scene(1), "PNG")})
    run_plain(make_config(source, tmp_path / "out"))
    manifest = Manifest.load(tmp_path / "out")
    assert manifest.splits == {"train": 2}
    assert manifest.settings["filters"].keys() == {
        *("min_side_px", "max_pixels", "max_aspect_ratio", "constant_levels", "duplicates", "norm_mean", "norm_std")
    }


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"near_duplicate_bits needs the package ImageHash; pip install"):
        FilterConfig(**ON)


@pytest.mark.parametrize("runner", ["processes", "threads"])
def test_an_addition_is_compared_with_the_pictures_of_the_dataset(coco, make_config, pictures, tmp_path, runner):
    """Built without the filter, its pictures are looked at as they are stored, converted ones too."""
    encode, scene = pictures.encode, pictures.scene
    source = coco(tmp_path / "source", {f"{i}.png": encode(scene(i).convert("RGBA"), "PNG") for i in range(1, 12)})
    coco(source, {"held.jpg": encode(scene(20))}, split="val", first_id=500)
    out = tmp_path / "out"
    run_plain(make_config(source, out))
    new = {f"new{i}.jpg": encode(scene(i)) for i in (30, 31)}
    near = {
        name: data
        for name, data in altered(scene(3), encode).items()
        if name in ("quality.jpg", "half.jpg", "turned.jpg")
    }
    more = coco(tmp_path / "more", {**new, **near, "leak.jpg": encode(scene(20), quality=40)}, first_id=900)
    settings = {"filters": {**ON, "leaks": "fail"}, "build": {"runner": runner, "max_reject_share": 1}}
    assert run_plain(make_config(more, out, **settings), Addition).added == {"train": 2}
    found = {
        row["file_name"]: (row["reason"], row["detail"])
        for row in map(json.loads, (out / "rejects-1.jsonl").read_text().splitlines())
    }
    assert found.keys() == {*near, "leak.jpg"}
    assert found["leak.jpg"] == ("split_leak", "is like 000000000500 in split val of the dataset: 0 of 64 bits differ")
    for name in near:
        assert found[name][0] == "near_duplicate"
        assert found[name][1].startswith("is like 000000000003 of the dataset: ")
    assert run_plain(make_config(more, out, **settings), Addition).unchanged
    assert verify(out) == []


@given(
    st.lists(st.integers(0, 2**64 - 1), max_size=30),
    st.lists(st.integers(0, 2**64 - 1), max_size=10),
    st.lists(st.tuples(st.integers(0, 29), st.sets(st.integers(0, 63), max_size=5)), max_size=10),
)
def test_all_that_is_near_the_dataset_is_rejected_and_nothing_else(known, new, flips):
    for at, bits in flips:
        if known:
            new.append(known[at % len(known)] ^ sum(1 << bit for bit in bits))
    keys = [f"k{i}" for i in range(len(known))]
    likeness = Likeness(np.array(known, np.uint64), keys, ["val" if i % 2 else "train" for i in range(len(known))])
    with tempfile.TemporaryDirectory() as folder:
        spool = Spool(Path(folder), 0)
        for i in range(len(new)):
            spool.add(Record(i, f"{i}.jpg", ("x",)), clean_captions(("x",), FilterConfig()), (1, i))
        spool.flush()
        spool.table["facts"]["comparable"], spool.table["facts"]["likeness"] = True, new
        Known(likeness=likeness).reject_alike(spool, ["train", "val"], 4)
        for i, value in enumerate(new):
            near = [j for j, other in enumerate(known) if (value ^ other).bit_count() <= 4]
            rejection = spool.rejection(i)
            assert (rejection is not None) == bool(near)
            if rejection is not None:
                assert f"is like k{near[0]} " in rejection.detail
                assert rejection.reason == ("split_leak" if near[0] % 2 else "near_duplicate")
        spool.close()
