import io
import json
import tarfile
from pathlib import Path

import pytest

from pipelines.config import BuildConfig
from pipelines.run import run_plain
from pipelines.sources import open_sources
from shards.errors import ConfigError
from shards.reader import SplitReader


def tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            header = tarfile.TarInfo(name)
            header.size = len(data)
            archive.addfile(header, io.BytesIO(data))
    return path


def read(path, **fields):
    source = {"kind": "webdataset", "path": path, **fields}
    (origin,) = open_sources(BuildConfig.model_validate({"source": source, "out": "o"}))
    return list(origin.source.records()), origin.source


def test_captions_come_from_txt_or_json(tmp_path):
    members = [
        ("a.jpg", b"x"), ("a.txt", b"from the text"), ("a.json", b'{"caption": "from the json"}'),
        ("b.png", b"x"), ("b.json", b'{"caption": ["one", "two"]}'),
        ("c.jpg", b"x"),
        ("d.jpg", b"x"), ("d.txt", b"\xff\xfe"),
        ("e.jpg", b"x"), ("e.json", b"{"),
    ]  # fmt: skip
    records, source = read(tar(tmp_path / "a.tar", members))
    assert [r.captions for r in records] == [("from the text",), ("one", "two"), (), (None,), ()]
    assert [r.image_id for r in records] == [f"a.tar/{name}" for name in "abcde"]
    assert [r.file_name for r in records][:2] == ["a.tar/a.jpg", "a.tar/b.png"]
    assert source.counts == {"json_members_that_are_no_object": 1}
    assert read(tmp_path / "a.tar", caption_field="caption")[0][0].captions == ("from the json",)


def test_long_names_folders_and_resource_forks_are_taken_as_tars_have_them(tmp_path):
    deep = "folder.with.dots/" + "n" * 200
    members = [
        ("._a.jpg", b"mac"),
        (f"{deep}.jpg", b"x"),
        (f"{deep}.txt", b"long"),
        ("\u00fc.jpg", b"x"),
        ("\u00fc.txt", b"uml"),
    ]
    records, _ = read(tar(tmp_path / "a.tar", members))
    assert [(r.image_id, r.captions) for r in records] == [(f"a.tar/{deep}", ("long",)), ("a.tar/\u00fc", ("uml",))]


def test_extensions_may_be_in_capitals_and_members_of_no_sample_are_passed_over(tmp_path):
    members = [("README", b"x"), ("__index__", b"{}"), ("a.JPG", b"x"), ("a.TXT", b"one"), ("b.Png", b"x"),
               ("b.Json", b'{"caption": "two"}'), ("c.JPG", b"x"), ("c.CAPTION", b"three")]  # fmt: skip
    records, _ = read(tar(tmp_path / "a.tar", members))
    assert [(r.file_name, r.captions) for r in records] == [
        ("a.tar/a.JPG", ("one",)),
        ("a.tar/b.Png", ("two",)),
        ("a.tar/c.JPG", ("three",)),
    ]
    assert read(tmp_path / "a.tar", image_field="JPG", caption_field="TXT")[0][0] == records[0]


def test_a_sample_without_an_image_is_rejected(tmp_path, make_config, pictures, rejects):
    photo = pictures.encode(pictures.photo(1))
    members = [("a.jpg", photo), ("a.txt", b"one"), ("b.txt", b"alone")]
    run_plain(make_config({"kind": "webdataset", "path": tar(tmp_path / "a.tar", members)}, tmp_path / "out"))
    assert rejects(tmp_path / "out") == {"a.tar/b": "missing_file"}


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.jpg", b"x"), ("b.jpg", b"x"), ("a.txt", b"x")], r"a.tar: members of sample 'a' stand apart"),
        ([("a.jpg", b"x"), ("a.jpg", b"y")], r"a.tar: holds 'a.jpg' twice"),
        ([("a.jpg", b"x"), ("a.JPG", b"y")], r"a.tar: holds 'a.JPG' twice"),
        (
            [("a.jpg", b"x"), ("a.txt", b"x"), ("b.jpg", b"x"), ("a.jpg", b"y"), ("a.txt", b"y")],
            r"a.tar: holds sample 'a' twice, the second time with 'a.jpg'; names must be unique: remove one of them",
        ),
        (
            [("a.jpg", b"x"), ("a.seg.png", b"y"), ("a.png", b"y")],
            r"sample 'a' has several images: jpg, png; set .*image_field",
        ),
        ([], r"a.tar: holds no samples; expected an uncompressed tar of samples"),
    ],
)
def test_tars_that_are_no_row_of_samples_are_refused_by_name(tmp_path, members, message):
    with pytest.raises(ConfigError, match=message):
        read(tar(tmp_path / "a.tar", members))


