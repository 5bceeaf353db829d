"""Several runs on one page."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_report import Page, eval_line, picture, start_line, step_line, write_lines

from xctrain import __main__ as main
from xctrain.compare import names_of, write_comparison
from xctrain.errors import ConfigError


def make_run(
    folder: Path,
    scale: float,
    *,
    lr: float = 1e-3,
    batch: int = 8,
    key: str = "k1",
    num_steps: int = 20,
    processes: int = 2,
    num_images: int = 2,
) -> Path:
    steps = [
        step_line(n, loss=scale * 5 / n, samples_per_s=9 * scale, lr=lr * n / num_steps)
        for n in range(1, num_steps + 1)
    ]
    killed = start_line(10, "killed", 3) | {"world_size": processes}
    last = eval_line(20, scale, bleu4=scale, rouge_l=scale, loss=scale, num_images=num_images)
    begun = start_line(0, None, 0) | {"world_size": processes}
    lines = [begun, eval_line(0, 0.1), *steps[:10], killed, *steps[10:], last]
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


def best_of(text: str) -> dict[str, str]:
    """By heading of the table of end figures, the run whose figure is marked."""
    [table] = re.findall(r'<table class="tight">.*?</table>', text)
    heads = re.findall(r"<th>(.*?)</th>", table)
    best = {}
    for row in table.split("<tr>")[2:]:
        cells = re.findall(r"<td( class=\"best\")?>(.*?)</td>", row)
        best |= {head: cells[0][1].rpartition(">")[2] for head, (marked, _) in zip(heads, cells, strict=True) if marked}
    return best


def test_end_figures_stand_side_by_side_and_the_best_stands_out(tmp_path: Path) -> None:
    text = page_of([make_run(tmp_path / "one", 1.0), make_run(tmp_path / "two", 0.5)], tmp_path)
    losses = {"Loss": "two", "Held-out loss": "two"}
    assert best_of(text) == losses | dict.fromkeys(("BLEU-4", "CIDEr", "ROUGE-L", "Samples/s"), "one")
    assert "none is marked as best" not in text
    rows = re.findall(r"<tr><td><i class=\"key s\d\"></i>(?:one|two).*?</tr>", text)
    assert "exactly once" in rows[0]
    assert "not audited" in rows[1]
    assert '<p class="note warn">one, two: 2 images are few</p>' in text


@pytest.mark.parametrize(
    ("change", "unmarked", "note"),
    [
        ({"num_images": 4}, ("Held-out loss", "BLEU-4", "CIDEr", "ROUGE-L"), "Scores were made on different pictures"),
        ({"key": "k2"}, ("Held-out loss", "BLEU-4", "CIDEr", "ROUGE-L"), "Scores were made on different pictures"),
        ({"num_steps": 40}, ("Loss",), "Losses are of different steps, data or models"),
        ({"processes": 1}, ("Samples/s",), "Samples/s are of different machines or numbers of processes"),
    ],
)
def test_nothing_is_best_among_figures_of_different_things(
    change: dict[str, Any], unmarked: tuple[str, ...], note: str, tmp_path: Path
) -> None:
    alike = best_of(page_of([make_run(tmp_path / "one", 1.0), make_run(tmp_path / "two", 0.5)], tmp_path))
    text = page_of([make_run(tmp_path / "one", 1.0), make_run(tmp_path / "two", 0.5, **change)], tmp_path)
    assert alike.keys() - best_of(text).keys() == {*unmarked}
    assert re.findall(r"<p class=\"note\">(.*?: none is marked as best\.)</p>", text) == [
        f"{note}: none is marked as best."
    ]


def test_the_learning_rate_is_drawn_as_it_was_and_what_is_smoothed_says_so(
    runs_of_two: list[Path], tmp_path: Path
) -> None:
    text = page_of(runs_of_two, tmp_path)
    titles = dict(re.findall(r"<h3>(.*?) <small>(.*?)</small></h3>", text))
    smoothed = [title for title, unit in titles.items() if "smoothed" in unit]
    assert smoothed == ["Speed", "Waiting for data", "Gradient norm"]
    [path] = re.findall(r'Learning rate <.*?class="curve s0" d="M(.*?)"', text)
    heights = [float(place.split()[1]) for place in path.split("L")]
    assert heights[0] - heights[1] == pytest.approx(heights[10] - heights[11], abs=0.2)  # no flatter at the start


def test_the_page_tells_what_it_could_not_read_or_find(
    runs_of_two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged, idle = runs_of_two[0] / "metrics.jsonl", tmp_path / "idle"
    lines = damaged.read_text().splitlines(keepends=True)
    damaged.write_text("".join([*lines[:4], '{"event":"st\n', *lines[5:]]))
    idle.mkdir()
    for folder in (*runs_of_two, idle):
        (folder / "config.yaml").write_text("train: {num_steps: 5}")
    out = tmp_path / "page.html"
    said = [f"{damaged}: line 5 is not JSON; the rest is drawn", "idle: no step was trained, or none is in the log"]
    assert main.main(["report", *map(str, [*runs_of_two, idle]), "--out", str(out)]) == 0
    printed, text = capsys.readouterr().err, out.read_text()
    for doubt in said:
        assert doubt in printed
        assert f'<p class="note warn">{doubt}</p>' in text
    assert 'class="curve s0"' in text
    assert main.main(["report", str(idle)]) == 0
    assert said[1] in capsys.readouterr().err
    text = (idle / "report.html").read_text()
    assert f'<p class="note warn">{said[1]}</p>' in text
    assert "<b>No</b><span>steps</span>" in text


def test_a_chart_as_wide_as_the_page_has_a_smaller_one_for_narrow_screens(
    runs_of_two: list[Path], tmp_path: Path
) -> None:
    text = page_of(runs_of_two, tmp_path)
    assert re.search(
        r'<div class="wide"><svg viewBox="0 0 1038 .*?</svg></div><div class="narrow"><svg viewBox="0 0 506 ', text
    )
    assert "svg { min-width" not in text


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
