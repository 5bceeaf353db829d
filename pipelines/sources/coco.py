"""COCO Captions to records: the official caption files and their folder layout."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipelines.config import HeldOutConfig, SourceConfig
from pipelines.images import ImagesSpec
from pipelines.records import Record
from pipelines.sources import files
from shards.errors import ConfigError
from shards.remote import is_remote

_SHAPE = (
    'expected a COCO caption file: {"images": [{"id", "file_name"}...], "annotations": [{"image_id", "caption"}...]}'
)


class CocoSource:
    """The images of one caption file. Reads the file at once: JSON has no lines."""

    kind = "coco"

    def __init__(self, config: SourceConfig, annotations: Path, images: ImagesSpec) -> None:
        self.images = images
        self.location = str(annotations.resolve())
        self._split = files.split_of_file(annotations.name)
        field = f"{files.section(config)}.annotations"
        self._records, counts = read_records(annotations.resolve(), _changed_ns(annotations), field)
        self.counts = Counter(counts)

    def records(self) -> Iterator[Record]:
        """In the order of the file."""
        return (replace(record, split=self._split) for record in self._records)


def open_all(config: SourceConfig, official: bool) -> list[CocoSource]:
    """One source a caption file; ``official``: of a root those of every split, not of one.

    Raises:
        ConfigError: a path or a file is not what a source consists of.
    """
    given = [Path(a) for a in files.listed(config.annotations)]
    annotations = given or (_all_below(config) if official else [_find_annotations(config)])
    places = files.listed(config.images)
    if len(places) == len(annotations) > 1:  # one each
        images = [_place(config, place) for place in places]
    elif places:
        several = {"kind": "several", "places": [_place(config, place) for place in places]}
        images = [_place(config, places[0]) if len(places) == 1 else several] * len(annotations)
    else:
        images = [_place(config, str(_find_images(config, path))) for path in annotations]
    return [CocoSource(config, *pair) for pair in zip(annotations, images, strict=True)]


def _place(config: SourceConfig, place: str) -> ImagesSpec:
    if is_remote(place):
        return place
    images = Path(place)
    if not images.exists():
        name = files.section(config)
        raise ConfigError(
            f"{images}: there is no such folder or zip of images; check {name}.images or {name}.root", path=images
        )
    return str(images.resolve())


def _all_below(config: SourceConfig) -> list[Path]:
    _require_root(config)
    found = _captions_below(Path(str(config.root)), "")
    if not found:
        raise ConfigError(
            f"{config.root}: expected annotations/captions_*.json, found none; give {files.section(config)}.annotations",
            path=config.root,
        )
    return found


def _changed_ns(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def held_out_beside(source: SourceConfig) -> list[HeldOutConfig]:
    """The official held-out captions below the same root, where there are some."""
    if source.kind != "coco" or source.root is None or source.annotations or source.split == "val":
        return []
    return [HeldOutConfig(root=source.root)] if _captions_below(Path(source.root), "val") else []


def _captions_below(root: Path, part: str) -> list[Path]:
    folders = (root / "annotations", root)
    return next((found for f in folders if (found := sorted(f.glob(f"captions_{part}*.json")))), [])


def _require_root(source: SourceConfig) -> None:
    root = Path(str(source.root))
    if not root.is_dir():
        kind = "is a file" if root.exists() else "does not exist"
        raise ConfigError(
            f"{root}: {kind}, expected a folder in the official COCO layout "
            f"(annotations/captions_train2017.json, train2017/); {_ways(source)}",
            path=source.root,
        )


def _find_annotations(source: SourceConfig) -> Path:
    _require_root(source)
    root, part = Path(str(source.root)), "val" if source.split == "val" else "train"
    found = _captions_below(root, part) or (_captions_below(root, "") if part == "train" else [])
    if len(found) == 1 and not (part == "train" and found[0].name.startswith("captions_val")):
        return found[0]
    seen = f"found {', '.join(p.name for p in found)}" if found else "found none"
    raise ConfigError(
        f"{source.root}: expected one annotations/captions_{part}*.json for split {source.split}, {seen}; "
        f"give {files.section(source)}.annotations and {files.section(source)}.images",
        path=source.root,
    )


def _find_images(source: SourceConfig, annotations: Path) -> Path:
    """``captions_train2017.json`` belongs to ``train2017/`` or ``train2017.zip``; ``images/`` serves any."""
    if source.root is None:
        raise ConfigError(
            f"{annotations}: {files.section(source)}.images is missing; give the folder or zip of its pictures"
        )
    root, name = Path(source.root), annotations.name.partition(".json")[0].removeprefix("captions_")
    places = [root / name, root / f"{name}.zip", root / "images" / name, root / "images"]
    for place in places:
        if place.exists():
            return place
    tried = ", ".join(str(p.relative_to(root)) for p in places)
    raise ConfigError(f"{root}: no images found, tried {tried}; give {files.section(source)}.images", path=source.root)


def _ways(source: SourceConfig) -> str:
    name = files.section(source)
    other = ", or auto or none as held_out" if name == "held_out" else ""
    return f"give {name}.root, or {name}.annotations and {name}.images{other}"


@lru_cache(maxsize=4)  # the command line checks the file before Prefect starts, and need not read it twice
def read_records(
    path: Path, _changed_ns: int = 0, field: str = "source.annotations"
) -> tuple[tuple[Record, ...], Mapping[str, int]]:
    """Records in the order of the file, captions in the order of theirs, and counts of what was left aside.

    Raises:
        ConfigError: the file is absent, no JSON, not of COCO's shape, or has an id that is no integer.
    """
    content = load_json(path, _SHAPE, field)
    images, annotations = _lists(path, content)
    counts: Counter[str] = Counter()
    captions: dict[int, list[Any]] = {}
    entries: dict[int, Mapping[str, Any]] = {}
    for i, image in enumerate(images):
        image_id = _integer(path, f"images[{i}].id", image, "id")
        if image_id in entries:
            counts["images_listed_twice"] += 1
            continue
        entries[image_id], captions[image_id] = image, []
    seen: set[int] = set()
    for i, annotation in enumerate(annotations):
        image_id = _integer(path, f"annotations[{i}].image_id", annotation, "image_id")
        if "id" in annotation:
            annotation_id = _integer(path, f"annotations[{i}].id", annotation, "id")
            if annotation_id in seen:
                counts["annotation_ids_used_twice"] += 1
                continue
            seen.add(annotation_id)
        if image_id not in captions:
            counts["annotations_of_unlisted_images"] += 1
            continue
        captions[image_id].append(annotation.get("caption"))
    records = tuple(
        Record(image_id, image.get("file_name"), tuple(captions[image_id]), files.plain(image))
        for image_id, image in entries.items()
    )
    return records, dict(counts)


def load_json(path: Path, shape: str, field: str) -> Any:
    """The value in a JSON file.

    Raises:
        ConfigError: the file is absent, cannot be read, or is no JSON.
    """
    try:
        with files.open_binary(str(path)) as file:
            text = file.read()
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; check {field}", path=path) from None
    except files.UNREADABLE as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read: {reason}; {shape}", path=path) from None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not JSON ({error}); {shape}", path=path) from None


def _lists(path: Path, content: Any) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    for name in ("images", "annotations"):
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: holds a {type(content).__name__}, {_SHAPE}", path=path)
        if not isinstance(content.get(name), list):
            found = "is missing" if name not in content else f"is a {type(content[name]).__name__}, not a list"
            raise ConfigError(f"{path}: {name!r} {found}; {_SHAPE}", path=path)
        for i, entry in enumerate(content[name]):
            if not isinstance(entry, dict):
                raise ConfigError(f"{path}: {name}[{i}] is a {type(entry).__name__}; {_SHAPE}", path=path)
    if not content["images"]:
        raise ConfigError(f"{path}: lists no images; {_SHAPE}", path=path)
    annotations = content["annotations"]
    if annotations and not any("caption" in a for a in annotations):
        raise ConfigError(
            f"{path}: none of its {len(annotations)} annotations has a caption (it has "
            f"{', '.join(sorted(annotations[0]))}); take captions_*.json, not instances_*.json",
            path=path,
        )
    return content["images"], annotations


def _integer(path: Path, where: str, entry: Mapping[str, Any], name: str) -> int:
    value = entry.get(name)
    if type(value) is not int or not 0 <= value < 2**63:
        found = "is missing" if name not in entry else f"is {_shown(value)}"
        raise ConfigError(f"{path}: {where} {found}, expected an integer of at least 0; correct the file", path=path)
    return value


def _shown(value: Any) -> str:
    return ascii(value)[:60]
