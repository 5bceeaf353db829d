"""manifest.json: the ordered list of shards that is the dataset, published last."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from shards.atomic import write_file
from shards.errors import ConfigError, FormatError, ShardsError, counted, describe
from shards.sample import canonical_json

NAME = "manifest.json"
FORMAT = "xctrain-shards"
VERSION = 1
RESTORE = "run the build again to restore it"
_SHARD_NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]*\.tar")  # no slash: it stays in the folder
_ID = re.compile(r"[0-9a-f]{64}")
_SPLIT_NAME = re.compile(r"[0-9A-Za-z_-]+")


@dataclass(frozen=True)
class ShardEntry:
    """What the manifest says of one shard; hashes are sha256 in hex, ``num_bytes`` is the tar's size.

    ``foreign``: another tool wrote the tar, `python -m shards index` the files beside it; see foreign.py.
    """

    name: str
    split: str
    num_samples: int
    num_bytes: int
    sha256: str
    idx_sha256: str
    meta_sha256: str
    foreign: bool = False

    def __post_init__(self) -> None:
        if not _SHARD_NAME.fullmatch(self.name):
            raise ShardsError(f"shard name {self.name!r}: expected SPLIT-NNNNNN.tar, without folders")
        if not _SPLIT_NAME.fullmatch(self.split):
            raise ShardsError(f"split {self.split!r} of {self.name}: expected letters, digits, _ or -")

    def to_dict(self) -> dict[str, Any]:
        """Its fields; without ``foreign`` where the build wrote the tar, so that such a dataset keeps its id."""
        return {name: value for name, value in asdict(self).items() if name != "foreign" or value}

    @property
    def idx_name(self) -> str:
        """File name of the shard's index."""
        return f"{self.name}.idx"

    @property
    def meta_name(self) -> str:
        """File name of the shard's sample list."""
        return f"{self.name.removesuffix('.tar')}.meta.jsonl"


