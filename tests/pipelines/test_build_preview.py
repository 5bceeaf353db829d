import json

import pytest

from pipelines.preview import preview
from pipelines.run import run_plain
from shards.errors import ConfigError


@pytest.fixture
def source(coco, pictures, tmp_path):
    files = {f"{i}.jpg": pictures.encode(pictures.photo(i)) for i in range(12)}
    files |= {
        "copy.jpg": files["3.jpg"],
        "page.jpg": b"<html></html>",
        "cut.jpg": files["5.jpg"][:500],
        "gone.jpg": None,
    }
    return coco(tmp_path / "source", files, {"0.jpg": ["...", " a  dog"]})


def test_a_preview_of_all_records_says_what_the_build_then_does(source, make_config, rejects, tmp_path):
    config = make_config(source, tmp_path / "out")
    found = preview(config, 1000)
    assert not (tmp_path / "out").exists()
    summary = run_plain(config)
    assert (found.kept, found.reasons) == (summary.splits, summary.rejected)
    examples = {row["file_name"]: reason for reason, rows in found.examples.items() for row in rows}
    assert examples == rejects(tmp_path / "out")
    assert found.captions == {"changed": 1, "empty": 1}
    assert "4 of 16" not in str(found)
    assert "duplicate_image 1\n  copy.jpg: same bytes as image 4" in str(found)


def test_a_preview_takes_as_many_records_as_asked_the_same_each_time(source, make_config, tmp_path):
    config = make_config(source, tmp_path / "out")
    first, again = preview(config, 7), preview(config, 7)
    assert first.records == 7
    assert first.to_json() == again.to_json()


def test_a_preview_leaves_a_dataset_alone_that_other_settings_made(source, make_config, data_files, tmp_path):
    run_plain(make_config(source, tmp_path / "out"))
    before = data_files(tmp_path / "out")
    assert preview(make_config(source, tmp_path / "out", filters={"min_side_px": 60}), 5).kept == {"train": 0}
    assert data_files(tmp_path / "out") == before


def test_the_command_prints_json_and_writes_the_page(source, command, tmp_path):
    path = tmp_path / "build.yaml"
    path.write_text(json.dumps({"source": str(source), "out": str(tmp_path / "out")}))
    process = command("preview", path, "--records", 9, "--json", "--page", tmp_path / "page.html")
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    answer = json.loads(output)
    assert answer["records"] == 9
    assert sum(answer["kept"].values()) + sum(answer["reasons"].values()) == 9
    assert {row["filter"] for row in answer["filters"]} >= {"min_side_px", "whole pictures"}
    assert "<h1>out: preview of 9 records</h1>" in (tmp_path / "page.html").read_text()
    assert not (tmp_path / "out").exists()


def test_wrong_input_is_said_as_a_build_says_it(make_config, tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere: does not exist"):
        preview(make_config(tmp_path / "nowhere", tmp_path / "out"), 5)
