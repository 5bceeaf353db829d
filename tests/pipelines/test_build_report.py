import json
import re

from pipelines.report import histogram
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
