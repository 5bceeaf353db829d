"""What a build kept and rejected: report.json for programs, report.html (one file, no network) for people."""

import json
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pipelines import gallery, report_page, vocabulary
from pipelines.config import BuildConfig, FilterConfig
from pipelines.filters import Reason
from pipelines.images import where
from pipelines.plan import Plan, PlannedSplit
from pipelines.stats import HASHES, WORDS, Stats, of
from shards.manifest import Manifest

NUM_GROUPS = 12  # of near duplicates, with pictures


@dataclass(frozen=True)
class Subject:
    """What a report is of. Only a build and an addition have a ``manifest_id``, that of the whole dataset.

    ``why``: of what was not published, the reason; of an addition, the manifest_id that it was added to.
    """

    kind: Literal["build", "addition", "preview", "unpublished"]
    manifest_id: str | None = None
    why: str = ""


def files(
    config: BuildConfig,
    planned: Plan,
    manifest: Manifest,
    results: Sequence[Mapping[str, Any]],
    folders: Mapping[str, Path],
    subject: Subject,
) -> dict[str, bytes]:
    """report.json and report.html; ``folders`` says where each shard lies. Times and paths stand only here.

    ``manifest`` lists the shards that are reported on.
    """
    facts = summarise(config, planned, manifest, results, subject)
    rejects = [row for result in results for row in result["rejects"]]
    most = config.filters.max_pixels
    number = config.build.gallery
    page = report_page.render(
        facts,
        kept=gallery.kept(folders, manifest, number),
        rejected=gallery.rejected(planned.splits, rejects, number, most),
        groups=gallery.groups(planned.splits, planned.alike(min(NUM_GROUPS, number)), most),
    )
    return {
        "report.json": json.dumps(facts, indent=1).encode("ascii") + b"\n",
        # names of files may hold half a character pair, which UTF-8 has no bytes for
        "report.html": page.encode("utf-8", "backslashreplace"),
    }


def summarise(
    config: BuildConfig, planned: Plan, manifest: Manifest, results: Sequence[Mapping[str, Any]], subject: Subject
) -> dict[str, Any]:
    """The content of report.json."""
    from importlib.metadata import version  # which build processes, that need none, would spend some of their start on

    stats: Stats = {}
    for result in results:
        for name, values in result["stats"].items():
            if name not in (WORDS, HASHES):
                of(stats, name).update(values)
    known = vocabulary.merge((r["stats"].get(WORDS, {}), r["stats"].get(HASHES, {})) for r in results)
    rejects = [row for result in results for row in result["rejects"]]
    reasons = Counter(str(r["reason"]) for r in rejects)
    return {
        "name": config.folder.resolve().name,
        "of": subject.kind,
        **({"why": subject.why} if subject.why else {}),
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "manifest_id": subject.manifest_id,
        "num_shards": len(manifest.shards),
        "num_bytes": sum(s.num_bytes for s in manifest.shards),
        "kept": sum(manifest.splits.values()),
        "rejected": len(rejects),
        "reasons": _sorted(reasons),
        "filters": filter_counts(config.filters, reasons, stats.get("caption_cleaning", {})),
        "splits": {
            split.name: {
                "records": split.num_records,
                "kept": manifest.splits.get(split.name, 0),
                "rejected": sum(r["split"] == split.name for r in rejects),
                "left_aside": dict(split.counts),
                "annotations": ", ".join(source.location for source in split.sources),
                "images": ", ".join(where(source.images) for source in split.sources),
            }
            for split in planned.splits
        },
        "sources": _sources(planned.splits, results),
        "statistics": {name: _sorted(values) for name, values in sorted(stats.items())},
        "vocabulary": {"num_words": known.num_words, "top": dict(known.top)},
        "shards": [_balance(result) for result in results if result["entry"]],
        "near_duplicate_groups": planned.num_alike,
        "config": config.model_dump(mode="json"),
        "versions": {name: version(name) for name in ("pillow", "numpy", "simplejpeg")}
        | {"python": platform.python_version()},
    }


