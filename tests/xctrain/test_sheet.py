"""The page that shows what a step held."""

import re
import shutil
from pathlib import Path

import pytest
import runs
from small import audit_of, train_here

from shards.reader import SplitReader
from xctrain import __main__ as main
from xctrain import audit
from xctrain.errors import ConfigError
from xctrain.history import History
from xctrain.report import render
from xctrain.trained import open_run


@pytest.fixture(scope="module")
def trained(drawn_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Shards with a damaged picture and a run over one epoch and a half of them, of which the end is not trained yet."""
    folder = tmp_path_factory.mktemp("sheet")
    shards = Path(shutil.copytree(drawn_shards, folder / "shards"))
    reader = SplitReader(shards, "train")
    data = bytearray((shards / "train-000000.tar").read_bytes())
    data[reader.meta(3).parts[0].offset + 40] ^= 255
    (shards / "train-000000.tar").write_bytes(data)
    train_here(shards, folder / "run", train__num_steps=12, stop_asked=lambda: runs.last_step(folder / "run") >= 8)
    return shards, folder / "run"


def page(run: Path, out: Path, *which: str) -> str:
    assert main.main(["batch", str(run), *which, "--out", str(out)]) == 0
    return out.read_text(encoding="utf-8")


def test_page_shows_every_picture_of_the_step_with_its_captions(trained: tuple[Path, Path], tmp_path: Path) -> None:
    _shards, run = trained
    text = page(run, tmp_path / "step.html", "--step", "2")
    rows = audit.batch_of_step(open_run(run), 2)
    assert text.count("<figure>") == text.count("data:image/jpeg;base64,") == len(rows) == 12
    for row in rows:
        assert row["key"] in text
        assert f'<div class="after"><div>{row["chosen"][0]}</div></div>' in text
        assert all(f"<li>{caption}</li>" in text for caption in row["captions"] if caption != row["chosen"][0])
    step = runs.events(run, "step")[1]
    assert f"positions 12 to 23 · epoch 0 · 12 samples · loss {step['loss']:.4g}" in text
    assert not re.search(r"(src|href)=\"?https?:", text)


def test_page_of_a_step_to_come_says_so(trained: tuple[Path, Path], tmp_path: Path) -> None:
    assert "epoch 1 · 12 samples · not trained yet" in page(trained[1], tmp_path / "step.html", "--step", "12")


def test_damaged_sample_is_shown_with_its_reason(trained: tuple[Path, Path], tmp_path: Path) -> None:
    run = trained[1]
    [masked] = {m.n: m for m in open_run(run).state.masked if m.n < 100}.values()
    text = page(run, tmp_path / "step.html", "--position", str(masked.n))
    assert text.count("no picture") == 1
    assert "no loss: damaged: train-000000.tar: sample 3 (000000000003): crc32 of" in text


def test_page_is_not_written_where_there_is_no_folder(trained: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--out is .*x.html, there is no folder .*; give a file in a folder that is there"
    ):
        page(trained[1], tmp_path / "none" / "x.html", "--step", "1")


def test_report_shows_the_audit_by_segment_with_what_was_masked(trained: tuple[Path, Path], tmp_path: Path) -> None:
    shards, trained_run = trained
    run = Path(shutil.copytree(trained_run, tmp_path / "run"))
    more = {
        "train__num_steps": 18,
        "train__global_batch": 24,
        "train__resume_with": "train.num_steps,train.global_batch",
    }
    train_here(shards, run, **more)
    text = render(History.read(run), audit_of(run).to_json(), {})
    assert (
        "<th>Epoch</th><th>Segment</th><th>Seen</th><th>Of</th><th>Repeated</th><th>Skipped</th><th>Masked</th>" in text
    )
    assert '<td>0</td><td>0</td><td>99</td><td>100</td><td>0</td><td>0</td><td class="bad">1</td>' in text
    assert "<td>1</td><td>108</td><td>9</td><td>1</td><td>24</td><td>100 samples</td>" in text
