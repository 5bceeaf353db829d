"""Sources on an S3 server and behind a web server, both on this machine: the bytes of a local build."""

import json
import shutil

import objectstore
import pytest
import webserver

from pipelines import remote_images
from pipelines.errors import BuildError, PassingError
from pipelines.images import open_images
from pipelines.remote_images import UrlImages
from pipelines.run import run_plain
from shards import remote
from shards.errors import ConfigError
from shards.remote import Remote

# Not ours: botocore, aiohttp and s3fs leave sessions to the garbage collector.
pytestmark = [
    pytest.mark.usefixtures("quick_tries"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]


def put_all(folder, address):
    target = Remote(address)
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        target.put(str(path.relative_to(folder)), path)


@pytest.fixture(scope="module")
def coco_in_store(store, photos):
    address = f"s3://{objectstore.BUCKET}/coco"
    put_all(photos, address)
    return address


@pytest.fixture(scope="module")
def reference(tmp_path_factory, make_config, photos, data_files):
    folder = tmp_path_factory.mktemp("reference") / "out"
    run_plain(make_config(photos, folder))
    return data_files(folder)


@pytest.fixture
def web(photos):
    """A web server with the pictures, their captions and a zip of them."""
    with webserver.running() as server:
        for path in (p for p in photos.rglob("*") if p.is_file()):
            name = f"/coco/{path.relative_to(photos)}"
            server.files[name] = webserver.Resource(path.read_bytes())
        yield server


def test_a_coco_folder_in_a_store_gives_the_bytes_of_a_local_one(
    coco_in_store, make_config, data_files, reference, tmp_path
):
    run_plain(make_config(coco_in_store, tmp_path / "out"))
    assert data_files(tmp_path / "out") == reference


def test_zips_in_a_store_are_fetched_once_and_again_when_they_change(
    store, photos, zipped, make_config, data_files, reference, tmp_path, monkeypatch
):
    root = tmp_path / "root"
    shutil.copytree(photos / "annotations", root / "annotations")
    for part in ("train2017", "val2017"):
        zipped(photos / part, root / f"{part}.zip", f"{part}/")
    address = f"s3://{objectstore.BUCKET}/zips"
    put_all(root, address)
    fetched = []
    real = Remote.fetch
    monkeypatch.setattr(Remote, "fetch", lambda self, name, path: (fetched.append(str(self)), real(self, name, path)))
    for _ in range(2):
        run_plain(make_config(address, tmp_path / "out"))
    assert data_files(tmp_path / "out") == reference
    assert len(fetched) == 4
    zipped(photos / "val2017", root / "val2017.zip", "another top/")
    put_all(root, address)
    fetched.clear()
    run_plain(make_config(address, tmp_path / "out"))
    assert fetched  # moto's dates change with each PUT; what matters is that the new zip came
    assert data_files(tmp_path / "out") == reference


def test_captions_and_pictures_of_a_web_server_give_the_bytes_of_local_ones(
    web, make_config, data_files, reference, tmp_path
):
    def source(part, split):
        return {
            "annotations": f"{web.url}/coco/annotations/captions_{part}2017.json",
            "images": f"{web.url}/coco/{part}2017",
            "split": split,
        }

    config = make_config(source("train", "train"), tmp_path / "out", held_out=source("val", "val"))
    run_plain(config)
    assert data_files(tmp_path / "out") == reference


def rows(photos, name_of):
    """Rows of JSONL for the pictures to train on; ``name_of``: what the column says of a picture."""
    content = json.loads((photos / "annotations" / "captions_train2017.json").read_text())
    captions = {}
    for annotation in content["annotations"]:
        captions.setdefault(annotation["image_id"], []).append(annotation["caption"])
    return [
        {"id": image["id"], "image": name_of(image["file_name"]), "captions": captions[image["id"]]}
        for image in content["images"]
    ]


def write_rows(path, found):
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return {"kind": "jsonl", "path": str(path), "id_field": "id"}


def test_rows_with_addresses_give_the_pictures_of_rows_with_paths(web, photos, make_config, tmp_path):
    by_url = write_rows(tmp_path / "urls.jsonl", rows(photos, lambda name: f"{web.url}/coco/train2017/{name}"))
    by_path = write_rows(tmp_path / "paths.jsonl", rows(photos, lambda name: str(photos / "train2017" / name)))
    pictures = []
    for i, source in enumerate((by_url, {**by_path, "images": str(photos / "train2017")})):
        summary = run_plain(make_config(source, tmp_path / f"out{i}", held_out="none"))
        assert summary.splits == {"train": 24}
        pictures.append(samples(tmp_path / f"out{i}"))
    assert pictures[0] == pictures[1]


def samples(folder):
    from shards.reader import SplitReader

    reader = SplitReader(folder, "train")
    found = [reader.read(i) for i in range(len(reader))]
    return {sample.key: (sample.image, sample.captions) for sample in found}


def test_tables_in_a_store_find_the_pictures_beside_them(store, photos, make_config, tmp_path):
    folder = tmp_path / "table"
    shutil.copytree(photos / "train2017", folder / "pictures")
    write_rows(folder / "rows.jsonl", rows(photos, lambda name: f"pictures/{name}"))
    address = f"s3://{objectstore.BUCKET}/table"
    put_all(folder, address)
    here = {"kind": "jsonl", "path": str(folder), "id_field": "id"}
    run_plain(make_config(here, tmp_path / "here", held_out="none"))
    for i, path in enumerate((address, f"{address}/rows.jsonl", f"{address}/*.jsonl")):
        there = {"kind": "jsonl", "path": path, "id_field": "id"}
        assert run_plain(make_config(there, tmp_path / f"there{i}", held_out="none")).splits == {"train": 24}
        assert samples(tmp_path / f"there{i}") == samples(tmp_path / "here")


def test_tars_and_parquet_in_a_store_are_read(store, photos, make_config, tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    run_plain(make_config(photos, tmp_path / "shards", held_out="none"))
    put_all(tmp_path / "shards", f"s3://{objectstore.BUCKET}/shards")
    tars = {"kind": "webdataset", "path": f"s3://{objectstore.BUCKET}/shards"}
    assert run_plain(make_config(tars, tmp_path / "tars", held_out="none")).splits == {"train": 24}
    assert samples(tmp_path / "tars") == samples(tmp_path / "shards")
    found = rows(photos, str)
    table = pa.table(
        {
            "id": [row["id"] for row in found],
            "image": [(photos / "train2017" / row["image"]).read_bytes() for row in found],
            "captions": [row["captions"] for row in found],
        }
    )
    (tmp_path / "parquet").mkdir()
    pq.write_table(table, tmp_path / "parquet" / "a.parquet")
    put_all(tmp_path / "parquet", f"s3://{objectstore.BUCKET}/parquet")
    source = {"kind": "parquet", "path": f"s3://{objectstore.BUCKET}/parquet", "id_field": "id"}
    assert run_plain(make_config(source, tmp_path / "b", held_out="none")).splits == {"train": 24}
    assert samples(tmp_path / "b") == samples(tmp_path / "shards")


def test_dead_addresses_are_rejected_with_what_was_found(web, photos, make_config, rejects, tmp_path):
    found = rows(photos, lambda name: f"{web.url}/coco/train2017/{name}")
    gone, forbidden, nobody = (f"{web.url}/gone.jpg", f"{web.url}/forbidden.jpg", "http://127.0.0.1:9/a.jpg")
    web.files["/forbidden.jpg"] = webserver.Resource(b"", ["status:403"] * 50)
    page = f"{web.url}/page.jpg"
    web.files["/page.jpg"] = webserver.Resource(b"<html>no longer here</html>", type="text/html")
    for row, address in zip(found, (gone, forbidden, nobody, page), strict=False):
        row["image"] = address
    source = write_rows(tmp_path / "urls.jsonl", found)
    summary = run_plain(make_config(source, tmp_path / "out", held_out="none"))
    assert summary.splits == {"train": 20}
    assert rejects(tmp_path / "out") == {
        gone: "missing_file",
        forbidden: "unreadable_file",
        nobody: "unreadable_file",
        page: "not_an_image",
    }
    details = [json.loads(line)["detail"] for line in (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()]
    assert "127.0.0.1:9 does not answer" in details
    assert any("403" in detail for detail in details)


def test_a_server_that_fails_for_a_moment_costs_no_picture(web, photos, make_config, data_files, tmp_path):
    files = [f for name, f in web.files.items() if name.startswith("/coco/train2017/")]
    for file in files[:10]:
        file.tricks = ["status:503", "drop:100", "", "drop:10"]
    source = write_rows(tmp_path / "urls.jsonl", rows(photos, lambda name: f"{web.url}/coco/train2017/{name}"))
    assert run_plain(make_config(source, tmp_path / "out", held_out="none")).splits == {"train": 24}


def test_a_server_that_answered_and_is_gone_fails_the_build(web, photos):
    images = UrlImages(open_images(str(photos / "train2017")))
    name = sorted(p.name for p in (photos / "train2017").iterdir())[0]
    address = f"{web.url}/coco/train2017/{name}"
    assert images.read(address) == (photos / "train2017" / name).read_bytes()
    assert images.read(name) == images.read(address)
    web.files[f"/coco/train2017/{name}"].tricks = ["status:500"] * 99
    with pytest.raises(
        PassingError, match=r"127.0.0.1:\d+ has answered before, so this may pass; finished shards are kept"
    ):
        images.read(address)


def test_a_network_that_is_down_rejects_nobody(photos, monkeypatch):
    monkeypatch.setattr(remote_images, "MOST_SILENT", 3)
    images = UrlImages(open_images(str(photos / "train2017")))
    for i in range(2):
        assert images.read(f"http://127.0.0.1:{i + 2}/a.jpg").reason == "unreadable_file"
    with pytest.raises(PassingError, match="none of 3 images could be reached"):
        images.read("http://127.0.0.1:9/a.jpg")


def test_a_store_that_dies_while_it_is_read_and_a_rerun_ends_with_the_same_bytes(
    photos, reference, make_config, data_files, tmp_path, monkeypatch
):
    address, out = f"s3://{objectstore.BUCKET}/coco", tmp_path / "out"
    config = make_config(address, out, build={"runner": "threads", "retries": 0})
    real = Remote.read
    with objectstore.running() as running:
        put_all(photos, address)

        def read(self, *arguments):
            if list(out.glob("*.tar")):
                running.kill()
            return real(self, *arguments)

        monkeypatch.setattr(Remote, "read", read)
        message = r"tries in a row failed\); check the network .*finished shards are kept"
        with pytest.raises(PassingError, match=message):
            run_plain(config)
        assert list(out.glob("*.tar"))
        assert not (out / "manifest.json").exists()
        monkeypatch.setattr(Remote, "read", real)
        running.start()
        put_all(photos, address)
        run_plain(config)
        assert data_files(out) == reference


def test_addresses_that_lead_nowhere_are_said_before_anything_is_built(store, web, make_config, tmp_path):
    bucket = f"s3://{objectstore.BUCKET}"
    for source, message in (
        (f"{bucket}/nothing", "expected one caption file in the official COCO layout .*found nothing"),
        (f"{web.url}/coco", "a web server does not list its files; give source.annotations and source.images"),
        ({"annotations": f"{bucket}/no.json", "images": f"{bucket}/coco"}, "no.json: there is no such file"),
        ({"kind": "jsonl", "path": f"{bucket}/nothing"}, "holds no file that ends in .jsonl or .ndjson"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_plain(make_config(source, tmp_path / "out"))
    with pytest.raises(BuildError, match="HTTP 404 Not Found"):
        run_plain(make_config({"kind": "jsonl", "path": f"{web.url}/no.jsonl"}, tmp_path / "out"))


def test_a_plain_path_asks_nobody(photos, make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "_filesystem", lambda location: pytest.fail(f"{location} was asked for"))
    assert run_plain(make_config(photos, tmp_path / "out")).splits == {"train": 24, "val": 5}


@pytest.mark.parametrize(
    "source",
    [
        {"root": "s3://no-such-bucket/coco"},
        {"annotations": "s3://no-such-bucket/captions_train2017.json", "images": "s3://no-such-bucket/train2017"},
        {"kind": "jsonl", "path": "s3://no-such-bucket/pairs.jsonl"},
        {"kind": "parquet", "path": "s3://no-such-bucket/*.parquet"},
    ],
)
def test_a_source_in_a_bucket_that_is_not_there_is_said(store, make_config, tmp_path, source):
    with pytest.raises(
        ConfigError, match=r"s3://no-such-bucket.*: there is no bucket no-such-bucket; make it, or check"
    ):
        run_plain(make_config(source, tmp_path / "out", held_out="none"))


def test_a_row_that_names_a_bucket_that_is_not_there_costs_that_row(store, make_config, photos, rejects, tmp_path):
    found = rows(photos, lambda name: str(photos / "train2017" / name))
    found[3]["image"] = "s3://no-such-bucket/a.jpg"
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, found)))
    source = {"kind": "jsonl", "path": tmp_path / "pairs.jsonl", "images": photos / "train2017", "id_field": "id"}
    run_plain(make_config(source, tmp_path / "out"))
    assert rejects(tmp_path / "out") == {"s3://no-such-bucket/a.jpg": "missing_file"}
