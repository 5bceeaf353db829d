"""The folder that a command is about: on this machine, or at an address."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shards.manifest import Manifest
    from shards.mirror import RemoteShards


def location(text: str) -> Path | str:
    """An address as text, everything else as a path."""
    from shards.remote import is_remote

    return text if is_remote(text) else Path(text)


def open_folder(folder: Path | str) -> "tuple[Path | RemoteShards, Manifest]":
    """The folder, opened where it is at an address, and its manifest."""
    from shards.manifest import Manifest

    if isinstance(folder, str):
        from shards.mirror import RemoteShards

        remote = RemoteShards(folder)
        return remote, remote.manifest
    return folder, Manifest.load(folder)


def open_manifest(folder: Path | str) -> "Manifest":
    """The manifest alone."""
    return open_folder(folder)[1]


def why_no_ranges(folder: "Path | RemoteShards") -> str | None:
    """Why training cannot read it from its address; None where it can, and for a folder on this machine."""
    from shards import present

    return None if isinstance(folder, Path) else present.why_no_ranges(folder)
