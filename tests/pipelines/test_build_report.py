import json
import re

import pytest

from pipelines.addition import Addition
from pipelines.errors import RejectShareError
from pipelines.preview import preview
from pipelines.report_page import _columns, histogram
from pipelines.run import run_plain


def test_the_report_counts_what_happened_and_needs_no_network(coco, make_config, pictures, tmp_path):
    files = {
        "a.jpg": pictures.encode(pictures.photo(1)),
        "b.png": pictures.encode(pictures.photo(2, mode="RGBA"), "PNG"),
        "<img src=x>.jpg": b"no picture",
        "gone.jpg": None,
    }
    captions = {"a.jpg": ["a  dog", "a dog", "<script>alert(1)</script>", 7], "b.png": ["a cat sits"]}
    unlisted = {"id": 99, "image_id": 12345, "caption": "of nothing"}
    source = coco(tmp_path / "source", files, captions, extra_annotations=[unlisted])
    run_plain(make_config(source, tmp_path / "out", build={"max_reject_share": 1}))
    facts = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (facts["kept"], facts["rejected"]) == (2, 2)
    assert facts["reasons"] == {"missing_file": 1, "not_an_image": 1}
    assert facts["splits"]["train"]["left_aside"] == {"annotations_of_unlisted_images": 1}
    assert facts["statistics"]["flags"] == {"converted": 1, "mode=RGBA": 1}
    assert facts["statistics"]["captions_per_image"] == {"1": 1, "2": 1}
    assert facts["statistics"]["caption_cleaning"] == {"changed": 1, "duplicate": 1, "not_text": 1}
    page = (tmp_path / "out" / "report.html").read_text()
    assert not re.search(r'(src|href)=(?!"data:)', page.replace("&lt;img src=x&gt;", ""))
    assert "<script" not in page
    assert "&lt;img src=x&gt;.jpg" in page
    assert page.count("data:image/jpeg;base64,") == 2


def test_times_and_paths_stand_only_in_the_report(photos, make_config, data_files, tmp_path):
    run_plain(make_config(photos, tmp_path / "out", build={"gallery": 3}))
    for name, data in data_files(tmp_path / "out").items():
        assert str(tmp_path).encode() not in data, name
        assert str(photos).encode() not in data, name


def test_a_histogram_has_a_bar_for_every_number_or_a_round_step():
    few = histogram({1: 3, 2: 5, 7: 1})
    assert few.count("<rect") == 7
    assert "<title>7: 1</title>" in few
    many = histogram(dict.fromkeys(range(200, 641), 2))
    assert "<title>200 to 219: 40</title>" in many
    assert histogram({}) == '<p class="sub">None.</p>'


def full_report(coco, make_config, pictures, tmp_path):
    """Facts and page of a build in which each new part of the report has something to say."""
    files = {f"{i}.jpg": pictures.encode(pictures.scene(i)) for i in range(20)}
    files |= {f"like{i}.jpg": pictures.encode(pictures.scene(0), quality=50 + i) for i in range(8)}
    files["flat.png"] = pictures.encode(pictures.photo(3).point(lambda v: 7), "PNG")
    captions = {name: ["a dog runs", "the dog number nine"] for name in files} | {"0.jpg": ["a dog", "dog"]}
    source = coco(tmp_path / "source", files, captions)
    filters = {"near_duplicate_bits": 4, "min_caption_words": 2, "max_caption_words": 3}
    run_plain(make_config(source, tmp_path / "out", filters=filters, build={"max_reject_share": 1}))
    return json.loads((tmp_path / "out" / "report.json").read_text()), (tmp_path / "out" / "report.html").read_text()


def test_each_filter_is_listed_with_its_setting_and_what_it_took(coco, make_config, pictures, tmp_path):
    facts, page = full_report(coco, make_config, pictures, tmp_path)
    rows = {row["filter"]: (row["setting"], row["count"]) for row in facts["filters"]}
    assert rows["near_duplicate_bits"] == ("4", 8)
    assert rows["constant_levels"] == ("2", 1)
    assert rows["color_modes"] == ("off", 0)
    assert rows["whole pictures"] == (None, 0)
    assert rows["captions: too short"] == ("min_caption_words 2", 1)
    assert rows["captions: too long"] == ("max_caption_words 3", 28)  # those of rejected pictures too
    assert (
        sum(row["count"] for row in facts["filters"] if not row["filter"].startswith("captions")) == facts["rejected"]
    )
    assert "<td>near_duplicate_bits</td><td>4</td><td>8</td>" in page


