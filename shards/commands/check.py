"""verify: recheck a folder, and list what to leave out of training."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shards.commands.folder import open_manifest
from shards.commands.output import print_findings, print_json
from shards.errors import counted
from shards.places import require_file

if TYPE_CHECKING:
    from shards.verify import Finding


def verify_folder(arguments: argparse.Namespace) -> int:
    """All findings."""
    from dataclasses import asdict

    from shards.verify import verify

    if arguments.quarantine:
        require_file(arguments.quarantine, "--quarantine")
    if isinstance(arguments.folder, str):
        from shards.mirror import RemoteShards

        remote = RemoteShards(arguments.folder)
        manifest, findings = remote.manifest, remote.verify()
    else:
        manifest, findings = open_manifest(arguments.folder), verify(arguments.folder)
    if arguments.quarantine:
        _write_quarantine(arguments.quarantine, findings)
    if arguments.json:
        print_json({"ok": not findings, "findings": [asdict(f) for f in findings]})
        return 1 if findings else 0
    shown = print_findings(findings)
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


def _write_quarantine(path: Path, findings: Sequence["Finding"]) -> None:
    from shards.quarantine import Quarantine

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
