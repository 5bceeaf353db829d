"""The run report: one offline page from whatever a run folder holds."""

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from xctrain.charts import Axis, Chart, Line, Mark, short, smooth, thin
from xctrain.report import write_report

NUM_STEPS = 20


def step_line(step: int, **other: Any) -> dict[str, Any]:
    values = {
        "loss": 5 / step,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "num_targets": 40,
        "samples_per_s": 9.0,
        "tokens_per_s": 80.0,
    }
    times = {"step_s": 0.5, "data_wait_s": 0.01, "digest": "00"}
    return {"event": "step", "step": step, "samples_consumed": step * 8, "epoch": step / 10} | values | times | other


def eval_line(step: int, cider: float | None, **other: Any) -> dict[str, Any]:
    scores = {"bleu1": 0.5, "bleu2": 0.4, "bleu3": 0.3, "bleu4": 0.2 + step / 100, "cider": cider, "rouge_l": 0.4}
    about = {"split": "val", "num_images": 2, "loss": 3.0, "length_ratio": 1.1, "warnings": ["2 images are few"]}
    return {"event": "eval", "step": step, "samples_consumed": step * 8} | scores | about | other


def start_line(step: int, end: str | None, lost: int) -> dict[str, Any]:
    resumed = None if end is None else step
    about = {"time": 1.8e9 + step, "world_size": 2, "resumed_from": resumed, "previous_end": end, "lost_steps": lost}
    return {"event": "start", "step": step, "samples_consumed": step * 8} | about


