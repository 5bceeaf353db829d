import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shards import cli
from shards.__main__ import main
from shards.find import nearest
from shards.manifest import Manifest
from shards.order import OrderSettings
from shards.plan import distinct_if_random, make_plan
from shards.sample import Sample, key_of_id
from shards.writer import ShardWriter


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = cli.run(main, [str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, Any]:
    code, out, err = run(capsys, *arguments, "--json")
    assert err == ""
    return code, json.loads(out)


def test_ls_lists_shards_and_totals(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "ls", dataset)
    assert code == 0
    assert len(re.findall(r"^train-00000\d\.tar +train +\d", out, re.MULTILINE)) == 3
    assert "train: 12 samples in 3 shards" in out
    assert Manifest.load(dataset).manifest_id in out
    code, answer = run_json(capsys, "ls", dataset)
    assert (code, answer["splits"]) == (0, {"train": 12})


def test_show_prints_the_sample_and_writes_the_picture(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, answer = run_json(capsys, "show", golden / "shards", "000001234567", "--out", tmp_path)
    assert code == 0
    assert (answer["split"], answer["shard"], answer["sample"]) == ("train", "train-000000.tar", 1)
    assert answer["json"]["captions"] == ["两个点"]
    assert answer["image"] == str(tmp_path / "000001234567.webp")
    assert (tmp_path / "000001234567.webp").read_bytes()[:4] == b"RIFF"
    code, answer = run_json(capsys, "show", golden / "shards", "000003703701", "--out", tmp_path / "p.png")
    assert (code, answer["split"], answer["image"]) == (0, "val", str(tmp_path / "p.png"))


def test_show_finds_every_sample(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = [run_json(capsys, "show", dataset, f"{n:012d}")[1] for n in range(12)]
    assert [(p["shard"][-5], p["sample"]) for p in places] == [
        (str(shard), sample) for shard, size in enumerate((4, 3, 5)) for sample in range(size)
    ]


def test_show_of_an_unknown_key_names_the_nearest(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "show", dataset, "0x0000000007")
    assert code == 2
    assert "0x0000000007 is neither key, image id nor file name of its 12 samples; nearest keys: 000000000007" in err


def test_show_takes_ids_and_names_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = {"one/a b.jpg": "one/a b.jpg", "two/a b.jpg": "own id 7", "Ünï.PNG": 12, "c.jpg": "more-5"}
    with ShardWriter(tmp_path, "train-000000", "train") as writer:
        for name, image_id in ids.items():
            meta = {"image_id": image_id, "file_name": name, "width": 1, "height": 1, "captions": ["x"]}
            writer.write(Sample(key_of_id(image_id), b"x", "jpg", meta))
    Manifest((writer.entry,)).save(tmp_path)
    for name, image_id in ids.items():
        for text in (name, str(image_id), key_of_id(image_id)):
            code, answer = run_json(capsys, "show", tmp_path, text)
            assert (code, answer["json"]["file_name"]) == (0, name), text
    code, _, err = run(capsys, "show", tmp_path, "a b.jpg")
    assert code == 2
    assert "a b.jpg names 2 samples, such as one/a b.jpg (one-a-b-jpg-" in err
    assert "give the key of one" in err


def test_show_fills_up_the_zeros_of_a_number(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = run_json(capsys, "show", dataset, "7")
    assert (code, answer["key"]) == (0, "000000000007")


def test_show_names_the_kind_of_a_picture_under_another_suffix(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "show", golden / "shards", "000003703701", "--out", tmp_path / "p.jpeg")
    assert (code, err) == (0, f"note: {tmp_path / 'p.jpeg'} holds a png picture\n")


@pytest.mark.parametrize("suffix", [".tar.idx", ".meta.jsonl"])
@pytest.mark.parametrize("harm", ["missing", "changed", "folder"])
def test_show_blames_the_file_that_is_damaged(
    dataset: Path, capsys: pytest.CaptureFixture[str], suffix: str, harm: str
) -> None:
    path = dataset / f"train-000000{suffix}"
    raw = path.read_bytes()
    path.unlink()
    if harm == "changed":
        path.write_bytes(raw.replace(b"1", b"2") if suffix == ".meta.jsonl" else bytes(8) + b"\1" + raw[9:])
    if harm == "folder":
        path.mkdir()
    code, _, err = run(capsys, "show", dataset, "000000000001")
    assert code == 1
    what = {"missing": "No such file", "changed": "sha256 is", "folder": "Is a directory"}[harm]
    assert err.startswith(f"error: {path}: {what}")
    assert run(capsys, "show", dataset, "000000000005")[0] == 0  # the other shards are whole


def test_verify_says_what_to_do_about_somebody_elses_tar(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (dataset / "train-000009.tar").write_bytes(b"")
    code, out, _ = run(capsys, "verify", dataset)
    assert code == 1
    assert "1 finding in 1 file, 12 samples in 3 shards; remove what is not in the manifest" in out
    assert "run the build again" not in out


def test_nearest_keys_may_lack_their_zeros() -> None:
    keys = [f"{n:012d}" for n in range(100_000)]
    assert nearest("39189", keys)[0] == "000000039189"
    assert len(nearest("zzz", keys)) == 3
    assert nearest("x", []) == []


def test_show_prints_captions_on_any_terminal(
    golden: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "größer" in run(capsys, "show", golden / "shards", "000000000000")[1]
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert cli.run(main, ["show", str(golden / "shards"), "000000000000"]) == 0
    terminal.seek(0)
    assert json.loads(terminal.read())["json"]["captions"][1] == "Ein roter Fleck, größer als der grüne."


def test_verify_of_a_whole_folder_is_ok(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "verify", dataset)[:2] == (0, "ok: 12 samples in 3 shards, every byte as the manifest says\n")
    assert run_json(capsys, "verify", dataset) == (0, {"ok": True, "findings": []})


def test_verify_names_a_cut_shard_and_a_flipped_byte(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(dataset / "train-000002.tar", (dataset / "train-000002.tar").stat().st_size - 1024)
    raw = bytearray((dataset / "train-000000.tar").read_bytes())
    raw[512] ^= 1
    (dataset / "train-000000.tar").write_bytes(raw)
    code, out, _ = run(capsys, "verify", dataset)
    assert code == 1
    assert "train-000000.tar: 000000000000: crc32 of 000000000000.jpg is " in out
    assert "train-000002.tar: 000000000011: 0 bytes follow the last sample" in out
    assert "5 findings in 2 files, 12 samples in 3 shards; run the build again" in out
    code, answer = run_json(capsys, "verify", dataset)
    assert (code, answer["ok"], len(answer["findings"])) == (1, False, 5)


def test_stats_describe_each_split(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "stats", golden / "shards")
    assert code == 0
    assert "train: 3 samples, 6 captions" in out
    assert "extensions: jpg 1, png 1, webp 1" in out
    assert "flags: gray 1" in out
    code, answer = run_json(capsys, "stats", golden / "shards")
    spread = answer["splits"]["train"]["distributions"]
    assert spread["captions per image"] == {"min": 1, "p5": 1.1, "median": 2, "mean": 2, "p95": 2.9, "max": 3}
    assert spread["words per caption"]["max"] == 7
    assert spread["width / height"]["mean"] == 1.5


def test_plan_says_steps_and_possible_gpus(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", dataset, "--global-batch", "8", "--micro-batch", "2", "--gpus", "2", "--workers", "3")
    code, answer = run_json(capsys, *arguments)
    assert code == 0
    plan = answer["train"]
    assert (plan["samples"], plan["shards"], plan["fragments"]) == (12, 3, 3)
    assert plan["possible GPU counts"] == [1, 2, 4]
    assert plan["micro-batches per GPU and step"] == 2
    assert (plan["steps per epoch"], plan["steps for one epoch"], plan["surplus slots of its last step"]) == (1.5, 2, 4)
    assert plan["loader workers in all"] == 6
    assert plan["refused"] == []
    assert run(capsys, *arguments)[0] == 0


def test_plan_of_an_impossible_run_is_refused_with_what_is_possible(
    dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "plan", dataset, "--global-batch", "20", "--gpus", "3")
    assert code == 2
    assert "refused: train.global_batch is 20, which is not processes (3)" in out
    assert "1, 2, 4, 5, 10, 20 processes are possible" in out
    assert "order.lanes (8) does not divide the global batch (20)" in out
    assert "larger than the split (12)" in out


@pytest.mark.parametrize(("sizes", "batch"), [([1000] * 118, 64), ([5000] * 20, 256)])
def test_order_mixes_nearly_as_well_as_a_random_permutation(sizes: Sequence[int], batch: int) -> None:
    mixing = make_plan(sizes, OrderSettings(7), batch, 1, 1, 1).facts["mixing"]
    assert mixing["ratio"] > 0.9
    assert mixing["in the first 20 batches"] > 0.85 * mixing["of a random permutation"]


def test_expected_number_of_shards_is_that_of_drawing() -> None:
    sizes, drawn = [5, 10, 1, 0], 4
    shard_of = np.repeat(np.arange(4), sizes)
    generator = np.random.default_rng(0)
    counts = [len(set(generator.permutation(shard_of)[:drawn])) for _ in range(4000)]
    assert distinct_if_random(sizes, drawn) == pytest.approx(np.mean(counts), abs=0.05)
    assert distinct_if_random(sizes, 16) == 3
    assert distinct_if_random([5], 2) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "DIR/nowhere"], "nowhere: there is no such folder"),
        (["verify", "DIR"], r"has no manifest\.json"),
        (
            ["plan", "DIR/shards", "--split", "test"],
            r"split 'test' is not in the dataset; it has: train \(12 samples\)",
        ),
        (["plan", "DIR/shards", "--gpus", "0"], "--gpus is 0, expected 1 or more"),
        (["plan", "DIR/shards", "--workers", "-1"], "--workers is -1, expected 0 or more"),
        (["plan", "DIR/shards", "--seed", "-1"], "--seed is -1, expected 0 or more"),
        (
            ["show", "DIR/shards", "000000000001", "--out", "DIR/none/x.jpg"],
            "--out is .*none/x.jpg, there is no folder",
        ),
        (["show", "DIR/shards", "000000000001", "--out", "/proc/x"], "--out is /proc/x, where nothing can be written"),
        (["preview", "DIR/shards", "--out", "/proc/x"], "--out is /proc/x, where nothing can be written"),
        (["verify", "DIR/shards", "--quarantine", "/proc/x"], "--quarantine is /proc/x, where nothing can be written"),
        (["plan", "DIR/shards", "--lanes", "0"], r"order\.lanes is 0, expected 1 or more"),
    ],
)
def test_wrong_usage_is_one_paragraph_and_exit_code_2(
    dataset: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, *(a.replace("DIR", str(dataset.parent)) for a in arguments))
    assert (code, out) == (2, "")
    assert re.search(f"^error: .*{message}", err)
    assert err.count("\n") == 1


def test_a_damaged_manifest_is_a_failure_not_wrong_usage(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (dataset / "manifest.json").write_bytes(b"{")
    code, _, err = run(capsys, "verify", dataset)
    assert code == 1
    assert "manifest.json: is not valid JSON" in err


def test_unknown_commands_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["lst", "x"])
    assert caught.value.code == 2
    assert "invalid choice: 'lst'" in capsys.readouterr().err


def test_help_needs_no_heavy_import() -> None:
    code = "import atexit, sys; from shards.__main__ import main; atexit.register(lambda: print([*sys.modules])); main(['-h'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1]
    assert "'argparse'" in loaded
    assert not re.search("'(numpy|PIL|torch|prefect|pydantic)'", loaded)


def test_only_numpy_is_needed_to_read(golden: Path) -> None:
    code = (
        "import sys; from shards.reader import SplitReader; from shards import order, stream, verify\n"
        f"SplitReader({str(golden / 'shards')!r}, 'train').read(0)\nprint(sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'numpy'" in done.stdout
    assert not re.search("'(PIL|fsspec|torch|prefect|pydantic|webdataset)'", done.stdout)
