"""What is promised about pictures, captions and names, from the command line to the reader."""

import io
import json

import numpy as np
import pytest
from PIL import Image, ImageOps, features

from pipelines.run import run_plain
from shards.reader import SplitReader


def samples(out):
    reader = SplitReader(out, "train")
    return {s.meta["file_name"]: s for s in map(reader.read, range(len(reader)))}


def test_three_bad_files_of_forty_cost_three_records_and_no_error(coco, command, pictures, tmp_path):
    files = {f"{i}.jpg": pictures.encode(pictures.photo(i, 96, 64)) for i in range(40)}
    files |= {"7.jpg": files["7.jpg"][: len(files["7.jpg"]) * 6 // 10], "8.jpg": b"", "9.jpg": b"<html>404</html>"}
    path = tmp_path / "build.yaml"
    path.write_text(json.dumps({"source": str(coco(tmp_path / "source", files)), "out": str(tmp_path / "out")}))
    process = command("build", path, "--plain")
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    rows = list(map(json.loads, (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()))
    assert {row["file_name"]: row["reason"] for row in rows} == {
        "7.jpg": "truncated",
        "8.jpg": "empty_file",
        "9.jpg": "not_an_image",
    }
    keys = set(SplitReader(tmp_path / "out", "train").keys())
    assert len(keys) == 37
    assert not keys & {f"{row['image_id']:012d}" for row in rows}


def other_shapes(pictures):
    """Files as cameras, scanners, phones and web sites make them, with the flags of what is stored."""
    encode, photo = pictures.encode, pictures.photo
    levels = np.arange(3072).reshape(48, 64)
    several = {"save_all": True, "append_images": [photo(91)]}
    broken = Image.Exif()
    broken[0x0112] = 6
    lying = encode(photo(50), exif=broken)
    at = lying.index(b"Exif\0\0") + 10
    shapes = {
        "gray16.png": (encode(Image.fromarray((levels * 20).astype(np.uint16)), "PNG"), ["mode=I;16"]),
        "gray16.tiff": (encode(Image.fromarray((levels * 19).astype(np.uint16)), "TIFF"), ["format=TIFF", "mode=I;16"]),
        "gray32.tiff": (encode(Image.fromarray((levels * 90_000).astype(np.int32)), "TIFF"), ["format=TIFF", "mode=I"]),
        "float.tiff": (pictures.float_tiff(0.9), ["format=TIFF", "mode=F"]),
        "gray_alpha.png": (encode(photo(51).convert("LA"), "PNG"), ["mode=LA"]),
        "two_frames.mpo": (encode(photo(52), "MPO", **several), None),
        "moving.gif": (encode(photo(53).convert("P"), "GIF", **several), ["format=GIF", "mode=P", "frames=2"]),
        "moving.webp": (encode(photo(54), "WEBP", **several), ["frames=2"]),
        "broken_exif.jpg": (lying[:at] + b"\xff" * 4 + lying[at + 4 :], None),
    }
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        flags = None if orientation == 1 else [f"orientation={orientation}"]
        shapes[f"turned{orientation}.jpg"] = (encode(photo(60 + orientation), exif=exif), flags)
    if features.check("avif"):
        shapes["phone.avif"] = (encode(photo(55), "AVIF"), ["format=AVIF"])
    return shapes


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")  # as Pillow says of it, here and in any reader
def test_other_shapes_come_out_as_upright_rgb_of_the_stored_size(coco, make_config, pictures, rejects, tmp_path):
    shapes = other_shapes(pictures)
    source = coco(tmp_path / "source", {name: data for name, (data, _) in shapes.items()})
    run_plain(make_config(source, tmp_path / "out"))
    assert rejects(tmp_path / "out") == {}
    reader = SplitReader(tmp_path / "out", "train")
    metas = {m.key: m for m in reader.metas()}
    for name, sample in samples(tmp_path / "out").items():
        data, flags = shapes[name]
        image = sample.open_image()
        assert (image.mode, image.size) == ("RGB", (sample.meta["width"], sample.meta["height"])), name
        assert image.size == ((48, 64) if name[6:7] in set("5678") and name.startswith("turned") else (64, 48)), name
        assert list(metas[sample.key].flags) == ([] if flags is None else [*flags, "converted"]), name
        if flags is None:
            assert sample.image == data, name
        if name.startswith("turned"):
            upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
            assert np.array_equal(image, upright.convert("RGB")), name
    report = json.loads((tmp_path / "out" / "report.json").read_text())["statistics"]
    assert {mode: report["modes"][mode] for mode in ("I;16", "I", "F", "LA", "P")} == {
        "I;16": 2,
        "I": 1,
        "F": 1,
        "LA": 1,
        "P": 1,
    }


def test_captions_are_cleaned_and_what_is_left_aside_is_counted(coco, make_config, pictures, rejects, tmp_path):
    captions = {
        "blank.jpg": ["", "a dog on a sofa"],
        "spaces.jpg": ["  two  spaces\n"],
        "dots.jpg": ["...", "\u2026"],
        "twins.jpg": ["caf\u00e9 table", "cafe\u0301 table"],
        "five.jpg": [f"caption {i}" for i in range(5)],
        "seven.jpg": [f"caption {i}" for i in range(7)],
        "odd.jpg": [float("nan"), None, 7, ["a list"], "a line\u2028break", "nul\0byte", "long " * 2000],
    }
    files = {name: pictures.encode(pictures.photo(i)) for i, name in enumerate(captions)}
    extra = [
        {"id": 1, "image_id": 424242, "caption": "of an image that is not listed"},
        {"id": 2, "image_id": 1, "caption": "a first one"},
        {"id": 2, "image_id": 1, "caption": "its id was used before"},
    ]
    run_plain(make_config(coco(tmp_path / "source", files, captions, extra_annotations=extra), tmp_path / "out"))
    found = {name: list(sample.captions) for name, sample in samples(tmp_path / "out").items()}
    assert rejects(tmp_path / "out") == {"dots.jpg": "no_caption"}
    assert found == {
        "blank.jpg": ["a dog on a sofa", "a first one"],
        "spaces.jpg": ["two spaces"],
        "twins.jpg": ["caf\u00e9 table"],
        "five.jpg": captions["five.jpg"],
        "seven.jpg": captions["seven.jpg"],
        "odd.jpg": ["a line break", "nul byte", ("long " * 2000).strip()],
    }
    facts = json.loads((tmp_path / "out" / "report.json").read_text())
    assert facts["splits"]["train"]["left_aside"] == {
        "annotations_of_unlisted_images": 1,
        "annotation_ids_used_twice": 1,
    }
    assert facts["statistics"]["caption_cleaning"] == {"changed": 4, "not_text": 4, "empty": 3, "duplicate": 1}
