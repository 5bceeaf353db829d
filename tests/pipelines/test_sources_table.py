"""JSONL, CSV and Parquet: what a row may hold, and what is refused."""

import json

import pytest
from tables import KINDS, read, source_of

from pipelines.config import SourceConfig
from pipelines.run import run_plain
from shards.errors import ConfigError
from shards.reader import SplitReader


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_one_image_that_stand_side_by_side_are_one_record(tmp_path, kind):
    rows = [{"image": name, "caption": c} for name, c in (("a.jpg", "one"), ("a.jpg", "two"), ("b.jpg", "three"))]
    records = read(source_of(kind, rows, tmp_path))
    assert [(r.image_id, r.captions) for r in records] == [("a.jpg", ("one", "two")), ("b.jpg", ("three",))]


@pytest.mark.parametrize("kind", KINDS)
def test_columns_may_have_any_name(tmp_path, kind):
    rows = [{"picture": "a.jpg", "says": "one", "nr": 5, "part": "dev"}]
    fields = {"image_field": "picture", "caption_field": "says", "id_field": "nr", "split_field": "part"}
    (record,) = read({**source_of(kind, rows, tmp_path), **fields})
    assert (record.image_id, record.file_name, record.captions, record.split) == (5, "a.jpg", ("one",), "dev")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_field": "imgae"}, r"has no column 'imgae'; did you mean 'image'\? its columns are 'image', 'caption'"),
        ({"caption_field": "x"}, r"has no column 'x'; its columns are .*; set source.caption_field"),
        ({"id_field": "captoin"}, r"did you mean 'caption'\? .*set source.id_field"),
        ({"split_field": "split"}, r"has no column 'split'; .*set source.split_field"),
    ],
)
def test_a_column_that_is_not_there_is_named_with_the_nearest(tmp_path, kind, fields, message):
    with pytest.raises(ConfigError, match=message):
        read({**source_of(kind, [{"image": "a.jpg", "caption": "x"}], tmp_path), **fields})


@pytest.mark.parametrize("kind", KINDS)
def test_columns_without_a_usual_name_have_to_be_named(tmp_path, kind):
    with pytest.raises(ConfigError, match=r"has none of the columns image, file_name, .*its columns are 'a', 'b'"):
        read(source_of(kind, [{"a": "a.jpg", "b": "x"}], tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", r"a.jsonl: holds no rows; expected JSONL, one object a line"),
        (
            "a.jsonl",
            b"[\n{}\n]",
            r"a.jsonl, line 1: is not JSON .* it looks like one JSON list: write one object a line",
        ),
        ("a.jsonl", b"[1, 2]\n", r"line 1: holds a list; expected JSONL"),
        ("a.jsonl", b"\xff\xd8\xff", r"line 1: is not JSON"),
        ("a.jsonl", b'{"image": "a", "caption": "b"}\n{"image"', r"a.jsonl, line 2: is not JSON"),
        ("a.csv", b"", r"a.csv: holds no rows; expected CSV in UTF-8"),
        ("a.csv", b"image,caption\n", r"a.csv: holds no rows"),
        (
            "a.csv",
            b"image,caption\na.jpg,one, two\n",
            r"line 2: has 3 values, its header names 2 columns; a caption with a c",
        ),
        (
            "a.csv",
            b"image;caption\na.jpg;x\n",
            r"between columns its only one is 'image;caption'; set source.delimiter=';'",
        ),
        ("a.csv", b"image\tcaption\na.jpg\tx\n", r"its only one is 'image\\tcaption'; set source.delimiter=tab"),
        ("a.csv", b"image|caption\n", r"its only one is 'image\|caption'; set source.delimiter='\|'"),
        ("a.csv", b"image,image,caption\na,b,c\n", r"has two columns 'image'; rename one"),
        ("a.csv", b"image,caption\n\xff\xfe,c\n", r"a.csv: 'utf-8' codec can't decode .*expected CSV in UTF-8"),
        ("a.csv", b'image,caption\na.jpg,"open\n', r"a.csv: unexpected end of data; expected CSV"),
        ("a.parquet", b"", r"a.parquet: .*expected a Parquet file"),
        ("a.parquet", b"PAR1 not really", r"a.parquet: .*expected a Parquet file"),
    ],
)
def test_what_is_no_such_file_is_refused_in_one_paragraph(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read({"kind": name.rpartition(".")[2], "path": tmp_path / name})
    assert "\n" not in str(caught.value)


def test_paths_that_lead_nowhere_are_named(tmp_path):
    (tmp_path / "pairs.jsonl").write_text('{"image": "a.jpg", "caption": "x"}')
    for path, message in (
        (tmp_path / "pair.jsonl", r"there is no such file or folder; did you mean .*pairs.jsonl\? check source.path"),
        (tmp_path / "*.csv", r"no file has a name like this"),
        (tmp_path, r"holds no file that ends in .csv or .tsv"),
    ):
        with pytest.raises(ConfigError, match=message):
            read({"kind": "csv", "path": path})
    with pytest.raises(ConfigError, match=r"nowhere: there is no such folder or zip of images; check source.images"):
        read({"kind": "jsonl", "path": tmp_path, "images": tmp_path / "nowhere"})
    with pytest.raises(ConfigError, match=r"stands in it twice"):
        read({"kind": "jsonl", "path": [tmp_path / "pairs.jsonl", tmp_path / "pairs.jsonl"]})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"kind": "jsonl"}, r"path is missing; give the jsonl file, files or folder"),
        ({"kind": "jsonl", "root": "x"}, r"kind=jsonl does not use root; remove it, or choose another kind"),
        ({"kind": "coco", "root": "x", "id_field": "id"}, r"kind=coco does not use id_field; remove it"),
        ({"kind": "jsnl", "path": "x"}, r"kind"),
        ({"kind": "csv", "path": "x", "limit": 0}, r"limit"),
    ],
)
def test_settings_that_do_not_fit_the_kind_are_refused(source, message):
    with pytest.raises(ValueError, match=message):
        SourceConfig.model_validate(source)


