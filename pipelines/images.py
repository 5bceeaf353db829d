"""The image files of a source: a folder, or a zip of one, read in place. Both give the same bytes and verdicts."""

import errno
import json
import os
import stat
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from pipelines.errors import BuildError
from pipelines.filters import Reason, Rejection
from pipelines.progress import map_bounded
from shards.compressed import advice, compression
from shards.errors import ConfigError
from shards.remote import is_remote

AT_ONCE = 8  # requests to a store or server, from one process
Stamp = tuple[int, ...]  # changes whenever the file does, so that unchanged files need not be hashed again


# Where images are, in a form that goes to any process: a path, or the arguments of another kind of place.
ImagesSpec = str | Mapping[str, Any]


class Images(Protocol):
    """Files by their place, as a rule the name that the source gives them. Neither method raises over a bad file."""

    def stamp(self, file_name: str) -> Stamp | Rejection: ...

    def read(self, file_name: str) -> bytes | Rejection: ...


def read_all(images: Images, names: Sequence[str]) -> Iterator[bytes | Rejection]:
    """What ``read`` gives for each name, in order; of far away images several are asked for at once."""
    if not are_far(images, names):
        yield from map(images.read, names)
        return
    with ThreadPoolExecutor(AT_ONCE) as threads:
        yield from map_bounded(threads, images.read, names, AT_ONCE)


def are_far(images: Images, names: Sequence[str]) -> bool:
    """Whether any of the files has to be asked for over a network."""
    far = getattr(images, "are_far", None)
    return far is not None and far(names)


def where(spec: ImagesSpec) -> str:
    """The place for people."""
    if isinstance(spec, str):
        return spec
    if "others" in spec:
        return where(spec["others"])
    return ", ".join(map(where, spec["places"])) if "places" in spec else str(spec["folder"])


def open_images(spec: ImagesSpec | Path) -> Images:
    """The images of a source; opened once per process, and again when a zip has changed.

    Raises:
        ConfigError: there is no such path, it holds no files, or it is no zip.
    """
    changed_ns = 0
    if isinstance(spec, str | Path) and not is_remote(spec) and Path(spec).is_file():
        changed_ns = Path(spec).stat().st_mtime_ns
    return _open(json.dumps(spec, sort_keys=True, default=str), changed_ns)


@lru_cache(maxsize=16)
def _open(text: str, _changed_ns: int) -> Images:
    spec = json.loads(text)
    if isinstance(spec, str) and is_remote(spec):
        from pipelines.remote_images import RemoteImages

        return RemoteImages(spec)
    if isinstance(spec, str):
        return _open_path(Path(spec))
    if spec["kind"] == "urls":
        from pipelines.remote_images import UrlImages

        return UrlImages(open_images(spec["others"]))
    if spec["kind"] == "tars":
        return TarImages(Path(spec["folder"]))
    if spec["kind"] == "parquet":
        from pipelines.sources.parquet import ParquetImages  # pyarrow is not for everyone

        return ParquetImages(Path(spec["folder"]), spec["column"], Path(spec["cache"]))
    assert spec["kind"] == "several"
    return SeveralImages([open_images(place) for place in spec["places"]])


def _open_path(path: Path) -> Images:
    if path.is_dir():
        if not any(path.iterdir()):
            raise ConfigError(f"{path}: the folder of images is empty; give the one that holds the pictures", path=path)
        return FolderImages(path)
    if not path.exists():
        raise ConfigError(f"{path}: there is no such folder or zip of images; check source.images", path=path)
    with path.open("rb"):
        pass  # what may not be read is not for that reason no zip
    if not zipfile.is_zipfile(path) and (kind := compression(path)):
        raise ConfigError(f"{path}: {advice(path, kind)}; images are a folder or a zip", path=path)
    if not zipfile.is_zipfile(path):
        raise ConfigError(f"{path}: is neither a folder nor a zip; source.images must be one of them", path=path)
    return ZipImages(path)


def unsafe(file_name: object) -> Rejection | None:
    """Refuses a name that is not a path inside the images folder."""
    if not isinstance(file_name, str) or not file_name:
        return Rejection(Reason.MISSING_FILE, f"file_name is {file_name!a}, expected a name")
    if "\0" in file_name:
        return Rejection(Reason.MISSING_FILE, "file_name holds a NUL, which no name of a file can")
    if "\\" in file_name:
        return Rejection(Reason.MISSING_FILE, "file_name holds a backslash, expected / between folders")
    if file_name.startswith("/") or ".." in file_name.split("/"):
        return Rejection(Reason.MISSING_FILE, "file_name leads out of the images folder; it was not followed")
    if not file_name.isascii() and any(0xD800 <= ord(c) < 0xE000 for c in file_name):
        return Rejection(Reason.MISSING_FILE, "file_name is not valid Unicode")
    return None