def _sources(splits: Sequence[PlannedSplit], results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What came of each source, in the order of the config. A record says the number of its source in its split."""
    facts: dict[int, dict[str, Any]] = {}
    for split in splits:
        for number, name, source in zip(split.source_numbers, split.names, split.sources, strict=True):
            about = {"kind": source.kind, "name": name, "location": source.location, "left_aside": dict(source.counts)}
            facts.setdefault(number, {**about, "kept": 0, "rejected": 0})
    numbers = {split.name: split.source_numbers for split in splits}
    for result in results:
        entry = result["entry"]
        for place, kept in result.get("kept", {"0": entry["num_samples"]} if entry else {}).items():
            facts[numbers[entry["split"]][int(place)]]["kept"] += kept
        for row in result["rejects"]:
            facts[numbers[row["split"]][row.get("source", 0)]]["rejected"] += 1
    return [facts[number] for number in sorted(facts)]


def filter_counts(
    filters: FilterConfig, reasons: Mapping[str, int], captions: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Each filter with its setting (None: it is always on) and what it took: records, or captions where it says so."""
    rows: list[tuple[str, str | None, int]] = [
        ("readable files", None, sum(reasons.get(r, 0) for r in ("missing_file", "unreadable_file", "empty_file"))),
        ("whole pictures", None, sum(reasons.get(r, 0) for r in ("not_an_image", "truncated", "corrupt_data"))),
        ("finite pixels", None, reasons.get(Reason.NOT_FINITE, 0)),
        ("no leak between splits", None, reasons.get(Reason.SPLIT_LEAK, 0)),
        ("some caption", None, reasons.get(Reason.NO_CAPTION, 0)),
        *([("an image id that is new", None, known)] if (known := reasons.get(Reason.KNOWN_ID, 0)) else []),
    ]
    for reason, name in (
        (Reason.TOO_MANY_PIXELS, "max_pixels"),
        (Reason.TOO_SMALL, "min_side_px"),
        (Reason.ASPECT_RATIO, "max_aspect_ratio"),
        (Reason.COLOR_MODE, "color_modes"),
        (Reason.CONSTANT_IMAGE, "constant_levels"),
        (Reason.DUPLICATE_IMAGE, "duplicates"),
        (Reason.NEAR_DUPLICATE, "near_duplicate_bits"),
    ):
        rows.append((name, _shown(getattr(filters, name)), reasons.get(reason, 0)))
    for fault, names in (
        ("too_short", ("min_caption_words", "min_caption_chars")),
        ("too_long", ("max_caption_words", "max_caption_chars")),
        ("script", ("caption_scripts",)),
    ):
        settings = [f"{name} {_shown(value)}" for name in names if (value := getattr(filters, name)) is not None]
        rows.append((f"captions: {fault.replace('_', ' ')}", ", ".join(settings) or "off", captions.get(fault, 0)))
    return [{"filter": name, "setting": setting, "count": number} for name, setting, number in rows]


def _shown(value: Any) -> str:
    if value is None or value is False or value == -1:
        return "off"
    if value is True:
        return "on"
    return ", ".join(value) if isinstance(value, tuple) else f"{value:,g}" if isinstance(value, float) else f"{value:,}"


def _balance(result: Mapping[str, Any]) -> dict[str, Any]:
    """What can be compared between shards; lengths of captions in words."""
    entry, stats = result["entry"], result["stats"]
    return {
        "name": entry["name"],
        "split": entry["split"],
        "samples": entry["num_samples"],
        "bytes": entry["num_bytes"],
        "rejected": len(result["rejects"]),
        "captions_per_sample": _mean(stats.get("captions_per_image", {})),
        "words_per_caption": _mean(stats.get("words_per_caption", {})),
    }


def _mean(counts: Mapping[str, int]) -> float:
    total = sum(counts.values())
    return round(sum(int(value) * n for value, n in counts.items()) / total, 3) if total else 0.0


def _sorted(counts: Mapping[str, int]) -> dict[str, int]:
    """By number where the names are numbers, else the most frequent first."""
    if all(name.isdigit() for name in counts):
        return {name: counts[name] for name in sorted(counts, key=int)}
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))