@dataclass(frozen=True)
class Addition:
    """Shards that were appended to a published dataset: its manifest_id, and the settings that determine their bytes."""

    parent: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """The shards of a dataset in order, and the build settings that determine their bytes.

    ``additions`` is what became of it since it was built, oldest first; each began with the shards of its parent.
    """

    shards: tuple[ShardEntry, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    additions: tuple[Addition, ...] = ()

    @property
    def manifest_id(self) -> str:
        """Names the dataset: sha256 over the ordered shards, hashes included. Order and position are relative to it."""
        return hashlib.sha256(canonical_json([VERSION, [s.to_dict() for s in self.shards]])).hexdigest()

    @property
    def parent(self) -> str | None:
        """The manifest_id of the dataset that this one was added to; None if it was built in one go."""
        return self.additions[-1].parent if self.additions else None

    def num_shards_of(self, manifest_id: str) -> int | None:
        """How many leading shards are the dataset of that id, as an ancestor's are; None if no such number is."""
        digest = hashlib.sha256(b"[%d,[" % VERSION)
        for number, shard in enumerate(self.shards):
            digest.update(b"," * bool(number) + canonical_json(shard.to_dict()))
            prefix = digest.copy()
            prefix.update(b"]]")
            if prefix.hexdigest() == manifest_id:
                return number + 1
        return None

    @property
    def splits(self) -> dict[str, int]:
        """Number of samples per split, in the order of the shards."""
        totals: dict[str, int] = {}
        for shard in self.shards:
            totals[shard.split] = totals.get(shard.split, 0) + shard.num_samples
        return totals

    def of_split(self, split: str) -> tuple[ShardEntry, ...]:
        """The shards of one split, in order.

        Raises:
            ConfigError: there is no such split; those there are, are named.
        """
        shards = tuple(s for s in self.shards if s.split == split)
        if not shards:
            known = ", ".join(f"{name} ({counted(total, 'sample')})" for name, total in self.splits.items()) or "none"
            raise ConfigError(f"split {split!r} is not in the dataset; it has: {known}")
        return shards

    def save(self, folder: Path) -> None:
        """Publish the manifest, which makes ``folder`` a dataset. Call it after every shard is in place."""
        write_file(folder / NAME, self.to_json())

    def to_json(self) -> bytes:
        """The bytes of manifest.json; a wids reader finds its own fields in it."""
        content = {
            "format": FORMAT,
            "format_version": VERSION,
            "manifest_id": self.manifest_id,
            "splits": self.splits,
            "settings": self.settings,
            **({"parent": self.parent, "additions": [asdict(a) for a in self.additions]} if self.additions else {}),
            "shards": [s.to_dict() for s in self.shards],
            "wids_version": 1,
            "shardlist": [
                {"url": s.name, "nsamples": s.num_samples, "filesize": s.num_bytes, "dataset": s.split}
                for s in self.shards
            ],
        }
        return (json.dumps(content, indent=1, allow_nan=False) + "\n").encode("ascii")

    @staticmethod
    def load(folder: Path) -> "Manifest":
        """The manifest of ``folder``.

        Raises:
            ConfigError: the folder is absent or holds no manifest.
            FormatError: the manifest is damaged, edited by hand, or of a version that this code does not know.
        """
        path = folder / NAME
        try:
            raw = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(f"{folder}: {_why_no_manifest(folder)}", path=folder) from None
        except OSError as error:
            raise FormatError(describe(error), path=path) from None
        return Manifest.parse(raw, path)

    @staticmethod
    def parse(raw: bytes, path: Path | str) -> "Manifest":
        """The manifest in ``raw``, which was read from ``path``. Raises FormatError, as ``load`` does."""
        try:
            content = json.loads(raw)
        except ValueError as error:
            raise FormatError(f"{path}: is not valid JSON: {error}; {RESTORE}", path=path) from None
        return _parse(path, content)


def _why_no_manifest(folder: Path) -> str:
    if not folder.exists():
        return "there is no such folder; build it with `make shards SOURCE=... OUT=...`, or give the folder of a build"
    if not folder.is_dir():
        return f"is a file, expected the folder that holds {NAME}"
    if any(folder.glob("*.tar")) or any(folder.glob(".*.tmp")):
        return (
            f"has no {NAME} yet, so its build did not end; run the build again, it goes on where it stopped; or, if another "
            f"tool wrote the tars, run `python -m shards index {folder}`"
        )
    return f"has no {NAME}, so it is not a shard folder; give the folder that a build wrote to"


def _parse(path: Path | str, content: Any) -> Manifest:
    if not isinstance(content, dict):
        raise FormatError(f"{path}: holds a {type(content).__name__}, expected an object; {RESTORE}", path=path)
    if (found := content.get("format")) != FORMAT:
        raise FormatError(f"{path}: its format is {found!r}, expected {FORMAT!r}; another tool wrote it", path=path)
    if content.get("format_version") != VERSION:
        raise FormatError(
            f"{path}: has format version {content.get('format_version')!r}, this xctrain reads {VERSION}; "
            "use the xctrain that wrote it, or build again",
            path=path,
        )
    try:
        shards = tuple(_entry(s) for s in content["shards"])
        settings, stored_id = dict(content["settings"]), content["manifest_id"]
        additions = tuple(_addition(a) for a in content.get("additions", ()))
    except (KeyError, TypeError, ValueError, ShardsError) as error:
        detail = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise FormatError(f"{path}: {detail}; {RESTORE}", path=path) from None
    manifest = Manifest(shards, settings, additions)
    if content.get("parent") != manifest.parent:
        raise FormatError(
            f"{path}: parent is {content.get('parent')!r}, its additions give {manifest.parent!r}; it was changed after the "
            f"build, {RESTORE}",
            path=path,
        )
    if stored_id != manifest.manifest_id:
        raise FormatError(
            f"{path}: manifest_id is {stored_id}, its shards give {manifest.manifest_id}; "
            f"it was changed after the build, {RESTORE}",
            path=path,
        )
    return manifest


def _addition(values: Mapping[str, Any]) -> Addition:
    if not isinstance(values["parent"], str) or not _ID.fullmatch(values["parent"]):
        raise ValueError(f"parent of an addition is {values['parent']!r}, expected a manifest_id")
    return Addition(values["parent"], dict(values["settings"]))


def _entry(values: Mapping[str, Any]) -> ShardEntry:
    for name in ("name", "split", "sha256", "idx_sha256", "meta_sha256"):
        if not isinstance(values[name], str):
            raise ValueError(f"{name} of shard {values['name']!r} is {values[name]!r}, expected a text")
    for name in ("num_samples", "num_bytes"):
        if type(values[name]) is not int or values[name] < 0:
            raise ValueError(f"{name} of shard {values['name']!r} is {values[name]!r}, expected a count")
    if not isinstance(foreign := values.get("foreign", False), bool):
        raise ValueError(f"foreign of shard {values['name']!r} is {foreign!r}, expected true or nothing")
    return ShardEntry(**{spec.name: values[spec.name] for spec in fields(ShardEntry) if spec.name in values})
