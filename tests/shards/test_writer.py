import json
import os
import signal
import string
import subprocess
import sys
import tarfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shards import ustar
from shards.errors import DuplicateKeyError, ShardsError
from shards.manifest import Manifest
from shards.reader import SplitReader
from shards.sample import MAX_KEY, Sample
from shards.writer import ShardWriter

MakeSample = Callable[[int], Sample]
TEXT = st.text(st.characters(exclude_categories=()), max_size=20)  # half character pairs too
SAMPLES = st.lists(
    st.builds(
        Sample,
        key=st.text(string.ascii_lowercase + string.digits + "_-", min_size=1, max_size=MAX_KEY),
        image=st.binary(max_size=1500),
        extension=st.sampled_from(["jpg", "png", "webp"]),
        meta=st.fixed_dictionaries(
            {"width": st.integers(1, 9), "height": st.integers(1, 9), "captions": st.lists(TEXT), "file_name": TEXT}
        ),
    ),
    max_size=5,
    unique_by=lambda s: s.key,
)


def write(folder: Path, samples: list[Sample], name: str = "train-000000") -> Manifest:
    with ShardWriter(folder, name, "train") as writer:
        for sample in samples:
            writer.write(sample)
    manifest = Manifest((writer.entry,))
    manifest.save(folder)
    return manifest


def test_bytes_are_those_of_every_earlier_version(golden: Path, remake: ModuleType, tmp_path: Path) -> None:
    remake.write_folder(tmp_path)
    expected = {path.name: path.read_bytes() for path in (golden / "shards").iterdir()}
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == expected


@settings(deadline=None, max_examples=50)
@given(SAMPLES)
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, samples: list[Sample]) -> None:
    folder = tmp_path_factory.mktemp("shard")
    manifest = write(folder, samples)
    reader = SplitReader(folder, "train")
    assert reader.manifest == manifest
    assert [reader.read(i) for i in range(len(reader))] == samples
    assert reader.keys() == [s.key for s in samples]
    assert [reader.read_json(i) for i in range(len(reader))] == [s.meta for s in samples]


def test_flags_and_sizes_are_in_the_sample_list_only(tmp_path: Path, make_sample: MakeSample) -> None:
    with ShardWriter(tmp_path, "a", "train") as flagged:
        flagged.write(make_sample(1), flags=["gray", "tall"])
    with ShardWriter(tmp_path, "b", "train") as plain:
        plain.write(make_sample(1))
    assert flagged.entry.sha256 == plain.entry.sha256
    line = json.loads((tmp_path / "a.meta.jsonl").read_text())
    assert (line["key"], line["width"], line["height"], line["flags"]) == ("000000000001", 11, 20, ["gray", "tall"])


def test_lines_of_the_sample_list_have_one_width(tmp_path: Path, make_sample: MakeSample) -> None:
    write(tmp_path, [make_sample(n) for n in (0, 200, 5)])
    lines = (tmp_path / "train-000000.meta.jsonl").read_bytes().splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [json.loads(line)["key"] for line in lines] == ["000000000000", "000000000200", "000000000005"]


def test_a_shard_without_samples_is_whole(tmp_path: Path) -> None:
    manifest = write(tmp_path, [])
    assert manifest.shards[0].num_samples == 0
    assert len(SplitReader(tmp_path, "train")) == 0
    with tarfile.open(tmp_path / "train-000000.tar") as tar:
        assert tar.getmembers() == []


# Readers of other people


def test_tar_lists_the_members(golden: Path) -> None:
    names = subprocess.run(
        ["tar", "-t", "-f", golden / "shards" / "train-000000.tar"], capture_output=True, text=True, check=True
    )
    expected = ["0000.png", "0000.json", "4567.webp", "4567.json", "9134.jpg", "9134.json"]
    assert [name[8:] for name in names.stdout.split()] == expected
    assert names.stderr == ""


def test_headers_are_those_of_the_standard_library() -> None:
    for name, size in (("0.jpg", 0), ("000000391895.json", 12345), ("k" * MAX_KEY + ".webp", ustar.MAX_SIZE)):
        member = tarfile.TarInfo(name)
        member.size, member.mode, member.mtime = size, 0o644, 315532800
        assert ustar.header(name, size) == member.tobuf(tarfile.USTAR_FORMAT)


def test_stock_webdataset_reads_the_same_samples(golden: Path, remake: ModuleType) -> None:
    import webdataset

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves its file open
        found = list(webdataset.WebDataset(str(golden / "shards" / "train-000000.tar"), shardshuffle=False))
    samples = [sample for sample, _ in remake.golden_samples()[:3]]
    assert [s["__key__"] for s in found] == [sample.key for sample in samples]
    assert [s[sample.extension] for s, sample in zip(found, samples, strict=True)] == [s.image for s in samples]
    assert [json.loads(s["json"]) for s in found] == [sample.meta for sample in samples]


def test_stock_wids_reads_the_manifest_as_its_index(golden: Path, remake: ModuleType, tmp_path: Path) -> None:
    reason = 'webdataset 1.0 no longer brings wids; install the last that does, "webdataset==0.2.111", to run this'
    wids = pytest.importorskip("wids", reason=reason)
    index = str(golden / "shards" / "manifest.json")
    dataset = wids.ShardListDataset(index, transformations=[dict], cache_dir=str(tmp_path))
    samples = [sample for sample, _ in remake.golden_samples()]
    assert len(dataset) == 4
    assert [dataset[i]["__key__"] for i in range(4)] == [s.key for s in samples]
    assert [dataset[i][f".{s.extension}"].read() for i, s in enumerate(samples)] == [s.image for s in samples]
    dataset.close()


