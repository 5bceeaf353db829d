"""Several runs on one page."""

import json
import re
from pathlib import Path

import pytest
from test_report import Page, eval_line, picture, start_line, step_line, write_lines

from xctrain import __main__ as main
from xctrain.compare import names_of, write_comparison
from xctrain.errors import ConfigError


def make_run(folder: Path, scale: float, *, lr: float = 1e-3, batch: int = 8, key: str = "k1") -> Path:
    steps = [step_line(n, loss=scale * 5 / n) for n in range(1, 21)]
    killed = start_line(10, "killed", 3)
    lines = [start_line(0, None, 0), eval_line(0, 0.1), *steps[:10], killed, *steps[10:], eval_line(20, scale)]
    write_lines(folder / "metrics.jsonl", lines)
    captions = [
        {"key": name, "caption": f"<{folder.name}> says", "references": ["a <i>dog</i>"]} for name in (key, "all")
    ]
    write_lines(folder / "captions/step-00000020.jsonl", captions)
    config = {"run": {"dir": str(folder)}, "optim": {"lr": lr}, "train": {"global_batch": batch, "seed": 7}}
    (folder / "config.yaml").write_text(json.dumps(config))
    (folder / "environment.json").write_text('{"world_size": 2, "command": ["x"], "versions": {"torch": "2"}}')
    return folder


@pytest.fixture
def runs_of_two(tmp_path: Path) -> list[Path]:
    return [make_run(tmp_path / "one", 1.0), make_run(tmp_path / "two <b>", 0.5, lr=5e-4, key="k2")]


def page_of(folders: list[Path], tmp_path: Path) -> str:
    out = write_comparison(folders, tmp_path / "page.html", [{"ok": True}, None], {"k1": picture(), "all": picture()})
    return out.read_text()


def test_the_page_is_one_whole_file_that_fetches_nothing(runs_of_two: list[Path], tmp_path: Path) -> None:
    text = page_of(runs_of_two, tmp_path)
    page = Page(text)
    assert page.sources
    assert all(source.startswith("data:image/jpeg;base64,") for source in page.sources)
    assert "url(" not in text
    for raw in ("<b>", "<one>", "<i>dog"):
        assert raw not in text.partition("</style>")[2].replace("<b></b>", "")


def test_curves_of_all_runs_lie_in_each_chart_with_a_legend(runs_of_two: list[Path], tmp_path: Path) -> None:
    text = page_of(runs_of_two, tmp_path)
    charts = re.findall(r"<svg.*?</svg>", text, re.S)
    assert len(charts) >= 6
    for chart in charts:
        assert 'class="curve s0"' in chart
        assert 'class="curve s1"' in chart
    assert '<i class="key s0"></i>one' in text
    assert '<i class="key s1"></i>two &lt;b&gt;' in text


def test_kills_are_marked_in_the_colour_of_their_run(runs_of_two: list[Path], tmp_path: Path) -> None:
    text = page_of(runs_of_two, tmp_path)
    for style, name in (("s0", "one"), ("s1", "two &lt;b&gt;")):
        assert f'<g class="mark {style}"><title>{name}: killed at step 13; went on from step 10' in text


def test_only_settings_that_differ_are_listed(runs_of_two: list[Path], tmp_path: Path) -> None:
    text = page_of(runs_of_two, tmp_path)
    assert '<td class="mono">optim.lr</td><td class="text">0.001</td><td class="text">0.0005</td>' in text
    assert "train.seed" not in text
    assert "run.dir</td>" not in text
    assert "command" not in text.partition("</style>")[2]


def test_end_figures_stand_side_by_side_and_the_best_stands_out(runs_of_two: list[Path], tmp_path: Path) -> None:
    text = page_of(runs_of_two, tmp_path)
    rows = re.findall(r"<tr><td><i class=\"key s\d\"></i>(?:one|two).*?</tr>", text)
    assert '<td class="best">1.000</td>' in rows[0]  # CIDEr
    assert "<td>0.500</td>" in rows[1]
    assert "exactly once" in rows[0]
    assert "not audited" in rows[1]


def test_the_same_pictures_have_the_captions_of_all_runs(runs_of_two: list[Path], tmp_path: Path) -> None:
    text = page_of(runs_of_two, tmp_path)
    [card] = re.findall(r"<figure>.*?</figure>", text, re.S)  # k1 and k2 were captioned by one run only
    assert "&lt;one&gt; says" in card
    assert "&lt;two &lt;b&gt;&gt; says" in card
    assert card.count("a &lt;i&gt;dog&lt;/i&gt;") == 1


def test_runs_of_other_batch_sizes_are_drawn_over_samples(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "one", 1.0), make_run(tmp_path / "two", 0.5, batch=16)]
    assert "over samples, as the global batches differ" in page_of(folders, tmp_path)


def test_more_runs_than_colours_are_told_apart(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / str(i), 1.0 + i) for i in range(10)]
    text = write_comparison(folders, tmp_path / "page.html", [None] * 10, {}).read_text()
    Page(text)
    assert 'class="curve s1 again"' in text


def test_an_empty_run_has_its_place_in_the_comparison(runs_of_two: list[Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    Page(write_comparison([*runs_of_two, tmp_path / "empty"], tmp_path / "page.html", [None] * 3, {}).read_text())


def test_runs_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    assert names_of([tmp_path / "a/run", tmp_path / "b/run"]) == ["a/run", "b/run"]
    assert names_of([tmp_path / "a/x", tmp_path / "a/y"]) == ["x", "y"]


def test_place_of_a_report_is_checked_first(runs_of_two: list[Path], tmp_path: Path) -> None:
    for folder in runs_of_two:
        (folder / "config.yaml").write_text("train: {num_steps: 5}")
    for out, text in ((tmp_path / "no/page.html", "there is no folder"), (tmp_path, "that is a folder")):
        with pytest.raises(ConfigError, match=f"--out is {out}, {text}.*; give a file in a folder that is there"):
            main.main(["report", *map(str, runs_of_two), "--out", str(out)])
    with pytest.raises(ConfigError, match="the same run twice"):
        main.main(["report", str(runs_of_two[0]), str(runs_of_two[0])])