def test_vocabulary_balance_and_groups_are_shown(coco, make_config, pictures, tmp_path):
    facts, page = full_report(coco, make_config, pictures, tmp_path)
    assert facts["vocabulary"] == {"num_words": 3, "top": {"a": 20, "dog": 20, "runs": 19}}
    assert [shard["samples"] + shard["rejected"] for shard in facts["shards"]] == [8, 8, 8, 5]
    assert all(2 <= shard["words_per_caption"] <= 3 for shard in facts["shards"])
    assert facts["near_duplicate_groups"] == 1
    assert "3 different words in 20 captions" in page
    assert page.count("<title>train-000003.tar: ") == 4
    assert page.count("stays for 8") == 1
    assert page.count("gave way") == 5  # one row of pictures


def test_many_shards_are_drawn_as_means_of_neighbours():
    shards = [{"name": f"train-{i:06d}.tar", "samples": i} for i in range(1000)]
    chart = _columns("Samples", shards, "samples", "{:.1f}", 1)
    assert chart.count("<rect") == 120
    assert "<title>train-000000.tar to train-000008.tar: 4.0</title>" in chart
    assert "0.0 to 999.0, median 499.5" in chart


def head(page):
    """Title, heading and the line below it."""
    parts = re.search(r"<title>(.*?)</title>.*<h1>(.*?)</h1>\s*<p class=\"sub\">(.*?)</p>", page, re.DOTALL)
    return parts.groups()


def test_each_report_says_what_it_is_of_and_names_only_datasets_that_there_are(
    photos, coco, make_config, pictures, tmp_path
):
    out = tmp_path / "out"
    summary = run_plain(make_config(photos, out))
    title, heading, about = head((out / "report.html").read_text())
    assert (title, heading) == ("Build report: out", "out")
    assert f"Dataset <code>{summary.manifest_id[:16]}</code>" in about

    more = coco(tmp_path / "more", {f"{i}.jpg": pictures.encode(pictures.scene(i)) for i in range(3)}, first_id=900)
    added = run_plain(make_config(more, out, filters={"near_duplicate_bits": 4}), Addition)
    page, facts = (out / "report-1.html").read_text(), json.loads((out / "report-1.json").read_text())
    title, heading, about = head(page)
    assert (title, heading) == ("Addition report: out", "out: addition")
    assert (
        f"Dataset <code>{added.manifest_id[:16]}</code>, which was <code>{summary.manifest_id[:16]}</code> before"
        in about
    )
    assert (facts["of"], facts["manifest_id"], facts["why"]) == ("addition", added.manifest_id, summary.manifest_id)

    found = preview(make_config(photos, out), 7)
    assert head(found.page)[:2] == ("Preview: out", "out: preview of 7 records")
    assert "No shard was written and this is no dataset." in found.page
    assert "Dataset <code>" not in found.page


def test_a_build_that_publishes_nothing_leaves_a_report_that_says_so_until_one_does(
    coco, make_config, pictures, tmp_path
):
    files = {f"{i}.jpg": pictures.encode(pictures.photo(i)) if i < 3 else b"" for i in range(10)}
    source, out = coco(tmp_path / "source", files), tmp_path / "out"
    with pytest.raises(
        RejectShareError, match=r"nothing was published; look at .*/out/.build/report.html, and into rejects"
    ):
        run_plain(make_config(source, out))
    page, facts = (out / ".build" / "report.html").read_text(), json.loads((out / ".build" / "report.json").read_text())
    assert head(page)[:2] == ("Not published: out", "out: not published")
    assert "This is no dataset: 7 of 10 records rejected (empty_file 7), build.max_reject_share=0.5 allows 5" in page
    assert (facts["of"], facts["manifest_id"], facts["kept"], facts["rejected"]) == ("unpublished", None, 3, 7)
    assert page.count("data:image/jpeg;base64,") == 3
    assert not (out / "report.html").exists()
    run_plain(make_config(source, out, build={"max_reject_share": 1}))
    assert not list((out / ".build").glob("re[jp]*"))
