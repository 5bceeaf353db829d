"""What a build would make of some records of its sources: the build itself, into a folder that is then removed."""

import hashlib
import heapq
import json
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipelines.build import Build
from pipelines.config import BuildConfig
from pipelines.images import ImagesSpec
from pipelines.records import Record
from pipelines.report import Subject
from pipelines.run import run_plain
from pipelines.sources import Origin, Source
from shards.errors import counted
from shards.manifest import Manifest

NUM_EXAMPLES = 3  # of each reason


@dataclass(frozen=True)
class Preview:
    """Counts, with examples of each reason. ``page`` is the HTML report of these records."""

    records: int
    kept: Mapping[str, int]
    reasons: Mapping[str, int]
    examples: Mapping[str, Sequence[Mapping[str, Any]]]
    captions: Mapping[str, int]
    filters: Sequence[Mapping[str, Any]]
    page: str

    def to_json(self) -> dict[str, Any]:
        """The same for programs, without the page."""
        return {name: value for name, value in vars(self).items() if name != "page"}

    def __str__(self) -> str:
        kept = ", ".join(f"{split} {count}" for split, count in self.kept.items())
        lines = [f"{counted(self.records, 'record')}: {sum(self.kept.values())} kept ({kept}), nothing was written"]
        for reason, count in self.reasons.items():
            lines.append(f"{reason} {count}")
            lines += [f"  {row['file_name']}: {row['detail']}" for row in self.examples[reason]]
        lines += [f"captions {name.replace('_', ' ')} {count}" for name, count in self.captions.items()]
        return "\n".join(lines).encode("utf-8", "backslashreplace").decode()  # names may hold half a character pair


def preview(config: BuildConfig, number: int) -> Preview:
    """Build ``number`` records, chosen by a hash of their ids, and tell what came of them; nothing is left behind.

    Doubles and leaks are looked for among these records alone.

    Raises:
        ConfigError: the source is not what the config says.
    """
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / config.folder.name
        here = {"runner": "processes", "max_reject_share": 1.0} if config.build.remote else {"max_reject_share": 1.0}
        build = config.build.model_copy(update=here)
        kind = type("PreviewBuild", (_PreviewBuild,), {"number": number})
        run_plain(config.model_copy(update={"out": out, "build": build}), kind)
        facts = json.loads((out / "report.json").read_bytes())
        rejects = list(map(json.loads, (out / "rejects.jsonl").read_bytes().splitlines()))
        page = (out / "report.html").read_text(encoding="utf-8")
    of_reason = {name: [row for row in rejects if row["reason"] == name][:NUM_EXAMPLES] for name in facts["reasons"]}
    splits = {name: split["kept"] for name, split in facts["splits"].items()}
    captions = facts["statistics"].get("caption_cleaning", {})
    records = facts["kept"] + facts["rejected"]
    return Preview(records, splits, facts["reasons"], of_reason, captions, facts["filters"], page)


class _PreviewBuild(Build):
    number: int

    def _read_input(self) -> None:
        super()._read_input()
        self.origins = choose(self.origins, self.number)

    def _require_records(self) -> None:
        """Some records need not be of every split."""

    def _subject(self, manifest: Manifest) -> Subject:
        return Subject("preview")

    def _check_share(self, *args: Any, **options: Any) -> None:
        """However much is rejected, it is shown."""


def choose(origins: Sequence[Origin], number: int) -> tuple[Origin, ...]:
    """The same origins with ``number`` of their records in all; an id that several sources have comes from each."""
    drawn = heapq.nsmallest(number, (_draw(r) for origin in origins for r in origin.source.records()))
    chosen = set(drawn)
    return tuple(replace(origin, source=_Chosen(origin.source, chosen)) for origin in origins)


def _draw(record: Record) -> bytes:
    return hashlib.sha256(f"preview:{record.image_id}".encode("utf-8", "surrogatepass")).digest()


class _Chosen:
    """A source without the records that were not drawn."""

    def __init__(self, whole: Source, drawn: Collection[bytes]) -> None:
        self._whole = whole
        self._drawn = drawn

    @property
    def kind(self) -> str:
        return self._whole.kind

    @property
    def location(self) -> str:
        return self._whole.location

    @property
    def images(self) -> ImagesSpec:
        return self._whole.images

    @property
    def counts(self) -> Counter[str]:
        return self._whole.counts

    def records(self) -> Iterator[Record]:
        return (record for record in self._whole.records() if _draw(record) in self._drawn)
