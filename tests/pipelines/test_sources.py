"""What holds of every kind of source alike."""

import json
import shutil

import pytest
from kinds import KINDS

from pipelines.run import run_plain
from shards.manifest import Manifest
from shards.reader import SplitReader
from shards.verify import verify


def captions_of(i):
    return [f"picture {i} seen once", f"  picture {i}\tseen  twice", f"picture {i}, na\u00efve and \U0001f600"]


@pytest.fixture(scope="module")
def rows(pictures):
    """200 records; some pictures are converted, one is damaged and one stands twice."""
    made = []
    for i in range(1, 201):
        name, data = f"{i:04d}.jpg", pictures.encode(pictures.photo(i, 48, 40))
        if i % 20 == 0:
            name, data = f"{i:04d}.png", pictures.encode(pictures.photo(i, 48, 40, "RGBA"), "PNG")
        made.append((i, name, data, captions_of(i)))
    made[30] = (31, "0031.jpg", b"no picture", captions_of(31))
    made[40] = (41, "0041.jpg", made[10][2], captions_of(41))
    return made


def samples_of(out):
    reader = SplitReader(out, "train")
    read = map(reader.read, range(len(reader)))
    return {s.key: (s.image, s.extension, s.captions, s.meta.get("captions_raw"), s.meta["image_id"]) for s in read}


def reasons_of(out):
    rows = map(json.loads, (out / "rejects.jsonl").read_text().splitlines())
    return {row["image_id"]: (row["reason"], row["detail"]) for row in rows}


def built(kind, rows, make_config, folder, **sections):
    folder.mkdir()
    run_plain(make_config(KINDS[kind](folder, rows), folder / "out", build={"records_per_shard": 64}, **sections))
    return folder / "out"


@pytest.fixture(scope="module")
def reference(rows, make_config, tmp_path_factory):
    return built("coco", rows, make_config, tmp_path_factory.mktemp("reference") / "coco")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "coco"])
def test_the_same_records_give_the_same_samples_and_captions(kind, rows, reference, make_config, tmp_path):
    out = built(kind, rows, make_config, tmp_path / kind)
    found, expected = samples_of(out), samples_of(reference)
    assert len(expected) == 198
    assert found.keys() == expected.keys()
    assert found == expected
    assert reasons_of(out) == reasons_of(reference)
    assert list(reasons_of(out)) == [31, 41]
    assert verify(out) == []


def test_shards_of_ours_built_again_are_the_same_shards(reference, make_config, tmp_path):
    """All but the two records that were rejected before and leave other places behind."""
    config = make_config({"kind": "webdataset", "path": reference}, tmp_path / "out", build={"records_per_shard": 64})
    run_plain(config)
    assert samples_of(tmp_path / "out") == samples_of(reference)
    run_plain(
        make_config(
            {"kind": "webdataset", "path": tmp_path / "out"}, tmp_path / "again", build={"records_per_shard": 64}
        )
    )
    ids = [Manifest.load(tmp_path / name).manifest_id for name in ("out", "again")]
    assert samples_of(tmp_path / "again") == samples_of(reference)
    assert ids[0] == ids[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rerun_writes_nothing_and_a_new_picture_only_its_shard(kind, rows, make_config, tmp_path):
    few = rows[:24]
    folder = tmp_path / kind
    folder.mkdir()
    config = make_config(KINDS[kind](folder, few), folder / "out")
    run_plain(config)
    before = {p.name: p.stat().st_ino for p in (folder / "out").glob("*.tar")}
    assert run_plain(config).unchanged
    assert not (folder / "out" / ".build" / "images").exists()
    for path in [p for p in folder.iterdir() if p.name != "out"]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    KINDS[kind](folder, [*few[:7], (few[7][0], few[7][1], rows[100][2], few[7][3]), *few[8:]])
    run_plain(config)
    after = {p.name: p.stat().st_ino for p in (folder / "out").glob("*.tar")}
    assert sum(before[name] != after[name] for name in before) == 1
    assert not run_plain(config).stale
