"""plan: what a run over a folder would do."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shards.commands.folder import open_folder, why_no_ranges
from shards.commands.output import print_json
from shards.errors import ConfigError

if TYPE_CHECKING:
    from shards.manifest import Manifest
    from shards.plan import Machines


def print_plan(arguments: argparse.Namespace) -> int:
    """Facts, notes and refusals per split."""
    from dataclasses import replace

    from shards.order import OrderSettings
    from shards.plan import make_plan
    from shards.present import require_present

    for name, least in (
        ("gpus", 1),
        ("nodes", 1),
        ("workers", 0),
        ("global_batch", 1),
        ("micro_batch", 1),
        ("seed", 0),
    ):
        if (value := getattr(arguments, name)) < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}, expected {least} or more")
    folder, manifest = open_folder(arguments.folder)
    require_present(folder, manifest, str(arguments.folder if isinstance(folder, Path) else folder.remote))
    no_ranges = why_no_ranges(folder)
    settings = OrderSettings(arguments.seed, arguments.fragment, arguments.window, arguments.lanes)
    splits = [arguments.split] if arguments.split else list(manifest.splits)
    plans = {
        split: make_plan(
            [s.num_samples for s in manifest.of_split(split)],
            settings,
            arguments.global_batch,
            arguments.micro_batch,
            arguments.gpus,
            arguments.workers,
            _machines(arguments, manifest, split),
        )
        for split in splits
    }
    if no_ranges:
        plans = {split: replace(plan, refusals=(no_ranges, *plan.refusals)) for split, plan in plans.items()}
    if arguments.json:
        print_json({s: {**p.facts, "refused": p.refusals, "notes": p.notes} for s, p in plans.items()})
    else:
        for split, plan in plans.items():
            print(f"{split}:")
            for name, value in _flat(plan.facts):
                print(f"  {name:<42} {value}")
            for note in plan.notes:
                print(f"  note: {note}")
            for refusal in plan.refusals:
                print(f"  refused: {refusal}")
    return 2 if any(plan.refusals for plan in plans.values()) else 0


def _machines(arguments: argparse.Namespace, manifest: "Manifest", split: str) -> "Machines | None":
    """Of what is read from an address, or would be; reads the indexes of the split."""
    if arguments.nodes == 1 and arguments.cache_gb is None:
        return None
    import tempfile

    from shards.cache import NodeCache
    from shards.index import read_index
    from shards.plan import Machines
    from shards.reader import SplitReader
    from shards.schedule import Fragments

    with tempfile.TemporaryDirectory(prefix="xctrain-") as temporary:
        if isinstance(arguments.folder, str):
            cache = NodeCache(arguments.folder, Path(temporary), manifest)
            cache.fetch_lists(split)
            reader = SplitReader(cache, split)
        else:
            reader = SplitReader(arguments.folder, split, manifest)
        folder, shards = reader.folder, reader.shards
        offsets = [read_index(folder / e.idx_name, e.num_samples, e.num_bytes, e.foreign) for e in shards]
        lists = sum((folder / name).stat().st_size for e in shards for name in (e.idx_name, e.meta_name))
    return Machines(Fragments.cut(offsets, arguments.fragment), lists, arguments.nodes, arguments.cache_gb)


def _flat(facts: dict[str, Any]) -> list[tuple[str, str]]:
    lines = []
    for name, value in facts.items():
        if isinstance(value, dict):
            lines += _flat({f"{name}: {key}": inner for key, inner in value.items()})
        elif isinstance(value, list):
            lines.append((name, ", ".join(map(str, value)) or "none"))
        else:
            lines.append((name, f"{value:.2f}" if isinstance(value, float) else str("-" if value is None else value)))
    return lines