@pytest.mark.parametrize(("given", "delimiter"), [(";", ";"), ("tab", "\t"), ("\\t", "\t"), ("|", "|"), (None, ",")])
def test_columns_of_csv_may_be_parted_by_any_character(tmp_path, given, delimiter):
    (tmp_path / "a.csv").write_text(f'image{delimiter}caption\na.jpg{delimiter}"a; dog, or\t|"\n')
    (record,) = read({"kind": "csv", "path": tmp_path / "a.csv", "delimiter": given})
    assert (record.file_name, record.captions) == ("a.jpg", ("a; dog, or\t|",))


def test_tsv_has_tabs_unless_told_otherwise(tmp_path):
    (tmp_path / "a.tsv").write_text("image\tcaption\na.jpg\tone\n")
    assert read({"kind": "csv", "path": tmp_path / "a.tsv"})[0].captions == ("one",)
    (tmp_path / "a.tsv").write_text("image,caption\na.jpg,one\n")
    with pytest.raises(ConfigError, match=r"with '\\t' between columns its only one is .*set source.delimiter=,"):
        read({"kind": "csv", "path": tmp_path / "a.tsv"})


def test_parquet_columns_of_another_type_are_no_images(tmp_path):
    source = source_of("parquet", [{"image": 3, "caption": "x"}], tmp_path)
    with pytest.raises(
        ConfigError, match=r"column 'image' holds int64, expected bytes, a struct of bytes and path, or paths"
    ):
        read(source)


def test_parquet_images_without_id_or_path_are_named_by_their_bytes(tmp_path):
    rows = [{"image": data, "caption": "x"} for data in (b"one", b"two")]
    ids = [r.image_id for r in read(source_of("parquet", rows, tmp_path))]
    (tmp_path / "more").mkdir()
    more = [
        r.image_id for r in read(source_of("parquet", [{"image": b"new", "caption": "y"}, *rows], tmp_path / "more"))
    ]
    assert more[1:] == ids
    assert len(set(more)) == 3


@pytest.mark.parametrize("value", [-1, 2**63, 1.5, None, True, [1], "", "  "])
def test_ids_that_name_nothing_are_refused_with_their_row(tmp_path, value):
    rows = [{"image": "a.jpg", "caption": "x", "id": 1}, {"image": "b.jpg", "caption": "x", "id": value}]
    with pytest.raises(
        ConfigError, match=r"pairs.jsonl, line 2: id is .*, expected a whole number of at least 0 or a text"
    ):
        read({**source_of("jsonl", rows, tmp_path), "id_field": "id"})


def test_ids_do_not_depend_on_the_rows_before_them(tmp_path):
    rows = [{"image": f"{i}.jpg", "caption": "x"} for i in range(5)]
    ids = {r.file_name: r.image_id for r in read(source_of("jsonl", rows, tmp_path))}
    more = [{"image": "new.jpg", "caption": "y"}, *reversed(rows)]
    assert ids.items() <= {r.file_name: r.image_id for r in read(source_of("jsonl", more, tmp_path))}.items()