def test_index_is_the_one_that_megatron_energon_writes(golden: Path) -> None:
    # energon.idx comes from Energon's own preparation of this tar; compare_energon.py beside it repeats that.
    assert (golden / "energon.idx").read_bytes() == (golden / "shards" / "train-000000.tar.idx").read_bytes()


# Refusals


def test_a_key_twice_in_a_shard_is_refused_and_the_shard_stays_whole(tmp_path: Path, make_sample: MakeSample) -> None:
    with ShardWriter(tmp_path, "train-000000", "train") as writer:
        writer.write(make_sample(1))
        with pytest.raises(DuplicateKeyError, match=r"train-000000\.tar: key 000000000001 is in it already"):
            writer.write(make_sample(1))
        writer.write(make_sample(2))
    Manifest((writer.entry,)).save(tmp_path)
    assert SplitReader(tmp_path, "train").keys() == ["000000000001", "000000000002"]


@pytest.mark.parametrize("key", ["", "a.b", "A", "a b", "ü", "../x", "k" * (MAX_KEY + 1), "a\n"])
def test_a_key_outside_the_rule_is_refused(key: str) -> None:
    with pytest.raises(ShardsError, match="expected 1 to 90 of 0-9 a-z _ -"):
        Sample(key, b"", "jpg", {})


def test_an_unknown_extension_is_refused() -> None:
    with pytest.raises(ShardsError, match="a: extension 'gif', expected one of jpg, png, webp"):
        Sample("a", b"", "gif", {})


def test_a_sample_without_a_width_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardsError, match="a: meta has no 'width'"), ShardWriter(tmp_path, "x", "train") as writer:
        writer.write(Sample("a", b"", "jpg", {"height": 1}))


@pytest.mark.parametrize("name", ["../train", "a/b", ".hidden", ""])
def test_a_shard_name_with_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ShardsError, match="without folders"):
        ShardWriter(tmp_path, name, "train")


def test_header_fields_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShardsError, match="the name has 101 bytes, a tar header holds 100"):
        ustar.header("k" * 101, 0)
    with pytest.raises(ShardsError, match="has 8589934592 bytes, a tar header holds at most 8589934591"):
        ustar.header("a.jpg", 8 * 2**30)


# Whole or not at all


def test_an_error_in_the_middle_leaves_nothing(tmp_path: Path, make_sample: MakeSample) -> None:
    def fail() -> None:
        with ShardWriter(tmp_path, "train-000000", "train") as writer:
            writer.write(make_sample(1))
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_an_error_leaves_the_shard_that_was_there(tmp_path: Path, make_sample: MakeSample) -> None:
    write(tmp_path, [make_sample(1)])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(DuplicateKeyError):
        write(tmp_path, [make_sample(2), make_sample(2)])
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("suffix", [".tar.idx", ".meta.jsonl"])
def test_an_index_that_cannot_be_written_leaves_no_tar(tmp_path: Path, make_sample: MakeSample, suffix: str) -> None:
    (tmp_path / f".train-000000{suffix}.tmp").mkdir()  # in the way of the file that is written aside
    with pytest.raises(IsADirectoryError):
        write(tmp_path, [make_sample(1)])
    assert [path.name for path in tmp_path.iterdir()] == [f".train-000000{suffix}.tmp"]


FILL = """
import pathlib, resource, signal, sys
from shards.sample import Sample
from shards.writer import ShardWriter
folder = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file over the limit gives an OSError, as a full disk does
def write():
    with ShardWriter(folder, "train-000000", "train") as writer:
        for n in range(12):
            writer.write(Sample(f"{n:04d}", bytes(2000), "jpg", {"width": 1, "height": 1, "captions": []}))
    return writer.entry.num_bytes
size = write()
for path in folder.iterdir():
    path.unlink()
failures = 0
for limit in range(0, size, 512):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        write()
    except OSError as error:
        failures += 1
    assert not list(folder.iterdir()), (limit, list(folder.iterdir()))
resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
assert write() == size
print(failures, size)
"""


def test_a_disk_that_fills_up_at_any_write_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FILL, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    failures, size = map(int, done.stdout.split())
    assert failures == size // 512


SLOW = """
import pathlib, sys, time
from shards.sample import Sample
from shards.writer import ShardWriter
with ShardWriter(pathlib.Path(sys.argv[1]), "train-000000", "train") as writer:
    for n in range(200):
        writer.write(Sample(f"{n:04d}", bytes(4000), "jpg", {"width": 1, "height": 1, "captions": []}))
        if n == int(sys.argv[2]):
            print("waiting", flush=True)
            time.sleep(600)
"""


@pytest.mark.parametrize("sample", [0, 150])
def test_a_killed_writer_leaves_no_final_name_and_a_rerun_ends_with_the_same_bytes(tmp_path: Path, sample: int) -> None:
    def run(folder: Path, stop_at: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", SLOW, folder, str(stop_at)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def contents(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    with run(tmp_path / "killed", sample) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert [name for name in contents(tmp_path / "killed") if not name.endswith(".tmp")] == []
    for folder in ("killed", "undisturbed"):
        with run(tmp_path / folder, -1) as process:
            process.communicate()
        assert process.returncode == 0
    assert contents(tmp_path / "killed") == contents(tmp_path / "undisturbed")


def test_bytes_do_not_depend_on_time_or_process(tmp_path: Path, make_sample: MakeSample) -> None:
    first = write(tmp_path / "a", [make_sample(n) for n in range(5)])
    time.sleep(0.01)
    os.utime(tmp_path / "a")
    assert write(tmp_path / "b", [make_sample(n) for n in range(5)]) == first


def test_entry_is_there_only_after_a_clean_exit(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, "train-000000", "train") as writer, pytest.raises(RuntimeError, match="is not finished"):
        _ = writer.entry
    assert writer.entry.name == "train-000000.tar"
