"""The same records in every kind of source."""

import csv
import io
import json
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Rows = Sequence[tuple[int, str, bytes, Sequence[Any]]]  # id, file name, picture, captions


def images_folder(root: Path, rows: Rows) -> Path:
    for _, name, data, _ in rows:
        path = root / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root / "images"


def coco(root: Path, rows: Rows) -> dict[str, Any]:
    content = {
        "images": [{"id": i, "file_name": name} for i, name, _, _ in rows],
        "annotations": [{"image_id": i, "caption": c} for i, _, _, captions in rows for c in captions],
    }
    (root / "captions.json").write_text(json.dumps(content))
    return {"annotations": root / "captions.json", "images": images_folder(root, rows)}


def coco_zip(root: Path, rows: Rows) -> dict[str, Any]:
    source = coco(root, rows)
    with zipfile.ZipFile(root / "images.zip", "w") as archive:
        for _, name, data, _ in rows:
            archive.writestr(name, data)
    return {**source, "images": root / "images.zip"}


def coco_halves(root: Path, rows: Rows) -> dict[str, Any]:
    """Two annotation files, each with a folder of its own."""
    halves = []
    for number, half in enumerate((rows[: len(rows) // 2], rows[len(rows) // 2 :])):
        (root / str(number)).mkdir()
        halves.append(coco(root / str(number), half))
    return {name: [half[name] for half in halves] for name in ("annotations", "images")}


def karpathy(root: Path, rows: Rows) -> dict[str, Any]:
    images_folder(root, rows).rename(root / "train2014")
    images = [
        {
            "filepath": "train2014",
            "filename": name,
            "cocoid": i,
            "split": "restval",
            "sentences": [{"raw": c} for c in captions],
        }
        for i, name, _, captions in rows
    ]
    (root / "dataset_coco.json").write_text(json.dumps({"dataset": "coco", "images": images}))
    return {"kind": "karpathy", "root": root}


def jsonl(root: Path, rows: Rows) -> dict[str, Any]:
    lines = [json.dumps({"id": i, "image": f"images/{name}", "captions": list(c)}) for i, name, _, c in rows]
    (root / "pairs.jsonl").write_text("\n".join(lines))
    images_folder(root, rows)
    return {"kind": "jsonl", "path": root / "pairs.jsonl", "id_field": "id"}


def csv_rows(root: Path, rows: Rows) -> dict[str, Any]:
    """A caption a row, those of an image apart from each other."""
    with (root / "pairs.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "image", "caption"])
        for turn in range(max(len(c) for _, _, _, c in rows)):
            writer.writerows([i, name, c[turn]] for i, name, _, c in rows if turn < len(c))
    return {"kind": "csv", "path": root / "pairs.csv", "id_field": "id", "images": images_folder(root, rows)}


def _parquet(root: Path, rows: Rows, images: pa.Array, row_group_size: int = 16) -> dict[str, Any]:
    columns = {"id": [r[0] for r in rows], "image": images, "caption": [list(r[3]) for r in rows]}
    (root / "data").mkdir()
    half = len(rows) // 2
    for number, part in enumerate((pa.table(columns)[:half], pa.table(columns)[half:])):
        pq.write_table(part, root / "data" / f"train-{number:05d}-of-00002.parquet", row_group_size=row_group_size)
    return {"kind": "parquet", "path": root / "data", "id_field": "id"}


def parquet_bytes(root: Path, rows: Rows) -> dict[str, Any]:
    """A file is one row group."""
    return _parquet(root, rows, pa.array([r[2] for r in rows], pa.binary()), row_group_size=1 << 20)


def parquet_struct(root: Path, rows: Rows) -> dict[str, Any]:
    return _parquet(root, rows, pa.array([{"bytes": r[2], "path": r[1]} for r in rows]))


def parquet_paths(root: Path, rows: Rows) -> dict[str, Any]:
    return {**_parquet(root, rows, pa.array([r[1] for r in rows])), "images": images_folder(root, rows)}


def parquet_unembedded(root: Path, rows: Rows) -> dict[str, Any]:
    """Structs that have no bytes but where the images lie, as Hugging Face datasets do that were not embedded."""
    folder = images_folder(root, rows)
    structs = pa.array(
        [{"bytes": None, "path": str(folder / r[1])} for r in rows],
        pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    )
    return {**_parquet(root, rows, structs), "images": folder}


def save_to_disk(root: Path, rows: Rows) -> dict[str, Any]:
    """Hugging Face datasets' own folder."""
    source = parquet_struct(root, rows)
    table = pq.read_table(root / "data")
    (root / "saved").mkdir()
    with pa.ipc.new_stream(root / "saved" / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=16)
    return {**source, "path": root / "saved"}


def tars(root: Path, rows: Rows) -> dict[str, Any]:
    """As img2dataset writes them, but with all captions in the json."""
    (root / "tars").mkdir()
    half = len(rows) // 2
    for number, part in enumerate((rows[:half], rows[half:])):
        with tarfile.open(root / "tars" / f"{number:05d}.tar", "w") as archive:
            for place, (i, name, data, captions) in enumerate(part):
                about = json.dumps({"id": i, "captions": list(captions)}).encode()
                extension = name.rpartition(".")[2]
                for member, content in ((f"{place:09d}.{extension}", data), (f"{place:09d}.json", about)):
                    header = tarfile.TarInfo(member)
                    header.size = len(content)
                    archive.addfile(header, io.BytesIO(content))
    return {"kind": "webdataset", "path": root / "tars", "id_field": "id"}


KINDS: Mapping[str, Callable[[Path, Rows], dict[str, Any]]] = {
    f.__name__: f
    for f in (
        coco, coco_zip, coco_halves, karpathy, jsonl, csv_rows, parquet_bytes, parquet_struct, parquet_paths,
        parquet_unembedded, save_to_disk, tars,
    )
}  # fmt: skip
