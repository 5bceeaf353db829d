"""`python -m shards index`: what our reader needs beside tars that another tool wrote; the tars keep their bytes.

Refused, with shard and member: a tar that is cut, damaged, compressed or sparse; a sample whose members are not
adjacent or doubled; a key that is in the folder twice; a sample without a picture or a caption, or with two pictures;
a picture that cannot be decoded, or that the reader would not show as it is meant (transparency, 16 bits, several
frames). The build takes such tars too, and rejects or converts what is wrong with them: it writes shards of its own.
"""

import hashlib
import io
import json
import os
import tarfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

from shards.atomic import write_file
from shards.checksum import crc32
from shards.compressed import SUFFIXES, advice, compression
from shards.errors import ConfigError, FormatError
from shards.foreign import CAPTIONS, ORIENTATION, PICTURES, captions_of, key_of, split_name
from shards.index import pack_index
from shards.manifest import NAME, Manifest, ShardEntry
from shards.places import require_folder
from shards.verify import Finding
from shards.writer import same_width

_EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}
_MODES = ("1", "L", "P", "RGB", "CMYK", "YCbCr")  # Pillow's; what RGB is made from without a choice
_EXIF_ORIENTATION = 0x0112
_CHUNK = 1 << 20


@dataclass(frozen=True)
class _Member:
    """A file in a tar: offsets of its first header and of its payload."""

    name: str
    sample: str
    extension: str  # in small letters
    start: int
    offset: int
    num_bytes: int


def index_folder(
    folder: Path, splits: Mapping[str, str] | None = None, captions: str | None = None
) -> tuple[Manifest, list[Finding]]:
    """Write an index and a sample list beside each tar and, if nothing is wrong with any, the manifest.

    ``splits``: file name patterns by split; all tars are `train` if there are none. ``captions``: the kind of member
    that holds them; by default the first kind that the folder's first sample has.

    Raises:
        ConfigError: not a folder, no tars, a build's folder, or patterns that do not take each tar once.
        FormatError: the manifest that is there is damaged.
    """
    splits = dict(splits or {"train": "*.tar"})
    _require_free(folder)
    entries, findings = [], []
    seen: dict[str, str] = {}
    for split, path in _tars(folder, splits):
        scan = _Scan(path, captions)
        found = list(scan.run(seen))
        captions = captions or scan.captions
        findings += found
        if found:
            continue
        idx, meta = pack_index([*scan.starts, scan.end]), same_width(scan.lines)
        entry = ShardEntry(
            path.name,
            split,
            len(scan.lines),
            path.stat().st_size,
            scan.sha256,
            hashlib.sha256(idx).hexdigest(),
            hashlib.sha256(meta).hexdigest(),
            foreign=True,
        )
        write_file(folder / entry.idx_name, idx)
        write_file(folder / entry.meta_name, meta)
        entries.append(entry)
    manifest = Manifest(tuple(entries), {"indexed": {"captions": captions, "splits": splits}})
    if not findings:
        manifest.save(folder)
    return manifest, findings


