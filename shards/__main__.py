"""python -m shards: look at, check and describe a shard folder."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shards import cli
from shards.errors import ConfigError, counted

if TYPE_CHECKING:
    from shards.manifest import Manifest
    from shards.mirror import RemoteShards
    from shards.plan import Machines
    from shards.verify import Finding

MAX_SHOWN = 20  # findings printed per file; --json gives all


def main(argv: Sequence[str]) -> int:
    """Parse, run the command, return its exit code: 0 done, 1 findings or failure, 2 wrong usage."""
    arguments = _parser().parse_args(argv)
    return int(arguments.command(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m shards", description="Look at, check and describe a shard folder.")
    parser.add_argument("--version", action=cli.ShowVersion)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, function: Any, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("folder", type=_location, metavar="DIR", help="folder of shards")
        command.add_argument("--json", action="store_true", help="print JSON for a program")
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.set_defaults(command=function)
        return command

    add("ls", list_shards, "List the shards.")
    show = add("show", show_sample, "Print one sample's JSON, and write its picture with --out.")
    show.add_argument("key", metavar="KEY", help="or the image id in the source, or the name of the file")
    show.add_argument("--out", type=Path, metavar="FILE", help="write the picture there (or into this folder)")
    preview = add("preview", write_preview, "Write a contact sheet: one HTML file with pictures and their captions.")
    preview.add_argument("--split", help="default: each split")
    preview.add_argument("--num", type=int, default=48, metavar="N", help="samples of a split, spread over its shards")
    preview.add_argument("--out", type=Path, default=Path("preview.html"), metavar="FILE", help="default: %(default)s")
    check = add("verify", verify_folder, "Recheck every byte against the manifest; exit code 1 if anything differs.")
    check.add_argument(
        "--quarantine", type=Path, metavar="FILE", help="list there the samples to leave out of training"
    )
    add("stats", print_stats, "Sizes of pictures, captions, flags, and balance of the shards.")
    index = add("index", index_tars, "Make tars that another tool wrote readable here; they keep their bytes.")
    index.add_argument(
        "--split", action="append", metavar="NAME=PATTERN", help="which tars are which split (default train=*.tar)"
    )
    index.add_argument(
        "--captions", choices=("txt", "caption", "json"), help="member with the captions (default: the first there is)"
    )
    add("energon", write_nv_meta, "Write .nv-meta, with which Megatron-Energon reads the folder without preparing it.")
    plan = add("plan", print_plan, "Say what a run over a split would do, and what it would refuse (exit code 2).")
    plan.add_argument("--split", help="default: each split")
    plan.add_argument("--global-batch", type=int, default=64, metavar="B", help="samples per step (default 64)")
    plan.add_argument("--micro-batch", type=int, default=1, metavar="M", help="samples per forward (default 1)")
    plan.add_argument("--gpus", type=int, default=1, metavar="R", help="processes (default 1)")
    plan.add_argument("--nodes", type=int, default=1, metavar="N", help="machines that share the processes (default 1)")
    plan.add_argument("--cache-gb", type=float, metavar="GB", help="data.cache_gb of each, for shards at an address")
    plan.add_argument("--workers", type=int, default=1, metavar="W", help="loader workers per process (default 1)")
    plan.add_argument("--seed", type=int, default=0)
    plan.add_argument("--fragment", type=int, default=16, help="neighbouring samples kept together (default 16)")
    plan.add_argument("--window", type=int, default=16384, help="samples scattered among each other (default 16384)")
    plan.add_argument("--lanes", type=int, default=8, help="parts read side by side (default 8)")
    return parser


def list_shards(arguments: argparse.Namespace) -> int:
    """Table of shards with totals; exit code 1 if files are missing or cut."""
    from dataclasses import asdict

    from shards.present import find_missing

    folder, manifest = _opened(arguments.folder)
    findings, note = find_missing(folder, manifest), _why_no_ranges(folder)
    if arguments.json:
        shards = [s.to_dict() for s in manifest.shards]
        parent = {"parent": manifest.parent} if manifest.parent else {}
        notes = {"notes": [note]} if note else {}
        answer = {"manifest_id": manifest.manifest_id, **parent, "splits": manifest.splits, "shards": shards}
        _print_json({**answer, "findings": [asdict(f) for f in findings], **notes})
        return 1 if findings else 0
    rows = [(s.name, s.split, str(s.num_samples), _size(s.num_bytes), s.sha256[:12]) for s in manifest.shards]
    _print_table(("shard", "split", "samples", "size", "sha256"), rows)
    for split, samples in manifest.splits.items():
        entries = manifest.of_split(split)
        number = f"{counted(samples, 'sample')} in {counted(len(entries), 'shard')}"
        print(f"{split}: {number}, {_size(sum(s.num_bytes for s in entries))}")
    print(f"manifest_id {manifest.manifest_id}")
    if manifest.parent:
        print(f"parent      {manifest.parent}, the first {manifest.num_shards_of(manifest.parent)} of these shards")
    if note:
        print(f"note: training cannot read it from there: {note}")
    if findings:
        shown = _print_findings(findings)
        found = f"{counted(len(findings), 'finding')} in {counted(len(shown), 'file')}"
        print(f"{found}, by names and sizes alone; `verify` reads all; run the build again to restore what differs")
    return 1 if findings else 0


def _why_no_ranges(folder: "Path | RemoteShards") -> str | None:
    from shards.present import why_no_ranges

    return None if isinstance(folder, Path) else why_no_ranges(folder)


def show_sample(arguments: argparse.Namespace) -> int:
    """One sample by key."""

    from shards.atomic import write_file
    from shards.find import find_key, require_index

    if arguments.out and not arguments.out.absolute().parent.is_dir():
        raise ConfigError(
            f"{arguments.out}: there is no folder {arguments.out.parent}; make it, or choose another --out"
        )
    if isinstance(arguments.folder, str):
        from shards.mirror import RemoteShards

        shard, inside, meta, sample = RemoteShards(arguments.folder).find(arguments.key)
    else:
        reader, index = find_key(arguments.folder, _manifest(arguments.folder), arguments.key)
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
    if arguments.out:
        out: Path = arguments.out
        if out.is_dir():
            out = out / f"{sample.key}.{sample.extension}"
        write_file(out, sample.image)
        answer["image"] = str(out)
        if out.suffix.lower().removeprefix(".").replace("jpeg", "jpg") != sample.extension:
            print(f"note: {out} holds a {sample.extension} picture", file=sys.stderr)
    _print_json(answer)
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
    if not out.absolute().parent.is_dir() or out.is_dir():
        raise ConfigError(f"{out}: is a folder, or its folder does not exist; give a file to write with --out")
    if out.absolute().parent.resolve() == arguments.folder.resolve():
        raise ConfigError(f"{out}: lies in the shard folder, which holds nothing but the dataset; choose another --out")
    manifest = _manifest(arguments.folder)
    splits = [arguments.split] if arguments.split else list(manifest.splits)
    sheet = contact_sheet(arguments.folder, manifest, splits, arguments.num)
    write_file(out, sheet.html.encode("utf-8", "backslashreplace"))
    if arguments.json:
        _print_json({"out": str(out), "keys": sheet.keys, "damaged": sheet.damaged})
    else:
        print(f"{out}: {counted(len(sheet.keys), 'sample')}")
        for finding in sheet.damaged:
            print(finding)
    return 1 if sheet.damaged else 0


def verify_folder(arguments: argparse.Namespace) -> int:
    """All findings."""
    from dataclasses import asdict

    from shards.verify import verify

    if isinstance(arguments.folder, str):
        from shards.mirror import RemoteShards

        remote = RemoteShards(arguments.folder)
        manifest, findings = remote.manifest, remote.verify()
    else:
        manifest, findings = _manifest(arguments.folder), verify(arguments.folder)
    if arguments.quarantine:
        _write_quarantine(arguments.quarantine, findings)
    if arguments.json:
        _print_json({"ok": not findings, "findings": [asdict(f) for f in findings]})
        return 1 if findings else 0
    shown = _print_findings(findings)
    samples = f"{counted(sum(manifest.splits.values()), 'sample')} in {counted(len(manifest.shards), 'shard')}"
    if findings:
        advice = [
            "remove what is not in the manifest, or build into another folder"
            if any(f.stranger for f in findings)
            else "",
            "run the build again to restore what differs" if not all(f.stranger for f in findings) else "",
        ]
        found = f"{counted(len(findings), 'finding')} in {counted(len(shown), 'file')}"
        print(f"{found}, {samples}; {'; '.join(filter(None, advice))}")
        return 1
    print(f"ok: {samples}, every byte as the manifest says")
    return 0


def _print_findings(findings: "Sequence[Finding]") -> dict[str, int]:
    """The first findings of each file; how many each has."""
    shown: dict[str, int] = {}
    for finding in findings:
        shown[finding.path] = shown.get(finding.path, 0) + 1
        if shown[finding.path] <= MAX_SHOWN:
            print(finding)
    for path, count in shown.items():
        if count > MAX_SHOWN:
            print(f"{path}: {counted(count - MAX_SHOWN, 'more finding')}; --json lists them")
    return shown


def index_tars(arguments: argparse.Namespace) -> int:
    """Index, sample list and manifest for foreign tars, or all that is wrong with them."""
    from dataclasses import asdict

    from shards.indexing import index_folder

    if isinstance(arguments.folder, str):
        raise ConfigError(f"{arguments.folder}: index writes beside the tars; run it on a local copy and upload that")
    splits = dict(text.partition("=")[::2] for text in arguments.split or ())
    if not all(splits.values()):
        raise ConfigError(f"--split is {' '.join(arguments.split)}, expected NAME=PATTERN, such as train=train-*.tar")
    manifest, findings = index_folder(arguments.folder, splits, arguments.captions)
    if arguments.json:
        ids = {} if findings else {"manifest_id": manifest.manifest_id, "splits": manifest.splits}
        _print_json({"ok": not findings, **ids, "findings": [asdict(f) for f in findings]})
        return 1 if findings else 0
    if findings:
        shown = _print_findings(findings)
        found = f"{counted(len(findings), 'finding')} in {counted(len(shown), 'tar')}"
        print(
            f"{found}, no manifest was written; mend or remove them; where single pictures or captions are wrong, a build with "
            "source.kind=webdataset rejects those and writes shards of its own"
        )
        return 1
    samples = ", ".join(f"{split} {counted(number, 'sample')}" for split, number in manifest.splits.items())
    captions = manifest.settings["indexed"]["captions"]
    print(f"indexed: {samples} in {counted(len(manifest.shards), 'shard')}, captions from .{captions}")
    return 0


def write_nv_meta(arguments: argparse.Namespace) -> int:
    """The files that Energon asks for."""
    from shards.energon import write_energon

    if isinstance(arguments.folder, str):
        raise ConfigError(f"{arguments.folder}: energon writes into the folder; run it on a local copy and upload that")
    written = [str(path) for path in write_energon(arguments.folder)]
    if arguments.json:
        _print_json({"written": written})
    else:
        print(f"wrote {', '.join(written)}")
    return 0


def _write_quarantine(path: Path, findings: Sequence["Finding"]) -> None:
    from shards.quarantine import Quarantine

    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--quarantine is {path}: there is no folder {path.absolute().parent}; make it first")
    quarantine = Quarantine.of(findings)
    quarantine.save(path)
    rest = quarantine.unexpected(findings)
    number = counted(len(quarantine.samples), "sample")
    print(f"{path}: {number} to leave out of training with data.quarantine={path}", file=sys.stderr)
    if rest:
        print(
            f"{path}: does not cure {counted(len(rest), 'other finding')}, first: {rest[0]}; build again to restore them",
            file=sys.stderr,
        )


def print_stats(arguments: argparse.Namespace) -> int:
    """Statistics per split."""
    from shards.stats import folder_stats

    if isinstance(arguments.folder, str):
        raise ConfigError(f"{arguments.folder}: stats reads every sample; copy the folder here first")
    _manifest(arguments.folder)
    stats = folder_stats(arguments.folder)
    if arguments.json:
        _print_json(stats)
        return 0
    for split, values in stats["splits"].items():
        number = f"{counted(values['samples'], 'sample')}, {counted(values['captions'], 'caption')}"
        print(f"{split}: {number}, {_size(values['bytes'])}")
        for name in ("extensions", "flags"):
            counts = ", ".join(f"{key} {count}" for key, count in values[name].items())
            print(f"{name}: {counts or 'none'}")
        rows = [
            (name, *(_short(spread[c]) for c in ("min", "p5", "median", "mean", "p95", "max")))
            for name, spread in values["distributions"].items()
            if spread
        ]
        _print_table(("", "min", "5 %", "median", "mean", "95 %", "max"), rows)
        print()
    return 0


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
    folder, manifest = _opened(arguments.folder)
    require_present(folder, manifest, str(arguments.folder if isinstance(folder, Path) else folder.remote))
    no_ranges = _why_no_ranges(folder)
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
        _print_json({s: {**p.facts, "refused": p.refusals, "notes": p.notes} for s, p in plans.items()})
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


def _location(text: str) -> Path | str:
    from shards.remote import is_remote

    return text if is_remote(text) else Path(text)


def _opened(folder: Path | str) -> "tuple[Path | RemoteShards, Manifest]":
    from shards.manifest import Manifest

    if isinstance(folder, str):
        from shards.mirror import RemoteShards

        remote = RemoteShards(folder)
        return remote, remote.manifest
    return folder, Manifest.load(folder)


def _manifest(folder: Path | str) -> "Manifest":
    return _opened(folder)[1]


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 or value == int(value) else f"{value:.2f}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:.2f} GB"


def _print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  ".join(cells).rstrip())


def _print_json(value: Any) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding)
    except UnicodeEncodeError:  # not a UTF-8 terminal, or half a character pair in a caption
        text = json.dumps(value, indent=1)
    print(text)


if __name__ == "__main__":
    sys.exit(cli.run(main))
