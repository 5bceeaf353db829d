"""Planning holds a row of fixed width for each record, not the record."""

import json
import subprocess
import sys

PLAN = """
import resource, sys
from pipelines.build import Build
from pipelines.config import BuildConfig
source = {"kind": "jsonl", "path": sys.argv[1], "id_field": "id"}
values = {"source": source, "out": sys.argv[2], "filters": {"duplicates": False}, "build": {"processes": 1}}
with Build(BuildConfig.model_validate(values)) as job:
    todo = job.plan()
    assert sum(len(piece.numbers) for piece in job.planned.slices) == int(sys.argv[3]), todo
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def peak_bytes(folder, count, pictures):
    (folder / "a.jpg").write_bytes(pictures.encode(pictures.photo(1)))
    with (folder / f"{count}.jsonl").open("w") as lines:
        for i in range(count):
            captions = [f"caption {j} of picture number {i}, as long as captions are" for j in range(5)]
            lines.write(json.dumps({"id": f"record-{i}", "image": "a.jpg", "captions": captions}) + "\n")
    arguments = [folder / f"{count}.jsonl", folder / f"out-{count}", count]
    done = subprocess.run(
        [sys.executable, "-c", PLAN, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_a_record_more_costs_planning_a_few_hundred_bytes(tmp_path, pictures):
    few, many = (peak_bytes(tmp_path, count, pictures) for count in (5_000, 45_000))
    assert (many - few) / 40_000 < 500  # the text of such a record alone is 450 bytes, as Python objects over 2,000
