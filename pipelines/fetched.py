"""Sources at addresses: caption files, tables, tars and zips are copied here first, folders of pictures are read there.

OUT/.build/remote/…   the copies and what the store said of each; a rerun fetches only what has changed
"""

import fnmatch
import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipelines.config import BuildConfig, HeldOutConfig, SourceConfig
from pipelines.errors import BuildError, PassingError
from pipelines.progress import progress_bar
from pipelines.sources import files, table
from shards.atomic import aside, publish, write_file
from shards.errors import ConfigError
from shards.manifest import NAME as MANIFEST
from shards.remote import Found, Remote, RemoteError, UnreachableError, is_remote, shown

_SUFFIXES = {
    **table.SUFFIXES,
    "parquet": (".parquet",),
    "webdataset": (".tar", MANIFEST),
}
_KARPATHY = "dataset*.json"


def with_local_files(config: BuildConfig) -> BuildConfig:
    """The config with every address but those of folders of pictures replaced by the path of a copy.

    Raises:
        ConfigError: an address leads to nothing, or to something else than a source.
        BuildError: a store or server refuses, or does not answer.
    """
    if not any(map(_addresses, [*config.all_sources, config.held_out])):
        return config
    fetcher = _Fetcher(config.folder / ".build" / "remote")
    try:
        return fetcher.localised(config)
    except UnreachableError as error:
        raise PassingError(str(error)) from None
    except RemoteError as error:
        raise BuildError(str(error)) from None


def _addresses(source: object) -> list[str]:
    if not isinstance(source, SourceConfig):
        return []
    values = (source.root, source.annotations, source.images, source.path)
    return [place for value in values for place in files.listed(value) if is_remote(place)]