class FolderImages:
    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def stamp(self, file_name: str) -> Stamp | Rejection:
        if verdict := unsafe(file_name):
            return verdict
        try:
            # pathlib takes as long as the system; like it, a slash at the end counts for nothing
            status = os.stat(f"{self._folder}/{file_name.rstrip('/')}")  # noqa: PTH116
        except OSError as error:
            if not os.path.isdir(self._folder):  # noqa: PTH112
                raise BuildError(
                    f"{self._folder}: the folder of images is gone; bring it back and run the build again, finished shards are "
                    "kept",
                    path=self._folder,
                ) from None
            return _rejected(error)
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device would wait for ever
            return _no_file()
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def read(self, file_name: str) -> bytes | Rejection:
        try:
            return Path(self._folder, file_name).read_bytes()
        except OSError as error:
            return _rejected(error)


class ZipImages:
    """Members may lie in one folder, as ``train2017/`` in the official zips; file names are then those below it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise ConfigError(f"{path}: cannot be read as a zip: {error}; fetch it again", path=path) from None

    @cached_property
    def _members(self) -> dict[str, zipfile.ZipInfo]:
        members = {i.filename: i for i in self._zip.infolist() if not i.is_dir()}
        tops = {name.partition("/")[0] if "/" in name else "" for name in members if not name.startswith("__MACOSX/")}
        if len(tops) == 1 and (top := tops.pop()):
            members |= {name.removeprefix(f"{top}/"): member for name, member in members.items()}
        return {str(PurePosixPath(name)): member for name, member in members.items()}

    @cached_property
    def _folders(self) -> set[str]:
        return {str(parent) for name in self._members for parent in PurePosixPath(name).parents}

    def stamp(self, file_name: str) -> Stamp | Rejection:
        if verdict := unsafe(file_name):
            return verdict
        name = str(PurePosixPath(file_name))  # ./a.jpg and b//c.jpg name what they name in a folder
        if (member := self._members.get(name)) is None:
            return _no_file() if name in self._folders else _missing()
        return member.file_size, member.CRC

    def read(self, file_name: str) -> bytes | Rejection:
        try:
            return self._zip.read(self._members[str(PurePosixPath(file_name))])
        except (OSError, zipfile.BadZipFile, RuntimeError, NotImplementedError, EOFError, zlib.error) as error:
            return Rejection(Reason.UNREADABLE_FILE, _one_line(f"in the zip: {error}").replace(str(self._path), "zip"))


class SeveralImages:
    """Several places that are searched for each file, which must stand in one of them only."""

    def __init__(self, places: Sequence[Images]) -> None:
        self._places = places

    def are_far(self, names: Sequence[str]) -> bool:
        return any(are_far(images, names) for images in self._places)

    def stamp(self, file_name: str) -> Stamp | Rejection:
        found = self._find(file_name)
        return found if isinstance(found, Rejection) else found[1]

    def read(self, file_name: str) -> bytes | Rejection:
        found = self._find(file_name)
        return found if isinstance(found, Rejection) else found[0].read(file_name)

    def _find(self, file_name: str) -> tuple[Images, Stamp] | Rejection:
        stamps = [(images, images.stamp(file_name)) for images in self._places]
        found = [(images, stamp) for images, stamp in stamps if not isinstance(stamp, Rejection)]
        if len(found) == 1:
            return found[0]
        if found:
            return Rejection(Reason.MISSING_FILE, f"{len(found)} of the places of images have it; say which is meant")
        rejections = [stamp for _, stamp in stamps if isinstance(stamp, Rejection)]
        return next((r for r in rejections if r.reason != Reason.MISSING_FILE), rejections[0])


class TarImages:
    """Members of tars in a folder, by ``TAR:OFFSET:BYTES`` of their content; see sources/webdataset.py."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, place: str) -> Path:
        return self._folder / place.rsplit(":", 2)[0]

    def stamp(self, file_name: str) -> Stamp | Rejection:
        if file_name.endswith(":"):
            return Rejection(Reason.MISSING_FILE, "the sample has no image")
        try:
            status = self._path(file_name).stat()
        except OSError as error:
            return _rejected(error)
        num_bytes = int(file_name.rpartition(":")[2])
        return num_bytes, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def read(self, file_name: str) -> bytes | Rejection:
        offset, num_bytes = map(int, file_name.rsplit(":", 2)[1:])
        try:
            with self._path(file_name).open("rb", buffering=0) as tar:
                tar.seek(offset)
                data = tar.read(num_bytes)
        except OSError as error:
            return _rejected(error)
        return data if len(data) == num_bytes else Rejection(Reason.UNREADABLE_FILE, "the tar ends before it")


def _no_file() -> Rejection:
    return Rejection(Reason.UNREADABLE_FILE, "is not a regular file")


def _missing() -> Rejection:
    return Rejection(Reason.MISSING_FILE, "no such file among the images")


def _rejected(error: OSError) -> Rejection:
    if isinstance(error, FileNotFoundError | NotADirectoryError) or error.errno == errno.ENAMETOOLONG:
        return _missing()
    return Rejection(Reason.UNREADABLE_FILE, os.strerror(error.errno) if error.errno else type(error).__name__)


def _one_line(value: Any) -> str:
    return " ".join(str(value).split())[:200]
