import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shards.errors import ConfigError
from shards.index import pack_index
from shards.manifest import Manifest
from shards.sample import Sample
from shards.verify import Finding, verify
from shards.writer import ShardWriter

MakeSample = Callable[[int], Sample]


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 0x01
    path.write_bytes(raw)


def offsets(dataset: Path, name: str) -> list[int]:
    raw = (dataset / f"{name}.tar.idx").read_bytes()
    return [int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw), 8)]


def lines(findings: list[Finding]) -> list[str]:
    return [str(finding) for finding in findings]


def starts(findings: list[Finding], *expected: str) -> bool:
    return all(map(str.startswith, lines(findings), expected)) and len(findings) == len(expected)


def test_a_whole_folder_has_no_findings(dataset: Path, golden: Path) -> None:
    assert verify(dataset) == []
    assert verify(golden / "shards") == []


def test_half_written_files_are_no_findings(dataset: Path) -> None:
    (dataset / ".train-000003.tar.tmp").write_bytes(b"half")
    assert verify(dataset) == []


def test_every_flipped_byte_of_a_tar_is_found_with_its_shard(dataset: Path) -> None:
    path = dataset / "train-000001.tar"
    raw = path.read_bytes()
    for offset in range(0, len(raw), 97):
        path.write_bytes(raw[:offset] + bytes([raw[offset] ^ 0x10]) + raw[offset + 1 :])
        assert {finding.path for finding in verify(dataset)} == {"train-000001.tar"}


def test_a_flipped_payload_byte_names_the_key(dataset: Path) -> None:
    flip(dataset / "train-000000.tar", offsets(dataset, "train-000000")[2] + 520)
    assert starts(
        verify(dataset),
        "train-000000.tar: sha256 is ",
        "train-000000.tar: 000000000002: crc32 of 000000000002.jpg is ",
    )


def test_a_flipped_padding_byte_names_the_key(dataset: Path) -> None:
    flip(dataset / "train-000000.tar", offsets(dataset, "train-000000")[2] + 600)
    assert starts(
        verify(dataset),
        "train-000000.tar: sha256 is ",
        "train-000000.tar: 000000000002: the padding behind 000000000002.jpg has bytes that are not zero",
    )


def test_a_flipped_header_byte_names_the_key_and_the_samples_behind_it_are_still_checked(dataset: Path) -> None:
    flip(dataset / "train-000002.tar", offsets(dataset, "train-000002")[1] + 124)
    flip(dataset / "train-000002.tar", offsets(dataset, "train-000002")[3] + 512)
    assert starts(
        verify(dataset),
        "train-000002.tar: sha256 is ",
        "train-000002.tar: 000000000008: byte 124 of the tar header of 000000000008.jpg is 0x31, expected 0x30",
        "train-000002.tar: 000000000010: crc32 of 000000000010.jpg is ",
    )


def test_a_cut_inside_a_payload_names_every_sample_behind_it(dataset: Path) -> None:
    path = dataset / "train-000001.tar"
    size, cut = path.stat().st_size, offsets(dataset, "train-000001")[1] + 612
    os.truncate(path, cut)
    assert starts(
        verify(dataset),
        f"train-000001.tar: has {cut} bytes, the manifest says {size}",
        "train-000001.tar: sha256 is ",
        "train-000001.tar: 000000000005: 000000000005.jpg has 100 bytes before the end of the file, expected 186",
        "train-000001.tar: 000000000006: its tar header has 0 bytes, expected 512",
        "train-000001.tar: 000000000006: 0 bytes follow the last sample, expected the 1024 zero bytes that end a tar",
    )


def test_a_cut_at_the_last_member_names_the_sample_before_it(dataset: Path) -> None:
    path = dataset / "train-000002.tar"
    os.truncate(path, path.stat().st_size - 1024)
    found = lines(verify(dataset))
    assert found[0].startswith("train-000002.tar: has ")
    assert found[-1].startswith("train-000002.tar: 000000000011: 0 bytes follow the last sample")


def test_missing_files_are_named(dataset: Path) -> None:
    for name in ("train-000000.tar", "train-000001.tar.idx", "train-000002.meta.jsonl"):
        (dataset / name).unlink()
    found = lines(verify(dataset))
    assert "train-000000.tar: is missing, the manifest lists it with 4 samples" in found
    assert "train-000001.tar.idx: is missing, the manifest lists its shard" in found
    assert "train-000002.meta.jsonl: is missing, the manifest lists its shard" in found


