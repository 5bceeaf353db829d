"""WebDataset tars, ours or anybody's: members that share a name up to its first dot are one sample."""

import json
import os
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pipelines.config import SourceConfig
from pipelines.images import ImagesSpec
from pipelines.records import ImageId, Record
from pipelines.sources import files
from shards.errors import ConfigError, FormatError
from shards.foreign import split_name
from shards.manifest import NAME as MANIFEST
from shards.manifest import Manifest

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "jp2", "avif")
_EXPECTED = "an uncompressed tar of samples, each an image and a txt or json member beside it"


@dataclass
class _Sample:
    name: str
    members: dict[str, tarfile.TarInfo] = field(default_factory=dict)  # by extension, in small letters


class WebdatasetSource:
    """Tars are read one after the other; only texts are taken out of them, images stay where they are."""

    kind = "webdataset"

    def __init__(self, config: SourceConfig) -> None:
        self.counts: Counter[str] = Counter()
        self._config = config
        self._splits: dict[str, str] = {}
        self._tars = [os.path.abspath(tar) for tar in self._find(config)]  # noqa: PTH100
        self._folder = os.path.commonpath([os.path.dirname(tar) for tar in self._tars])  # noqa: PTH120
        self.location = self._folder if len(self._tars) > 1 else self._tars[0]
        self.images: ImagesSpec = {"kind": "tars", "folder": self._folder}
        if not any(True for _ in self._samples(self._tars[0])):
            raise ConfigError(f"{self._tars[0]}: holds no samples; expected {_EXPECTED}", path=self._tars[0])

    def _find(self, config: SourceConfig) -> list[str]:
        """All tars; of a shard folder of ours those that its manifest names, whose splits are known."""
        location = files.listed(config.path)
        if len(location) > 1 or not (Path(location[0]) / MANIFEST).exists():
            return files.find_files(config, (".tar",))
        folder = Path(location[0])
        try:
            shards = Manifest.load(folder).shards
        except FormatError:  # another tool's manifest.json
            return files.find_files(config, (".tar",))
        for shard in shards:
            path = folder / shard.name
            found = path.stat().st_size if path.exists() else None
            if found != shard.num_bytes:
                what = "is missing" if found is None else f"has {found} bytes"
                raise ConfigError(
                    f"{path}: {what}, the manifest says {shard.num_bytes} bytes; run `python -m shards verify {folder}`",
                    path=path,
                )
            self._splits[os.path.abspath(path)] = shard.split  # noqa: PTH100
        if others := sorted({os.path.abspath(tar) for tar in folder.glob("*.tar")} - {*self._splits}):  # noqa: PTH100
            raise ConfigError(
                f"{others[0]}: is not in the manifest of {folder}, nor are {len(others) - 1} other tars there; index the "
                f"folder again, give its tars by a pattern ({folder}/*.tar), or move what does not belong there away",
                path=others[0],
            )
        return list(self._splits)

    def records(self) -> Iterator[Record]:
        """In the order of the tars and their samples."""
        for tar in self._tars:
            name = os.path.relpath(tar, self._folder)
            split = self._splits.get(tar) or files.split_of_file(name)
            with Path(tar).open("rb") as file:
                for sample in self._samples(tar):
                    yield self._record(tar, name, split, sample, file)

    def _record(self, tar: str, name: str, split: str | None, sample: _Sample, file: BinaryIO) -> Record:
        image = self._image(tar, sample)
        place = f"{name}:{image.offset_data}:{image.size}" if image else f"{name}::"
        about = self._json(sample, file)
        if isinstance(about.get("source"), dict) and {"image_id", "file_name", "captions"} <= about.keys():  # ours
            captions = files.as_captions(about.get("captions_raw") or about["captions"])
            origin = {k: v for k, v in about["source"].items() if k not in ("mode", "sha256", "name")}
            return Record(about["image_id"], about["file_name"], captions, origin, place, split)
        file_name = f"{name}/{image.name if image else sample.name}"
        where, config = f"{tar}, sample {sample.name!a}", self._config
        image_id: ImageId = files.derived_id(config, f"{name}/{sample.name}")
        if config.id_field:
            image_id = files.given_id(where, about.get(config.id_field), config.id_field)
        if config.split_field:
            split = about.get(config.split_field)
        kept = {"kind": self.kind, **files.plain(about)}
        return Record(image_id, file_name, self._captions(sample, about, file), kept, place, split)

    def _image(self, tar: str, sample: _Sample) -> tarfile.TarInfo | None:
        wanted = (self._config.image_field or "").lower()
        found = [x for x in sample.members if (x == wanted if wanted else x in IMAGE_EXTENSIONS)]
        if len(found) > 1:
            raise ConfigError(
                f"{tar}: sample {sample.name!a} has several images: {', '.join(found)}; set source.image_field to the "
                "extension that is meant",
                path=tar,
            )
        return sample.members[found[0]] if found else None

    def _json(self, sample: _Sample, file: BinaryIO) -> Mapping[str, Any]:
        if (member := sample.members.get("json")) is None:
            return {}
        try:
            content = json.loads(_content(file, member))
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            self.counts["json_members_that_are_no_object"] += 1
            return {}
        return content

    def _captions(self, sample: _Sample, about: Mapping[str, Any], file: BinaryIO) -> tuple[Any, ...]:
        """From the member or the field of the json that is wanted, or from the first of the usual ones."""
        wanted = self._config.caption_field
        for name in (wanted,) if wanted else ("txt", *files.CAPTION_FIELDS):
            if (member := sample.members.get(name.lower())) and name != "json":
                try:
                    return (_content(file, member).decode(),)
                except UnicodeDecodeError:
                    return (None,)  # not a text
            if name in about:
                return files.as_captions(about[name])
        return ()

    def _samples(self, tar: str) -> Iterator[_Sample]:
        """Neighbouring members with one name, by their extensions in small letters, as `shards index` has them.

        Raises:
            ConfigError: the tar is damaged, a sample stands in it twice, or its members stand apart.
        """
        seen: dict[str, tuple[str, ...]] = {}
        current: _Sample | None = None
        for member in _members(tar):
            if (parts := split_name(member.name)) is None:
                continue
            name, extension = parts[0], parts[1].lower()
            if current is None or name != current.name:
                if current:
                    seen[current.name] = tuple(current.members)
                    yield current
                if extension in seen.get(name, ()):
                    raise ConfigError(
                        f"{tar}: holds sample {name!a} twice, the second time with {member.name!a}; names must be unique: remove "
                        "one of them, or rename it",
                        path=tar,
                    )
                if name in seen:
                    raise ConfigError(
                        f"{tar}: members of sample {name!a} stand apart, others lie between them; write the tar anew with "
                        "the members of each sample side by side (`tar --sort=name`)",
                        path=tar,
                    )
                current = _Sample(name)
            if extension in current.members:
                raise ConfigError(f"{tar}: holds {member.name!a} twice; names must be unique", path=tar)
            current.members[extension] = member
        if current:
            yield current


def _members(tar: str) -> Iterator[tarfile.TarInfo]:
    """Regular files of a tar. It must end as tars end: ``tarfile`` alone takes a damaged header for the end."""
    try:
        with tarfile.open(tar, "r:") as archive:
            while member := archive.next():
                archive.members = []  # type: ignore[attr-defined]  # it would remember all of them
                if member.isfile():
                    yield member
            end = archive.offset
        with Path(tar).open("rb") as file:
            file.seek(end)
            if file.read(512).strip(b"\0") or end >= os.path.getsize(tar):  # noqa: PTH202
                raise tarfile.ReadError(f"it is cut or damaged at byte {end}")
    except (OSError, tarfile.TarError, EOFError) as error:
        raise files.unreadable(tar, error, _EXPECTED) from None


def _content(file: BinaryIO, member: tarfile.TarInfo) -> bytes:
    return os.pread(file.fileno(), member.size, member.offset_data)