class _Fetcher:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def localised(self, config: BuildConfig) -> BuildConfig:
        held_out: Any = config.held_out
        if held_out == "auto" and config.split_by == "source" and config.source and is_remote(config.source.root or ""):
            held_out = self._held_out_beside(config.source)
        if isinstance(held_out, HeldOutConfig):
            held_out = self._source(held_out)
        return config.model_copy(
            update={
                "source": config.source and self._source(config.source),
                "sources": tuple(self._source(source) for source in config.sources),
                "held_out": held_out,
            }
        )

    def _held_out_beside(self, source: SourceConfig) -> Any:
        if source.kind != "coco" or source.annotations or source.split == "val":
            return "none"
        names = Remote(str(source.root)).list()
        return HeldOutConfig(root=source.root) if _captions(names, "val") else "none"

    def _source(self, source: SourceConfig) -> SourceConfig:
        if not _addresses(source):
            return source
        update: dict[str, Any] = {}
        if source.root and is_remote(source.root):
            update = self._root(source)
        for name in ("annotations", "path"):
            if value := files.listed(getattr(source, name)):
                update[name] = tuple(path for place in value for path in self._copies(source, place, name))
        if source.images:
            update["images"] = tuple(self._images(place) for place in files.listed(source.images))
        elif source.kind in ("jsonl", "csv"):  # whose pictures lie beside them, unless they say otherwise
            first = files.listed(source.path)[0]
            update["images"] = first.rpartition("/")[0] if _is_file(source, first) else _folder(first)
        return source.model_copy(update=update)

    def _root(self, source: SourceConfig) -> dict[str, Any]:
        """Caption files and pictures of a folder in the official layout."""
        remote = Remote(str(source.root))
        section = files.section(source)
        if remote.location.startswith("http"):
            raise ConfigError(
                f"{remote}: a web server does not list its files; give {section}.annotations and {section}.images, or fetch "
                "them with `python -m pipelines download`",
                path=str(remote),
            )
        names = remote.list()
        if source.kind == "karpathy":
            found = fnmatch.filter(names, _KARPATHY)
            folders = sorted({name.partition("/")[0] for name in names if "/" in name})
            zips = sorted(name for name in names if name.endswith(".zip") and "/" not in name)
            places = [name for name in (*folders, *zips) if name.startswith(("train2014", "val2014"))]
        else:
            part = "val" if source.split == "val" else "train"
            found = _captions(names, part)
            stem = Path(found[0]).stem.removeprefix("captions_") if found else ""
            candidates = [stem, f"{stem}.zip", f"images/{stem}", "images"]
            places = [c for c in candidates if c in names or any(name.startswith(f"{c}/") for name in names)][:1]
        if len(found) != 1 or not places:
            what = "images" if len(found) == 1 else "one caption file"
            raise ConfigError(
                f"{remote}: expected {what} in the official COCO layout (annotations/captions_train2017.json, train2017/ or "
                f"train2017.zip), found {', '.join(sorted(names)[:3]) or 'nothing'}; give {section}.annotations and "
                f"{section}.images",
                path=str(remote),
            )
        copy = self._copy(f"{remote.location}/{found[0]}", names[found[0]])
        images = tuple(self._images(f"{remote.location}/{place}") for place in places)
        return {"root": None, "annotations": (copy,), "images": images}

    def _images(self, place: str) -> str:
        return self._copy(place) if is_remote(place) and place.endswith(".zip") else place

    def _copies(self, source: SourceConfig, place: str, field: str) -> Iterable[str]:
        if not is_remote(place):
            return [place]
        if field == "annotations" or _is_file(source, place):
            return [self._copy(place)]
        folder = _folder(place)
        pattern = place.removeprefix(folder).strip("/") or "*"
        remote = Remote(folder)
        names = {
            name: found
            for name, found in remote.list().items()
            if name.endswith(_SUFFIXES[source.kind]) and fnmatch.fnmatch(name, pattern)
        }
        if not [name for name in names if name != MANIFEST]:
            raise ConfigError(
                f"{shown(place)}: holds no file that ends in {' or '.join(_SUFFIXES[source.kind])}; check "
                f"{files.section(source)}.path",
                path=shown(place),
            )
        for name, found in names.items():
            self._copy(f"{folder}/{name}", found, below=folder)
        return [str(self._place(folder))]

    def _place(self, folder: str) -> Path:
        return self._folder / hashlib.sha256(folder.encode()).hexdigest()[:16]

    def _copy(self, address: str, found: Found | None = None, below: str = "") -> str:
        folder, _, name = address.partition("?")[0].rpartition("/")
        if below:
            folder, name = below, address.removeprefix(f"{below}/")
        path = self._place(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if address.startswith("http"):
            return _downloaded(address, path)
        remote = Remote(address)
        found = found or remote.find()
        if found is None or found.num_bytes < 0:
            raise ConfigError(f"{remote}: there is no such file; check the address", path=str(remote))
        said = path.with_name(f".{path.name}.json")
        if not (path.exists() and path.stat().st_size == found.num_bytes and _said(said) == vars(found)):
            with progress_bar(found.num_bytes, f"fetch {path.name}", "B") as progress:
                remote.fetch("", aside(path))
                progress(found.num_bytes)
            publish(aside(path), path)
            write_file(said, json.dumps(vars(found)).encode())
        return str(path)


def _downloaded(address: str, path: Path) -> str:
    """From a web server: on from the bytes that are there."""
    from pipelines.download import run_download  # with an HTTP client, a fifth of the start of every build process
    from pipelines.download_config import DownloadConfig

    files = ({"url": address, "name": path.name},)
    run_download(DownloadConfig.model_validate({"out": path.parent, "dataset": "none", "files": files}))
    return str(path)


def _folder(place: str) -> str:
    """A folder's address, or what stands in front of the first part with a pattern in it."""
    at = min((place.index(c) for c in "*?[" if c in place), default=None)
    return place.rstrip("/") if at is None else place[:at].rpartition("/")[0]


def _is_file(source: SourceConfig, place: str) -> bool:
    return not set(place) & set("*?[") and place.partition("?")[0].endswith(
        _SUFFIXES.get(source.kind, (".json", ".json.gz"))
    )


def _captions(names: Iterable[str], part: str) -> list[str]:
    found = sorted(name for name in names if fnmatch.fnmatch(Path(name).name, f"captions_{part}*.json"))
    return [name for name in found if name.startswith("annotations/")] or [name for name in found if "/" not in name]


def _said(path: Path) -> Mapping[str, Any] | None:
    with suppress(OSError, ValueError):
        found: Mapping[str, Any] = json.loads(path.read_bytes())
        return found
    return None
