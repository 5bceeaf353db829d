"""index, energon: tars that another tool wrote, and files that another tool reads."""

import argparse

from shards.commands.output import print_findings, print_json
from shards.errors import ConfigError, counted


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
        print_json({"ok": not findings, **ids, "findings": [asdict(f) for f in findings]})
        return 1 if findings else 0
    if findings:
        shown = print_findings(findings)
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
        print_json({"written": written})
    else:
        print(f"wrote {', '.join(written)}")
    return 0