def test_a_wrong_index_names_the_first_sample_it_is_wrong_for(dataset: Path) -> None:
    places = offsets(dataset, "train-000002")
    places[2] += 512
    (dataset / "train-000002.tar.idx").write_bytes(pack_index(places))
    assert starts(
        verify(dataset),
        "train-000002.tar.idx: sha256 is ",
        f"train-000002.tar.idx: 000000000009: begins at {places[2]}, train-000002.meta.jsonl says {places[2] - 512}",
    )


def test_a_short_index_and_an_impossible_one_are_findings(dataset: Path) -> None:
    (dataset / "train-000000.tar.idx").write_bytes(bytes(16))
    (dataset / "train-000001.tar.idx").write_bytes(bytes(32))
    found = lines(verify(dataset))
    assert "train-000000.tar.idx: has 16 bytes, expected 40 for 4 samples" in found
    assert any(line.startswith("train-000001.tar.idx: sample 0 spans bytes 0 to 0") for line in found)


def test_a_damaged_line_of_the_sample_list_is_named(dataset: Path) -> None:
    path = dataset / "train-000001.meta.jsonl"
    raw = path.read_bytes()
    path.write_bytes(raw[: raw.index(b"\n") + 1] + b"x" + raw[raw.index(b"\n") + 2 :])
    found = lines(verify(dataset))
    assert found[0].startswith("train-000001.meta.jsonl: sha256 is ")
    assert found[1].startswith("train-000001.meta.jsonl: line 2 is damaged: ")
    assert len(found) == 2  # the samples around it are still found


def test_a_sample_list_that_is_too_short_is_a_finding(dataset: Path) -> None:
    path = dataset / "train-000001.meta.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    assert "train-000001.meta.jsonl: has 2 lines, the manifest says 3" in lines(verify(dataset))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '"splits": {\n  "train": 12',
            '"splits": {\n  "train": 13',
            'splits is {"train": 13}, its shards give {"train": 12}',
        ),
        ('"nsamples": 4', '"nsamples": 5', "shardlist is [{"),
        ('"wids_version": 1', '"wids_version": 2', "wids_version is 2, its shards give 1"),
        ('"seed": 1', '"seed": 2', "settings: seed is 2, .build/settings.json says 1"),
        ('"wids_version"', '"mine": 1, "wids_version"', "mine is 1, its shards give null"),
    ],
)
def test_an_edited_manifest_is_a_finding(dataset: Path, old: str, new: str, message: str) -> None:
    (dataset / ".build").mkdir()
    (dataset / ".build" / "settings.json").write_text('{"seed": 1, "sources": {"train": "a"}}')
    assert verify(dataset) == []
    text = (dataset / "manifest.json").read_text()
    assert old in text
    (dataset / "manifest.json").write_text(text.replace(old, new, 1))
    assert starts(verify(dataset), f"manifest.json: {message}")


@pytest.mark.parametrize("name", ["train-000001.tar.idx", "train-000001.meta.jsonl"])
def test_an_intact_tar_is_not_blamed_for_its_companions(dataset: Path, name: str) -> None:
    raw = (dataset / name).read_bytes()
    (dataset / name).write_bytes(raw.replace(b"1", b"2") if name.endswith("jsonl") else b"\1" + raw[1:])
    found = verify(dataset)
    assert {f.path for f in found} == {name}
    assert found[0].problem.startswith("sha256 is ")


@pytest.mark.parametrize("name", ["train-000001.tar", "train-000001.tar.idx", "train-000001.meta.jsonl"])
def test_a_folder_in_place_of_a_file_is_a_finding(dataset: Path, name: str) -> None:
    (dataset / name).unlink()
    (dataset / name).mkdir()
    assert {f.path for f in verify(dataset)} == {name}


def test_a_key_in_two_shards_is_a_finding(tmp_path: Path, make_sample: MakeSample) -> None:
    entries = []
    for name, numbers in (("train-000000", (1, 2)), ("val-000000", (3, 2))):
        with ShardWriter(tmp_path, name, name.split("-")[0]) as writer:
            for number in numbers:
                writer.write(make_sample(number))
        entries.append(writer.entry)
    Manifest(tuple(entries)).save(tmp_path)
    assert lines(verify(tmp_path)) == [
        "val-000000.tar: 000000000002: the key is in train-000000.tar too; keys must be unique over the dataset"
    ]


def test_a_shard_that_the_manifest_does_not_list_is_a_finding(dataset: Path) -> None:
    (dataset / "train-000007.tar").write_bytes(b"")
    assert starts(verify(dataset), "train-000007.tar: is not in the manifest; remove it")


def test_a_folder_without_manifest_cannot_be_verified(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no manifest\.json"):
        verify(tmp_path)
