"""The Karpathy split file (dataset_coco.json, dataset_flickr30k.json): images with sentences and a split each.

Source: https://cs.stanford.edu/people/karpathy/deepimagesent/. Its restval, official val images that nobody scores on,
belongs to train: 82,783 + 30,504 = 113,287.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelines.config import SourceConfig
from pipelines.images import ImagesSpec
from pipelines.records import Record
from pipelines.sources import files
from pipelines.sources.coco import load_json
from pipelines.sources.table import images_of
from shards.errors import ConfigError

COCO_COUNTS = {"train": 113_287, "val": 5_000, "test": 5_000}
CLEARLY_A_PART = 50_000  # a file of COCO with fewer images is somebody's sample of it
_SHAPE = 'expected a Karpathy split file: {"images": [{"filename", "split", "sentences": [{"raw"}...]}...]}'


class KarpathySource:
    """The images of one split file, which is read at once: JSON has no lines."""

    kind = "karpathy"

    def __init__(self, config: SourceConfig) -> None:
        self.counts: Counter[str] = Counter()
        self._config = config
        path = self._find(config)
        self.location = str(path.resolve())
        content = load_json(path, _SHAPE, f"{files.section(config)}.annotations")
        self._images = _images(path, content)
        self._check_counts(path, str(content.get("dataset", "")))
        self.images: ImagesSpec = images_of(config) or self._find_images(config, path)

    @staticmethod
    def _find(config: SourceConfig) -> Path:
        if given := files.listed(config.annotations):
            if len(given) > 1:
                raise ConfigError(f"{given[1]}: kind=karpathy takes one file; give several as sources", path=given[1])
            return Path(given[0])
        root = Path(str(config.root))
        found = [p for folder in (root, root / "annotations") for p in sorted(folder.glob("dataset_*.json"))]
        if len(found) != 1:
            seen = ", ".join(p.name for p in found) or "none"
            raise ConfigError(
                f"{root}: expected one dataset_*.json, found {seen}; give {files.section(config)}.annotations",
                path=root,
            )
        return found[0]

    def _find_images(self, config: SourceConfig, path: Path) -> ImagesSpec:
        """``train2014`` and ``val2014`` below the root, as folders or as zips."""
        root = Path(config.root) if config.root else path.parent
        parts = dict.fromkeys(str(image.get("filepath", "")) for image in self._images)
        zips = [root / f"{part}.zip" for part in parts if part and not (root / part).exists()]
        if not zips or not all(z.exists() for z in zips):
            return str(root.resolve())
        places = [str(z.resolve()) for z in zips]
        return {"kind": "several", "places": places + ([str(root.resolve())] if len(zips) < len(parts) else [])}

    def _check_counts(self, path: Path, dataset: str) -> None:
        found = Counter(str(files.SAME_SPLIT.get(i["split"], i["split"])) for i in self._images)
        expected = self._config.expected_counts
        if expected is None and dataset == "coco" and len(self._images) >= CLEARLY_A_PART:
            expected = COCO_COUNTS
        if expected is not None and dict(found) != expected:
            raise ConfigError(
                f"{path}: holds {_shown(found)}, expected {_shown(expected)} (restval belongs to train); fetch the "
                f"official file, or say what is right with {files.section(self._config)}.expected_counts",
                path=path,
            )

    def records(self) -> Iterator[Record]:
        """In the order of the file."""
        for image in self._images:
            name, folder = image.get("filename"), image.get("filepath")
            place = f"{folder}/{name}" if folder and isinstance(name, str) else None
            captions = tuple(s.get("raw") if isinstance(s, dict) else s for s in image["sentences"])
            image_id = (
                files.given_id(f"{self.location}, image {name!a}", image["cocoid"], "cocoid")
                if "cocoid" in image
                else files.derived_id(self._config, name)
            )
            yield Record(image_id, name, captions, {"kind": "karpathy"}, place, image["split"])


def _images(path: Path, content: Any) -> list[Mapping[str, Any]]:
    images = content.get("images") if isinstance(content, dict) else None
    if not isinstance(images, list) or not images:
        raise ConfigError(f"{path}: lists no images; {_SHAPE}", path=path)
    for i, image in enumerate(images):
        fits = isinstance(image, dict) and isinstance(image.get("split"), str)
        if not fits or not isinstance(image.get("sentences"), list):
            raise ConfigError(f"{path}: images[{i}] is {ascii(image)[:80]}; {_SHAPE}", path=path)
    return images


def _shown(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {counts[name]:,}" for name in sorted(counts, key=lambda n: (n != "train", n)))
