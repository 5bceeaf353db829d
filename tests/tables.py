"""Rows as a file of each kind of table, and what a source makes of them."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.config import BuildConfig
from pipelines.records import Record
from pipelines.sources import open_sources

KINDS = ("jsonl", "csv", "parquet")


def source_of(kind: str, rows: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, Any]:
    """Rows as ``pairs.KIND`` in a folder."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    if kind == "jsonl":
        (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    elif kind == "csv":
        with (folder / "pairs.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)
    else:
        pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), folder / "pairs.parquet")
    return {"kind": kind, "path": folder / f"pairs.{kind}"}


def read(source: Mapping[str, Any], **sections: Any) -> list[Record]:
    """The records of the one source."""
    (origin,) = open_sources(BuildConfig.model_validate({"source": source, "out": "o", "held_out": "none", **sections}))
    return list(origin.source.records())
