import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import shards.reader
from shards.errors import ConfigError, DamagedSampleError, FormatError, UserError
from shards.index import pack_index
from shards.manifest import Manifest
from shards.reader import SplitReader
from shards.sample import Sample

MakeSample = Callable[[int], Sample]
MakeDataset = Callable[[Path, list[int]], Manifest]


def flip(path: Path, offset: int) -> tuple[int, int]:
    """Change one byte; returns it as it is now, and as it was."""
    raw = bytearray(path.read_bytes())
    was = raw[offset]
    raw[offset] ^= 0x01
    path.write_bytes(raw)
    return raw[offset], was


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def offsets(dataset: Path, name: str) -> list[int]:
    raw = (dataset / f"{name}.tar.idx").read_bytes()
    return [int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw), 8)]


def test_samples_are_numbered_through_the_shards(dataset: Path, make_sample: MakeSample) -> None:
    reader = SplitReader(dataset, "train")
    assert len(reader) == 12
    assert reader.shard_sizes == (4, 3, 5)
    assert [reader.read(i) for i in range(12)] == [make_sample(n) for n in range(12)]
    assert [reader.key(i) for i in (11, 0, 6)] == ["000000000011", "000000000000", "000000000006"]
    assert [(shard.name, inside) for shard, inside in map(reader.locate, (3, 4, 11))] == [
        ("train-000000.tar", 3),
        ("train-000001.tar", 0),
        ("train-000002.tar", 4),
    ]


@pytest.mark.parametrize("index", [-1, 12])
def test_an_index_outside_the_split_is_an_error(dataset: Path, index: int) -> None:
    with pytest.raises(IndexError, match=f"sample {index} of split train, which has 12"):
        SplitReader(dataset, "train").read(index)


def test_golden_dataset_of_format_1_is_read(golden: Path) -> None:
    reader = SplitReader(golden / "shards", "train")
    assert [reader.read(i).extension for i in range(3)] == ["png", "webp", "jpg"]
    assert reader.meta(2).flags == ("gray",)
    assert [reader.read(i).open_image().mode for i in range(3)] == ["RGB"] * 3
    assert reader.read(0).open_image().getpixel((0, 0)) == (255, 0, 0)
    assert reader.read(0).captions[1] == "Ein roter Fleck, größer als der grüne."


def test_nothing_is_opened_before_the_first_read(dataset: Path) -> None:
    reader = SplitReader(dataset, "train")
    for path in dataset.glob("train-*"):
        path.unlink()
    assert len(reader) == 12
    with pytest.raises(FormatError, match=r"train-000001\.tar: is missing, the manifest lists its shard"):
        reader.read(5)


def test_a_pickled_reader_opens_its_own_files(dataset: Path, make_sample: MakeSample) -> None:
    reader = SplitReader(dataset, "train")
    reader.read(0)
    assert len(pickle.dumps(reader)) < 3000
    assert pickle.loads(pickle.dumps(reader)).read(7) == make_sample(7)


def test_files_are_closed_again(tmp_path: Path, make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards.reader, "MAX_OPEN", 3)
    make_dataset(tmp_path, [1] * 10)
    before = open_files()
    reader = SplitReader(tmp_path, "train")
    assert reader.keys() == [f"{n:012d}" for n in range(10)]
    assert open_files() == before + 2 * 3
    del reader
    assert open_files() == before


def test_an_unknown_split_names_the_known(dataset: Path) -> None:
    with pytest.raises(ConfigError, match=r"split 'val' is not in the dataset; it has: train \(12 samples\)"):
        SplitReader(dataset, "val")


# Damage: each message names the shard, the sample, what was found and what was expected.


def test_a_cut_at_a_member_boundary_is_found_on_opening(dataset: Path) -> None:
    path = dataset / "train-000001.tar"
    size, cut = path.stat().st_size, offsets(dataset, "train-000001")[2]
    os.truncate(path, cut)
    message = rf"train-000001\.tar: has {cut} bytes, the manifest says {size}; run the build again"
    with pytest.raises(FormatError, match=message):
        SplitReader(dataset, "train").read(4)


def test_a_cut_inside_a_payload_while_open_names_the_sample(dataset: Path, make_sample: MakeSample) -> None:
    reader = SplitReader(dataset, "train")
    assert reader.read(4) == make_sample(4)
    os.truncate(dataset / "train-000001.tar", offsets(dataset, "train-000001")[2] + 512 + 100)
    assert reader.read(5) == make_sample(5)
    message = (
        r"train-000001\.tar: sample 2 \(000000000006\): 000000000006\.jpg has 100 bytes before the end of the file, "
        "expected 223"
    )
    with pytest.raises(DamagedSampleError, match=message):
        reader.read(6)