def _require_free(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is no folder; give the one that holds the tars", path=folder)
    require_folder(folder, "DIR")
    if not (folder / NAME).exists():
        return
    try:
        shards = Manifest.load(folder).shards
    except FormatError as error:
        raise FormatError(f"{error}; or move it away to index the tars", path=folder) from None
    if not all(shard.foreign for shard in shards):
        raise ConfigError(f"{folder}: a build wrote it, so there is nothing to index", path=folder)


def _tars(folder: Path, splits: Mapping[str, str]) -> list[tuple[str, Path]]:
    """Split and path of each tar, splits in their order, names rising."""
    paths = sorted(folder.glob("*.tar"))
    if not paths:
        packed = [path.name for path in sorted(folder.iterdir()) if path.name.endswith(SUFFIXES)]
        hint = f", and {packed[0]} is compressed: decompress it first" if packed else ""
        raise ConfigError(
            f"{folder}: holds no file that ends in .tar{hint}; give the folder that holds them itself", path=folder
        )
    chosen = [(split, path) for split, pattern in splits.items() for path in paths if path.match(pattern)]
    for path in paths:
        if (times := sum(path == other for _, other in chosen)) != 1:
            patterns = ", ".join(f"{split}={pattern}" for split, pattern in splits.items())
            raise ConfigError(
                f"{path}: {times} of the splits {patterns} take it, expected one; change --split", path=path
            )
    return chosen


class _Scan:
    """One tar, read from end to end."""

    def __init__(self, path: Path, captions: str | None) -> None:
        self.path = path
        self.captions = captions
        self.starts: list[int] = []
        self.lines: list[bytes] = []
        self.end = 0
        self.sha256 = ""

    def run(self, seen: dict[str, str]) -> Iterator[Finding]:
        """Findings; ``seen`` is the shard of each key, and learns this one's."""
        with self.path.open("rb") as file:
            self.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            problems: list[str] = []
            members = self._members(file, problems)
            closed: dict[str, set[str]] = {}
            for name, group in groupby(members, key=lambda member: member.sample):
                files = list(group)
                if again := [f for f in files if f.extension in closed.get(name, ())]:
                    yield self._finding(
                        again[0].name, f"{name} is in the tar twice; keys must be unique: rename one of them"
                    )
                    continue
                if name in closed:
                    yield self._finding(
                        files[0].name, f"the other members of {name} are not beside it; write the tar sorted by name"
                    )
                    continue
                closed[name] = {f.extension for f in files}
                key = key_of(name)
                if key in seen:
                    yield self._finding(
                        files[0].name, f"its sample is in {seen[key]} too; keys must be unique over the dataset"
                    )
                    continue
                seen[key] = self.path.name
                try:
                    line = self._line(file, key, name, files)
                except _MemberError as error:
                    yield self._finding(error.member, str(error))
                    continue
                self.starts.append(files[0].start)
                self.lines.append(json.dumps(line, separators=(",", ":")).encode("ascii"))
            yield from (self._finding(None, problem) for problem in problems)
            if not closed and not problems:
                yield self._finding(None, "holds no sample; remove it")

    def _finding(self, member: str | None, problem: str) -> Finding:
        return Finding(self.path.name, member, problem)

    def _members(self, file: BinaryIO, problems: list[str]) -> Iterator[_Member]:
        """The members that belong to samples; what is wrong with the tar itself goes to ``problems``."""
        last = "its start"
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for info in tar:
                    tar.members = []  # type: ignore[attr-defined]  # it keeps them all, and nothing asks for them again
                    last = info.name
                    if info.isdir() or (parts := split_name(info.name)) is None:
                        continue
                    if not info.isreg() or info.issparse():
                        problems.append(f"{info.name} is a link, a device or sparse, expected a plain file")
                        continue
                    yield _Member(info.name, parts[0], parts[1].lower(), info.offset, info.offset_data, info.size)
                self.end = tar.offset
        except (tarfile.TarError, EOFError, OSError) as error:
            kind = compression(self.path)
            what = advice(self.path, kind) if kind else "is cut or damaged; fetch it again"
            problems.append(f"cannot be read beyond {last}: {error}; it {what}")
            return
        file.seek(self.end)
        if not (rest := file.read(_CHUNK)):
            problems.append(
                f"ends at byte {self.end} behind {last} without a tar's closing zeros: it was cut, fetch it again"
            )
        while rest:
            if rest.strip(b"\0"):
                problems.append(
                    f"byte {self.end} behind {last} begins no member and no end: it is damaged, fetch it again"
                )
                return
            rest = file.read(_CHUNK)

    def _line(self, file: BinaryIO, key: str, name: str, files: list[_Member]) -> dict[str, Any]:
        """The sample's line of meta.jsonl. Raises _MemberError."""
        by_extension = {member.extension: member for member in files}
        if len(by_extension) != len(files):
            raise _MemberError(files[-1].name, "its sample has two members of one name")
        pictures = [member for member in files if member.extension in PICTURES]
        found = ", ".join(f".{extension}" for extension in by_extension)
        if len(pictures) != 1:
            dotted = any(extension.rpartition(".")[2] in PICTURES for extension in by_extension if "." in extension)
            dots = "; names are split at their first dot, so no key can hold one: rename the members" if dotted else ""
            raise _MemberError(
                files[0].name, f"{name} has {len(pictures)} pictures (members {found}), expected one{dots}"
            )
        if self.captions is None:
            self.captions = next((kind for kind in CAPTIONS if kind in by_extension), None)
        if self.captions not in by_extension:
            wanted = f".{self.captions}" if self.captions else ", ".join(f".{kind}" for kind in CAPTIONS)
            raise _MemberError(pictures[0].name, f"{name} has no caption (members {found}), expected {wanted}")
        picture, caption = pictures[0], by_extension[self.captions]
        image, text = (os.pread(file.fileno(), m.num_bytes, m.offset) for m in (picture, caption))
        extension, width, height, flags = _examine(picture.name, image)
        try:
            captions_of(self.captions, text)
        except ValueError as error:
            raise _MemberError(caption.name, str(error)) from None
        parts = [
            {"name": kind, "offset": member.offset, "bytes": len(payload), "crc32": crc32(payload)}
            for kind, member, payload in ((extension, picture, image), (self.captions, caption, text))
        ]
        return {"key": key, "parts": parts, "width": width, "height": height, "flags": flags, "member": picture.name}


class _MemberError(Exception):
    def __init__(self, member: str, problem: str) -> None:
        super().__init__(problem)
        self.member = member


def _examine(member: str, data: bytes) -> tuple[str, int, int, list[str]]:
    """Extension, width and height as shown upright, flags. Raises _MemberError."""
    from PIL import Image

    try:
        with warnings.catch_warnings(), Image.open(io.BytesIO(data)) as image:
            warnings.simplefilter("ignore")
            extension = _EXTENSIONS.get(str(image.format))
            if extension is None:
                raise _MemberError(member, f"is {image.format}, expected JPEG, PNG or WebP")
            frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
            deep = extension == "png" and data[24] > 8  # bit depth in IHDR; Pillow opens 48-bit colour as RGB
            if image.mode not in _MODES or image.has_transparency_data or deep or frames > 1:
                what = f"mode {image.mode}{', 16 bits' * deep}{', transparency' * image.has_transparency_data}"
                raise _MemberError(member, f"is a picture of {what}, {frames} frames; the build converts such ones")
            size, orientation = image.size, image.getexif().get(_EXIF_ORIENTATION, 1)
            image.draft(None, (1, 1))  # a JPEG is then read to its end, but most of its pixels are not computed
            image.load()
    except (_MemberError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - damaged files raise anything in Pillow
        raise _MemberError(member, f"cannot be decoded: {error or type(error).__name__}") from None
    if not isinstance(orientation, int) or not 2 <= orientation <= 8:
        return extension, *size, []
    if orientation >= 5:
        size = size[::-1]
    return extension, *size, [f"{ORIENTATION}={orientation}"]
