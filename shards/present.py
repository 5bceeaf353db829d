"""What names and sizes alone tell of a shard folder: which files are missing or cut. None of them is read."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shards.errors import FormatError, counted
from shards.manifest import RESTORE, Manifest
from shards.mirror import RemoteShards
from shards.remote import NoRangesError
from shards.verify import Finding

AT_ONCE = 8  # requests to a web server, which has no list of its files
RANGE = 512  # bytes asked for


def find_missing(folder: Path | RemoteShards, manifest: Manifest) -> list[Finding]:
    """A finding for each file of the manifest that is not there, or has another size than it can have."""
    sizes = _sizes_of(folder, manifest) if isinstance(folder, RemoteShards) else _sizes_in(folder)
    findings = []
    for entry in manifest.shards:
        for name, expected in (
            (entry.name, entry.num_bytes),
            (entry.idx_name, 8 * (entry.num_samples + 1)),
            (entry.meta_name, None),
        ):
            size = sizes.get(name)
            if size is None:
                findings.append(Finding(name, None, "is missing, the manifest lists its shard"))
            elif size >= 0 and expected is not None and size != expected:
                findings.append(Finding(name, None, f"has {size} bytes, the manifest says {expected}"))
            elif size >= 0 and expected is None and size % max(1, entry.num_samples):
                findings.append(Finding(name, None, f"has {size} bytes, expected {entry.num_samples} equal lines"))
    return findings


def require_present(folder: Path | RemoteShards, manifest: Manifest, where: str) -> None:
    """Raises FormatError: a file is missing or cut."""
    if findings := find_missing(folder, manifest):
        raise FormatError(
            f"{where}: {findings[0]} ({counted(len(findings), 'finding')} in all, without reading any file); {RESTORE}"
        )


def why_no_ranges(shards: RemoteShards) -> str | None:
    """What training from this address would be refused for, if its server sends whole files only."""
    first = next((shard for shard in shards.manifest.shards if shard.num_bytes >= 2 * RANGE), None)
    if first is None:
        return None
    try:  # not from byte 0, where the start of a whole file would do
        shards.remote.read_range(first.name, RANGE, 2 * RANGE, first.num_bytes)
    except FileNotFoundError:
        return None  # which is another finding
    except NoRangesError as error:
        return str(error)
    return None


def _sizes_in(folder: Path) -> Mapping[str, int]:
    with os.scandir(folder) as entries:
        return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}


def _sizes_of(shards: RemoteShards, manifest: Manifest) -> Mapping[str, int]:
    if not shards.remote.location.startswith("http"):
        return {name: found.num_bytes for name, found in shards.remote.list().items()}
    names = [name for entry in manifest.shards for name in (entry.name, entry.idx_name, entry.meta_name)]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        found = zip(names, threads.map(shards.remote.find, names), strict=True)
        return {name: each.num_bytes for name, each in found if each is not None}
