"""ls, show, preview, stats: look at a folder and its samples."""

import argparse
import sys
from pathlib import Path

from shards.commands.folder import open_folder, open_manifest, why_no_ranges
from shards.commands.output import print_findings, print_json, print_table, size_text
from shards.errors import ConfigError, counted
from shards.places import require_file, require_folder


def list_shards(arguments: argparse.Namespace) -> int:
    """Table of shards with totals; exit code 1 if files are missing or cut."""
    from dataclasses import asdict

    from shards.present import find_missing

    folder, manifest = open_folder(arguments.folder)
    findings, note = find_missing(folder, manifest), why_no_ranges(folder)
    if arguments.json:
        shards = [s.to_dict() for s in manifest.shards]
        parent = {"parent": manifest.parent} if manifest.parent else {}
        notes = {"notes": [note]} if note else {}
        answer = {"manifest_id": manifest.manifest_id, **parent, "splits": manifest.splits, "shards": shards}
        print_json({**answer, "findings": [asdict(f) for f in findings], **notes})
        return 1 if findings else 0
    rows = [(s.name, s.split, str(s.num_samples), size_text(s.num_bytes), s.sha256[:12]) for s in manifest.shards]
    print_table(("shard", "split", "samples", "size", "sha256"), rows)
    for split, samples in manifest.splits.items():
        entries = manifest.of_split(split)
        number = f"{counted(samples, 'sample')} in {counted(len(entries), 'shard')}"
        print(f"{split}: {number}, {size_text(sum(s.num_bytes for s in entries))}")
    print(f"manifest_id {manifest.manifest_id}")
    if manifest.parent:
        print(f"parent      {manifest.parent}, the first {manifest.num_shards_of(manifest.parent)} of these shards")
    if note:
        print(f"note: training cannot read it from there: {note}")
    if findings:
        shown = print_findings(findings)
        found = f"{counted(len(findings), 'finding')} in {counted(len(shown), 'file')}"
        print(f"{found}, by names and sizes alone; `verify` reads all; run the build again to restore what differs")
    return 1 if findings else 0


def show_sample(arguments: argparse.Namespace) -> int:
    """One sample by key."""

    from shards.atomic import write_file
    from shards.find import find_key, require_index

    out: Path | None = arguments.out
    if out:
        require_folder(out, "--out") if out.is_dir() else require_file(out, "--out")
    if isinstance(arguments.folder, str):
        from shards.mirror import RemoteShards

        shard, inside, meta, sample = RemoteShards(arguments.folder).find(arguments.key)
    else:
        reader, index = find_key(arguments.folder, open_manifest(arguments.folder), arguments.key)
        shard, inside = reader.locate(index)
        require_index(arguments.folder, shard)
        meta, sample = reader.meta(index), reader.read(index)
    answer = {
        "key": sample.key,
        "split": shard.split,
        "shard": shard.name,
        "sample": inside,
        "parts": [part._asdict() for part in meta.parts],
        "flags": meta.flags,
        "json": sample.meta,
    }
    if out:
        if out.is_dir():
            out = out / f"{sample.key}.{sample.extension}"
        write_file(out, sample.image)
        answer["image"] = str(out)
        if out.suffix.lower().removeprefix(".").replace("jpeg", "jpg") != sample.extension:
            print(f"note: {out} holds a {sample.extension} picture", file=sys.stderr)
    print_json(answer)
    return 0


def write_preview(arguments: argparse.Namespace) -> int:
    """The contact sheet; exit code 1 if a sample on it is damaged."""
    from shards.atomic import write_file
    from shards.preview import contact_sheet

    out: Path = arguments.out
    if arguments.num < 1:
        raise ConfigError(f"--num is {arguments.num}, expected 1 or more")
    if isinstance(arguments.folder, str):
        raise ConfigError(f"{arguments.folder}: preview reads samples of every shard; copy the folder here first")
    require_file(out, "--out")
    if out.absolute().parent.resolve() == arguments.folder.resolve():
        raise ConfigError(f"{out}: lies in the shard folder, which holds nothing but the dataset; choose another --out")
    manifest = open_manifest(arguments.folder)
    splits = [arguments.split] if arguments.split else list(manifest.splits)
    sheet = contact_sheet(arguments.folder, manifest, splits, arguments.num)
    write_file(out, sheet.html.encode("utf-8", "backslashreplace"))
    if arguments.json:
        print_json({"out": str(out), "keys": sheet.keys, "damaged": sheet.damaged})
    else:
        print(f"{out}: {counted(len(sheet.keys), 'sample')}")
        for finding in sheet.damaged:
            print(finding)
    return 1 if sheet.damaged else 0


def print_stats(arguments: argparse.Namespace) -> int:
    """Statistics per split."""
    from shards.stats import folder_stats

    if isinstance(arguments.folder, str):
        raise ConfigError(f"{arguments.folder}: stats reads every sample; copy the folder here first")
    open_manifest(arguments.folder)
    stats = folder_stats(arguments.folder)
    if arguments.json:
        print_json(stats)
        return 0
    for split, values in stats["splits"].items():
        number = f"{counted(values['samples'], 'sample')}, {counted(values['captions'], 'caption')}"
        print(f"{split}: {number}, {size_text(values['bytes'])}")
        for name in ("extensions", "flags"):
            counts = ", ".join(f"{key} {count}" for key, count in values[name].items())
            print(f"{name}: {counts or 'none'}")
        rows = [
            (name, *(_short(spread[c]) for c in ("min", "p5", "median", "mean", "p95", "max")))
            for name, spread in values["distributions"].items()
            if spread
        ]
        print_table(("", "min", "5 %", "median", "mean", "95 %", "max"), rows)
        print()
    return 0


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 or value == int(value) else f"{value:.2f}"
