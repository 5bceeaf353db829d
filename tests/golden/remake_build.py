"""Writes the expected manifest and rejections of a small build anew: python tests/golden/remake_build.py

A difference to what is committed is a break (SHARD FORMAT in the changelog): a rebuild of an old dataset would no longer
give its bytes. The pictures are fixed as bytes, because encoders change between versions.
"""

import base64
import json
import tempfile
from pathlib import Path
from typing import Any

from pipelines.config import BuildConfig
from pipelines.run import run_plain

HERE = Path(__file__).parent
CAPTIONS = {
    "1": ["a picture", " a  picture\n", "caf\u00e9", "cafe\u0301"],
    "2": ["the second one"],
    "3": ["never seen"],
    "4": ["...", ""],
    "5": ["said of the twin"],
    "6": ["cut short"],
    "7": ["the third one", None],
}


def build(pictures: list[str], folder: Path) -> dict[str, Any]:
    """What a build makes of seven records around three pictures."""
    first, second, third = map(base64.b64decode, pictures)
    files = {"1": first, "2": second, "4": third, "5": first, "6": second[:-40], "7": third}
    (folder / "train2017").mkdir(parents=True)
    for name, data in files.items():
        (folder / "train2017" / f"{name}.jpg").write_bytes(data)
    content = {
        "images": [{"id": int(i), "file_name": f"{i}.jpg", "license": 1} for i in CAPTIONS],
        "annotations": [
            {"id": 10 * int(i) + j, "image_id": int(i), "caption": caption}
            for i, captions in CAPTIONS.items()
            for j, caption in enumerate(captions)
        ],
    }
    (folder / "captions_train2017.json").write_text(json.dumps(content))
    settings = {"records_per_shard": 4, "processes": 1, "max_reject_share": 1}
    run_plain(BuildConfig.model_validate({"source": folder, "out": folder / "out", "build": settings}))
    return {
        "manifest": json.loads((folder / "out" / "manifest.json").read_text()),
        "rejects": list(map(json.loads, (folder / "out" / "rejects.jsonl").read_text().splitlines())),
    }


if __name__ == "__main__":
    path = HERE / "build.json"
    pictures = json.loads(path.read_text())["pictures"]
    with tempfile.TemporaryDirectory() as folder:
        path.write_text(json.dumps({"pictures": pictures, **build(pictures, Path(folder))}, indent=1) + "\n")
