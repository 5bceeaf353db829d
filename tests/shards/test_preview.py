import json
import re
import shutil

import pytest

from shards.__main__ import main
from shards.errors import ConfigError
from shards.reader import SplitReader


def test_a_contact_sheet_shows_samples_of_all_shards_and_needs_no_network(drawn_shards, tmp_path, capsys):
    out = tmp_path / "sheet.html"
    assert main(["preview", str(drawn_shards), "--num", "10", "--out", str(out), "--json"]) == 0
    answer, page = json.loads(capsys.readouterr().out), out.read_text()
    train, val = list(SplitReader(drawn_shards, "train").keys()), list(SplitReader(drawn_shards, "val").keys())
    assert answer["keys"] == [*train[::10], *(val[i * 12 // 10] for i in range(10))]
    assert page.count("data:image/jpeg;base64,") == 20
    assert not re.search(r'(src|href)=(?!"data:)', page)
    assert "10 of 100 samples in 3 shards" in page
    for caption in SplitReader(drawn_shards, "train").read(0).captions:
        assert f"<li>{caption}</li>" in page


def test_one_split_can_be_asked_for_and_a_small_one_is_shown_whole(drawn_shards, tmp_path, capsys):
    assert main(["preview", str(drawn_shards), "--split", "val", "--out", str(tmp_path / "a.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'a.html'}: 12 samples\n"
    with pytest.raises(ConfigError, match=r"split 'test' is not in the dataset"):
        main(["preview", str(drawn_shards), "--split", "test", "--out", str(tmp_path / "a.html")])


def test_a_damaged_sample_is_named_on_the_sheet(drawn_shards, tmp_path, capsys):
    folder = shutil.copytree(drawn_shards, tmp_path / "shards")
    path = folder / "val-000000.tar"
    data = bytearray(path.read_bytes())
    data[700] ^= 255
    path.write_bytes(data)
    assert main(["preview", str(folder), "--split", "val", "--out", str(tmp_path / "a.html")]) == 1
    key = SplitReader(folder, "val").key(0)
    assert f"{key}" in capsys.readouterr().out
    page = (tmp_path / "a.html").read_text()
    assert page.count('class="bad"') == 1
    assert page.count("data:image/jpeg") == 11


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num", "0"], r"--num is 0, expected 1 or more"),
        (["--out", "{folder}/sheet.html"], r"sheet.html: lies in the shard folder"),
        (["--out", "{folder}"], r"--out is .*, that is a folder"),
        (["--out", "{folder}/none/sheet.html"], r"--out is .*sheet.html, there is no folder .*none"),
    ],
)
def test_what_cannot_be_written_is_said(drawn_shards, arguments, message):
    with pytest.raises(ConfigError, match=message):
        main(["preview", str(drawn_shards), *(a.format(folder=drawn_shards) for a in arguments)])