def test_a_flipped_header_byte_names_the_sample(dataset: Path) -> None:
    found, was = flip(dataset / "train-000002.tar", offsets(dataset, "train-000002")[1] + 130)
    message = (
        rf"train-000002\.tar: sample 1 \(000000000008\): byte 130 of the tar header of 000000000008\.jpg is "
        rf"{found:#04x}, expected {was:#04x}"
    )
    with pytest.raises(DamagedSampleError, match=message) as caught:
        SplitReader(dataset, "train").read(8)
    assert caught.value.key == "000000000008"
    assert caught.value.path == dataset / "train-000002.tar"


def test_a_flipped_payload_byte_names_the_sample_and_leaves_the_others(dataset: Path, make_sample: MakeSample) -> None:
    flip(dataset / "train-000000.tar", offsets(dataset, "train-000000")[3] + 512 + 5)
    reader = SplitReader(dataset, "train")
    message = (
        r"train-000000\.tar: sample 3 \(000000000003\): crc32 of 000000000003\.jpg is [0-9a-f]{8}, "
        r"meta\.jsonl says [0-9a-f]{8}"
    )
    with pytest.raises(DamagedSampleError, match=message):
        reader.read(3)
    assert reader.read(2) == make_sample(2)


def test_flipped_captions_are_found_without_the_picture(dataset: Path) -> None:
    flip(dataset / "train-000000.tar", SplitReader(dataset, "train").meta(1).parts[1].offset)
    with pytest.raises(DamagedSampleError, match=r"sample 1 \(000000000001\): crc32 of 000000000001\.json is"):
        SplitReader(dataset, "train").read_json(1)


def test_every_flipped_byte_of_a_sample_is_found(dataset: Path) -> None:
    path, (start, stop) = dataset / "train-000000.tar", offsets(dataset, "train-000000")[:2]
    raw = path.read_bytes()
    for offset in range(start, stop, 3):
        path.write_bytes(raw[:offset] + bytes([raw[offset] ^ 0xFF]) + raw[offset + 1 :])
        with pytest.raises(DamagedSampleError, match=r"train-000000\.tar: sample 0 \(000000000000\): "):
            SplitReader(dataset, "train").read(0)


def test_an_index_of_another_shard_is_found(dataset: Path) -> None:
    (dataset / "train-000000.tar.idx").write_bytes((dataset / "train-000001.tar.idx").read_bytes())
    with pytest.raises(FormatError, match=r"train-000000\.tar\.idx: has 32 bytes, expected 40 for 4 samples"):
        SplitReader(dataset, "train").read(0)


def test_an_index_with_a_shifted_sample_names_it(dataset: Path) -> None:
    places = offsets(dataset, "train-000002")
    places[2] += 512
    (dataset / "train-000002.tar.idx").write_bytes(pack_index(places))
    with pytest.raises(
        DamagedSampleError, match=r"train-000002\.tar: sample 2 \(000000000009\): byte 0 of the tar header"
    ):
        SplitReader(dataset, "train").read(9)
    with pytest.raises(
        DamagedSampleError, match=r"train-000002\.tar: sample 1 \(000000000008\): its members end at byte"
    ):
        SplitReader(dataset, "train").read(8)


def test_a_foreign_file_of_the_same_size_is_found(dataset: Path) -> None:
    path = dataset / "train-000001.tar"
    path.write_bytes(os.urandom(path.stat().st_size))
    with pytest.raises(
        DamagedSampleError, match=r"train-000001\.tar: sample 0 \(000000000004\): byte \d+ of the tar header"
    ):
        SplitReader(dataset, "train").read(4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw[:-1], r"train-000001\.meta\.jsonl: has \d+ bytes, expected 3 equal lines"),
        (lambda raw: b"", r"train-000001\.meta\.jsonl: has 0 bytes, expected 3 equal lines"),
        (lambda raw: b"[" + raw[1:], r"train-000001\.tar: sample 0: line 1 of train-000001\.meta\.jsonl is damaged"),
        (lambda raw: raw.replace(b'"bytes":', b'"bites":'), "line 1 of train-000001.meta.jsonl is damaged: 'bytes'"),
        (lambda raw: raw.replace(b'"width":', b'"width":-', 1)[:-1], "expected parts, and whole numbers"),
    ],
)
def test_a_damaged_sample_list_is_found(dataset: Path, change: Callable[[bytes], bytes], message: str) -> None:
    path = dataset / "train-000001.meta.jsonl"
    raw = path.read_bytes()
    changed = change(raw)
    if message.startswith("expected parts"):  # keep the width of the lines
        first, rest = raw.split(b"\n", 1)
        changed = first.replace(b'"width":14', b'"width":-1') + b"\n" + rest
    path.write_bytes(changed)
    with pytest.raises(FormatError, match=message):
        SplitReader(dataset, "train").read(4)


def test_every_damage_is_an_error_for_people(dataset: Path) -> None:
    raw = (dataset / "train-000001.meta.jsonl").read_bytes()
    for offset in range(raw.index(b"\n")):
        (dataset / "train-000001.meta.jsonl").write_bytes(raw[:offset] + b"7" + raw[offset + 1 :])
        with suppress(UserError):  # anything else is a traceback for the user; a flag or an unused digit may pass
            SplitReader(dataset, "train").read(4)