def test_files_in_two_folders_may_name_their_images_alike(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        image = "1.jpg" if name == "one" else str(tmp_path / "two" / "1.jpg")
        source_of("jsonl", [{"image": image, "caption": name}], tmp_path / name)
    records = read({"kind": "jsonl", "path": tmp_path})
    assert [(r.image_id, r.captions) for r in records] == [("one/1.jpg", ("one",)), ("two/1.jpg", ("two",))]


def test_absolute_paths_are_followed_inside_the_images_only(tmp_path, make_config, pictures, rejects):
    for name in ("in.jpg", "out.jpg"):
        (tmp_path / name[:-4]).mkdir()
        (tmp_path / name[:-4] / name).write_bytes(pictures.encode(pictures.photo(len(name))))
    rows = [{"image": str(tmp_path / name[:-4] / name), "caption": "x"} for name in ("in.jpg", "out.jpg")]
    source = {**source_of("jsonl", rows, tmp_path), "images": tmp_path / "in"}
    run_plain(make_config(source, tmp_path / "o"))
    assert rejects(tmp_path / "o") == {str(tmp_path / "out" / "out.jpg"): "missing_file"}


LONG = "a very long caption indeed " * 400  # 10,800 characters
ODD_CAPTIONS = {
    "nan": ("nan", ["nan"]),
    "separator": ("line\u2028separator", ["line separator"]),
    "nul": ("a\0b", ["a b"]),
    "quotes": ('she said "yes", twice\nat least', ['she said "yes", twice at least']),
    "long": (LONG, [LONG.strip()]),
    "emoji": ("\U0001f600", ["\U0001f600"]),
    "list": (["one", "two"], ["one", "two"]),
}
NOT_TEXTS = {"number": 7, "null": None, "float": float("nan"), "object": {"a": 1}, "true": True, "nested": [["a"]]}


@pytest.mark.parametrize("kind", KINDS)
def test_odd_captions_come_out_clean_or_are_counted(tmp_path, make_config, pictures, rejects, kind):
    odd = {name: value for name, (value, _) in ODD_CAPTIONS.items()}
    if kind == "csv":
        odd = {name: json.dumps(value) if isinstance(value, list) else value for name, value in odd.items()}
    if kind == "jsonl":
        odd |= NOT_TEXTS
    if kind == "parquet":
        odd = {name: value if isinstance(value, list) else [value] for name, value in odd.items()} | {"null": None}
    rows = []
    for number, (name, caption) in enumerate(odd.items()):
        (tmp_path / f"{name}.jpg").write_bytes(pictures.encode(pictures.photo(number)))
        rows.append({"image": f"{name}.jpg", "caption": caption})
    run_plain(make_config(source_of(kind, rows, tmp_path), tmp_path / "o", build={"max_reject_share": 1}))
    reader = SplitReader(tmp_path / "o", "train")
    found = {s.meta["file_name"]: list(s.captions) for s in map(reader.read, range(len(reader)))}
    assert found == {f"{name}.jpg": captions for name, (_, captions) in ODD_CAPTIONS.items()}
    assert rejects(tmp_path / "o") == {f"{n}.jpg": "no_caption" for n in odd if n not in ODD_CAPTIONS}


@pytest.mark.parametrize("kind", KINDS)
def test_odd_names_of_images_are_found_or_rejected(tmp_path, make_config, pictures, rejects, kind):
    names = [
        "\u00fcml\u00e4ut \U0001f600.jpg",
        "n" * 251 + ".jpg",
        "a.b/c.d.jpg",
        "x/1.jpg",
        "y/1.jpg",
        "sp ace.JPG",
        "'q\"'.jpg",
    ]
    for number, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(pictures.encode(pictures.photo(number)))
    absent = ["absent.jpg", "n" * 300 + ".jpg", "../up.jpg", "/etc/passwd", "a\\b.jpg", "nul\0.jpg"]
    if kind == "jsonl":
        absent += ["\ud83d.jpg"]
    rows = [{"image": name, "caption": "x"} for name in [*names, *absent]]
    run_plain(make_config(source_of(kind, rows, tmp_path), tmp_path / "o", build={"max_reject_share": 1}))
    reader = SplitReader(tmp_path / "o", "train")
    assert {reader.read(i).meta["file_name"] for i in range(len(reader))} == set(names)
    assert rejects(tmp_path / "o") == dict.fromkeys(absent, "missing_file")