def write_lines(path: Path, lines: list[dict[str, Any]], torn: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run <1>"
    steps = [step_line(n) for n in range(1, NUM_STEPS + 1)]
    lines = [start_line(0, None, 0), eval_line(0, None), *steps[:10], start_line(10, "killed", 3), *steps[10:15]]
    lines += [
        start_line(15, "stopped", 0),
        *steps[15:],
        eval_line(NUM_STEPS, 0.9),
        {"event": "stop", "step": NUM_STEPS, "reason": "done"},
    ]
    write_lines(folder / "metrics.jsonl", lines, torn='{"event":"ste')
    for step, text in ((0, "the the"), (NUM_STEPS, "a <b>dog</b> & cat")):
        captions = [{"key": key, "caption": text, "references": ["a <i>dog</i>", "two"]} for key in ("k1", "k2")]
        write_lines(folder / f"captions/step-{step:08d}.jsonl", captions)
    (folder / "config.yaml").write_text("model: {family: tiny, prompt: 'Say <it>'}\ntrain: {global_batch: 8}\n")
    (folder / "environment.json").write_text('{"python": "3.11"}')
    return folder


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGBA", (900, 600), (200, 30, 30, 128)).save(file, "PNG")
    return file.getvalue()


class Page(HTMLParser):
    """Checks that tags are closed in order and collects what a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_page_is_one_whole_file_beside_the_run_that_fetches_nothing(run_dir: Path) -> None:
    path = write_report(run_dir, images={"k1": picture(), "k2": b"not a picture"})
    assert path == run_dir / "report.html"
    text = path.read_text()
    page = Page(text)
    assert len(page.sources) == 1
    assert page.sources[0].startswith("data:image/jpeg;base64,")
    assert "url(" not in text
    assert "no picture" in page.words
    assert write_report(run_dir, run_dir / "page.html") == run_dir / "page.html"


def test_kill_is_marked_where_training_went_on_with_what_was_lost(run_dir: Path) -> None:
    text = write_report(run_dir).read_text()
    assert "<title>killed at step 13; went on from step 10, 3 steps done again, on 2 processes</title>" in text
    assert re.search(
        r'<g class="mark stop"><title>killed at step 13;.*?<text [^>]*>killed at 13, on from 10</text></g>', text
    )
    assert '<g class="mark pause"><title>stopped at step 15; went on from step 15, on 2 processes</title>' in text
    assert "<b>1</b><span>kill survived</span>" in text


def test_every_text_is_escaped(run_dir: Path) -> None:
    text = write_report(run_dir).read_text()
    for raw in ("<1>", "<b>dog", "<i>dog", "<it>"):
        assert raw not in text
    assert "a &lt;b&gt;dog&lt;/b&gt; &amp; cat" in text
    assert "run &lt;1&gt;" in text


def test_scores_before_and_after_with_their_change_and_warnings(run_dir: Path) -> None:
    text = write_report(run_dir).read_text()
    assert "<td>untrained</td>" in text
    assert "<td>0.400</td>" in text  # BLEU-4 in the end
    assert "<td>+0.200</td>" in text
    assert "<td>–</td>" in text  # CIDEr was not defined
    assert "2 images are few" in text
    assert "2 pictures of split val" in text
    assert "Say &lt;it&gt;" in text


def test_captions_before_and_after_stand_next_to_the_references(run_dir: Path) -> None:
    text = write_report(run_dir, images={"k2": picture()}).read_text()
    assert text.count("<figure>") == 1  # only the one with a picture
    assert "<span>after step 20</span>a &lt;b&gt;dog" in text
    assert "<span>before training</span>the the" in text
    assert "<li>two</li>" in text


@pytest.mark.parametrize(
    ("audit", "words"),
    [
        (None, "Not audited"),
        (
            {
                "ok": True,
                "evidence": "keys",
                "epochs": [{"epoch": 0, "seen": 1600, "repeated": 0, "skipped": 0, "masked": 1}],
            },
            "Every sample exactly once",
        ),
        ({"ok": False, "evidence": "digest", "findings": ["digest is <1>"], "epochs": []}, "digest is &lt;1&gt;"),
    ],
)
def test_audit_is_shown(run_dir: Path, audit: dict[str, Any] | None, words: str) -> None:
    text = write_report(run_dir, audit=audit).read_text()
    assert words in text
    assert ("<td>1,600</td>" in text) == bool(audit and audit["ok"])


def test_best_checkpoint_is_named_where_the_run_keeps_it(run_dir: Path) -> None:
    assert "best by" not in write_report(run_dir).read_text()
    lines = [start_line(0, None, 0), *(eval_line(step, cider) for step, cider in ((0, 0.9), (4, 0.7), (8, 0.6)))]
    write_lines(run_dir / "metrics.jsonl", lines)
    (run_dir / "config.yaml").write_text("checkpoint: {best: cider}\n")
    text = write_report(run_dir).read_text()
    assert "2 pictures of split val, best by CIDEr and kept: step 4" in text  # the untrained model has no checkpoint


def test_a_run_without_evaluations_has_curves_all_the_same(run_dir: Path) -> None:
    write_lines(run_dir / "metrics.jsonl", [start_line(0, None, 0), *(step_line(n) for n in range(1, 9))])
    for path in (run_dir / "captions").iterdir():
        path.unlink()
    text = write_report(run_dir).read_text()
    Page(text)
    assert "This run was not evaluated" in text
    assert "No captions of held-out pictures yet" in text
    assert text.count("<svg") == 6  # that of the loss twice, for wide and narrow screens


def test_one_set_of_captions_is_not_shown_as_before_and_after(run_dir: Path) -> None:
    (run_dir / "captions/step-00000000.jsonl").unlink()
    text = write_report(run_dir).read_text()
    assert "after step 20" in text
    assert "before training" not in text


@pytest.mark.parametrize(
    "lines", [[], [step_line(1, loss=float("nan"), lr="odd", grad_norm=None)], [{"event": "eval"}, {"event": "start"}]]
)
def test_an_empty_or_odd_run_folder_gives_a_page(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    if lines:
        write_lines(tmp_path / "metrics.jsonl", lines)
        (tmp_path / "config.yaml").write_text("a: [")
        (tmp_path / "environment.json").write_text("{")
    Page(write_report(tmp_path).read_text())


def test_not_finite_values_are_left_out_of_a_curve() -> None:
    svg = Chart([Line([(1, 2.0), (2, float("nan")), (3, float("inf")), (4, 3.0)])]).svg()
    assert "nan" not in svg
    assert "inf" not in svg
    assert svg.count("L") == 1


def test_a_curve_shows_beside_one_that_lies_on_it() -> None:
    curve, other = [(x, x * x) for x in range(10)], [(x, 50 - x) for x in range(10)]
    for points, wider in ((curve, True), (other, False)):
        svg = Chart([Line(curve, "s0"), Line(points, "s1")]).svg()
        assert bool(re.search(r'class="curve s0" d="[^"]*" style="stroke-width', svg)) == wider
        assert not re.search(r'class="curve s1" d="[^"]*" style', svg)


def test_marks_at_one_step_stand_side_by_side() -> None:
    svg = Chart([Line([(0, 1.0), (1000, 2.0)])], [Mark(500, "killed"), Mark(500, "killed")]).svg()
    assert len(set(re.findall(r'</title><line x1="([\d.]+)"', svg))) == 2


def test_labels_that_would_cover_each_other_are_left_to_the_tooltip() -> None:
    svg = Chart([Line([(0, 1.0), (1000, 2.0)])], [Mark(500, "killed at 500"), Mark(501, "killed at 505")]).svg()
    assert svg.count("<text") - svg.count("text-anchor") == 1
    assert "<title>killed at 505</title>" in svg


def test_thinning_keeps_every_spike() -> None:
    points = [(float(i), 100.0 if i == 777 else 1.0) for i in range(5000)]
    kept = thin(points, 100)
    assert len(kept) <= 200
    assert (777.0, 100.0) in kept
    assert kept == sorted(kept)


def test_smoothing_keeps_a_constant_and_does_not_lag_behind_a_slope() -> None:
    assert {y for _, y in smooth([(i, 2.0) for i in range(30)], 9)} == {2.0}
    assert smooth([(i, float(i)) for i in range(30)], 9)[15] == (15, 15.0)


@pytest.mark.parametrize(
    ("low", "high", "log", "ticks"),
    [
        (0, 1, False, [0, 0.5, 1]),
        (0.9, 6.2, False, [2, 4, 6]),
        (0.5, 1500, True, [1, 10, 100, 1000]),
        (2, 70, True, [2, 5, 10, 20, 50]),
    ],
)
def test_ticks_are_round(low: float, high: float, log: bool, ticks: list[float]) -> None:
    assert Axis(low, high, 0, 100, log).ticks(3) == ticks


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (1200, "1.2k"), (5e-5, "5e-5"), (2.5e6, "2.5M"), (0.002, "0.002")]
)
def test_tick_labels_are_short(value: float, text: str) -> None:
    assert short(value) == text


def test_score_of_blank_pictures_stands_beside_the_others_and_is_no_curve(run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0]
    path.write_text(whole + "\n" + json.dumps(eval_line(NUM_STEPS, 0.1, blank=True, bleu4=0.077)) + "\n")
    text = write_report(run_dir).read_text()
    assert re.search(r"<tr><td>shown blank pictures</td>.*<td>0.077</td>", text)
    assert "0.400</b><span>BLEU-4, from 0.200" in text
