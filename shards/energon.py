"""`python -m shards energon`: the folder .nv-meta, with which Megatron-Energon reads a shard folder without preparing it.

Each split is a part of that name; a sample is a CaptioningSample: picture and first caption. What `energon prepare` writes
besides is left out, as only joined datasets and access by key need it: index.sqlite and index.uuid.
Source: the files that megatron-energon 7.4.1 writes; tests/golden/compare_energon.py reads with it what is written here.
"""

import json
from pathlib import Path
from typing import Any

from shards.atomic import write_file
from shards.errors import ConfigError
from shards.manifest import Manifest
from shards.places import require_folder
from shards.present import require_present
from shards.sample import EXTENSIONS

FOLDER = ".nv-meta"
ENERGON_VERSION = "7.4.1"  # whose files these are
_CAPTION_IN_JSON = "json[captions][0],json[caption]"  # the first of the two that there is


def write_energon(folder: Path) -> list[Path]:
    """Write the folder's .nv-meta; the files that were written. YAML is written as JSON, which it includes.

    Raises:
        ConfigError: not a shard folder, or Energon has prepared it already, maybe in another way.
        FormatError: a shard is missing or cut.
    """
    manifest = Manifest.load(folder)
    require_present(folder, manifest, str(folder))
    if (folder / FOLDER / "index.sqlite").exists():
        raise ConfigError(f"{folder / FOLDER}: Energon's own prepare wrote it; move it away first", path=folder)
    captions = manifest.settings.get("indexed", {}).get("captions", "json")
    content: dict[str, Any] = {
        ".info.json": {
            "energon_version": ENERGON_VERSION,
            "shard_counts": {shard.name: shard.num_samples for shard in manifest.shards},
        },
        "split.yaml": {
            "split_parts": {split: [s.name for s in manifest.of_split(split)] for split in manifest.splits},
            "exclude": [],
        },
        "dataset.yaml": {
            "sample_type": {"__module__": "megatron.energon", "__class__": "CaptioningSample"},
            "field_map": {
                "image": ",".join(EXTENSIONS),
                "caption": _CAPTION_IN_JSON if captions == "json" else captions,
            },
        },
    }
    require_folder(folder, "DIR")
    (folder / FOLDER).mkdir(exist_ok=True)
    for name, values in content.items():
        write_file(folder / FOLDER / name, (json.dumps(values, indent=1) + "\n").encode("ascii"))
    return [folder / FOLDER / name for name in content]