def damage_header(data):
    at = data.index(b"n7.jpg")
    return data[:at] + b"\xff" * 200 + data[at + 200 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:5120],
        lambda data: data.rstrip(b"\0")[:-1],
        damage_header,
        lambda data: b"\x1f\x8b" + data,
        lambda data: b"not a tar" * 200,
        lambda data: b"",
    ],
)
def test_damaged_tars_are_refused_by_name(tmp_path, damage):
    members = [(f"n{i}.{x}", b"content" * 30) for i in range(20) for x in ("jpg", "txt")]
    whole = tar(tmp_path / "whole.tar", members).read_bytes()
    (tmp_path / "whole.tar").rename(tmp_path / "a-whole.tar")
    (tmp_path / "b-damaged.tar").write_bytes(damage(whole))
    with pytest.raises(ConfigError, match=r"b-damaged.tar: .*expected an uncompressed tar") as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


def test_shards_of_ours_are_those_of_the_manifest_with_their_splits(photos, make_config, tmp_path):
    first = tmp_path / "first"
    run_plain(make_config(photos, first))
    records, _ = read(first, name=None)
    assert sorted({r.split for r in records}) == ["train", "val"]
    assert len(records) == 29
    source = {"kind": "webdataset", "path": first}
    run_plain(make_config(source, tmp_path / "again", split={"by": "official"}))
    with pytest.raises(
        ConfigError, match=r"holds several splits, such as train and val; keep them apart with split.by=offic"
    ):
        run_plain(make_config(source, tmp_path / "mixed"))
    for split in ("train", "val"):
        assert SplitReader(first, split).read(0) == SplitReader(tmp_path / "again", split).read(0)
    with (first / "train-000001.tar").open("r+b") as file:
        file.truncate(3000)
    with pytest.raises(
        ConfigError, match=r"train-000001.tar: has 3000 bytes, the manifest says \d+ bytes; run .*verify"
    ):
        read(first)


def test_a_stricter_filter_over_shards_of_ours_rejects_from_them(make_config, pictures, coco, rejects, tmp_path):
    files = {f"{i}.jpg": pictures.encode(pictures.photo(i, 40 + 4 * i, 40)) for i in range(10)}
    run_plain(make_config(coco(tmp_path / "source", files), tmp_path / "first"))
    source = {"kind": "webdataset", "path": tmp_path / "first"}
    run_plain(make_config(source, tmp_path / "strict", filters={"max_aspect_ratio": 1.5}))
    assert set(rejects(tmp_path / "strict")) == {f"{i}.jpg" for i in range(6, 10)}
    report = json.loads((tmp_path / "strict" / "report.json").read_text())
    assert report["kept"] == 6


def test_a_tar_that_changes_under_the_build_is_named(tmp_path, make_config, pictures):
    from pipelines.build import Build
    from pipelines.errors import BuildError

    members = [
        (f"{i}.{x}", d) for i in range(9) for x, d in (("jpg", pictures.encode(pictures.photo(i))), ("txt", b"c"))
    ]
    path = tar(tmp_path / "a.tar", members)
    with Build(make_config({"kind": "webdataset", "path": path}, tmp_path / "out")) as job:
        names = job.plan()
        Path(path).write_bytes(path.read_bytes().replace(b"JFIF", b"JFIX"))
        with pytest.raises(BuildError, match=r"a.tar/\d.jpg: the file changed after the build had begun"):
            job.build_shard(names[0])


def test_a_tar_that_the_folders_manifest_does_not_name_is_refused_rather_than_left_out(tmp_path, make_config, pictures):
    photo = pictures.encode(pictures.photo(1))
    members = [("a.jpg", photo), ("a.txt", b"one")]
    folder = tmp_path / "built"
    run_plain(make_config({"kind": "webdataset", "path": tar(tmp_path / "a.tar", members)}, folder))
    tar(folder / "more.tar", members)
    with pytest.raises(
        ConfigError, match=r"more.tar: is not in the manifest of .*built, nor are 0 other tars there; index"
    ):
        read(folder)
    assert len(read(str(folder / "*.tar"))[0]) == 2


@pytest.mark.parametrize("place", [".", "train-000000.tar", "*.tar", "link"])
def test_a_build_never_writes_to_the_folder_that_it_reads(tmp_path, make_config, pictures, place):
    photo = pictures.encode(pictures.photo(1))
    folder = tmp_path / "data"
    folder.mkdir()
    tar(folder / "train-000000.tar", [("a.jpg", photo), ("a.txt", b"one")])
    (tmp_path / "link").symlink_to(folder)
    path = tmp_path / "link" if place == "link" else folder / place
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(
        ConfigError, match=r"source.path is .*, which is or lies in the folder to write to, .*choose another"
    ):
        run_plain(make_config({"kind": "webdataset", "path": str(path)}, folder, build={"overwrite": True}))
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
