"""What a build kept and rejected: report.json for programs, report.html (one file, no network) for people."""

import json
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from pipelines import gallery
from pipelines.config import BuildConfig
from pipelines.measure import Picture
from pipelines.plan import PlannedSplit
from shards.manifest import Manifest

Counts = Mapping[str, int]
NUM_BINS = 24
CHART_W, CHART_H = 340, 120  # of a histogram's bars, in SVG units

CLEANING = {
    "changed": "normalised (Unicode, white space)",
    "duplicate": "dropped: said twice of one picture",
    "empty": "dropped: empty or punctuation only",
    "not_text": "dropped: not a text",
}
LEFT_ASIDE = {
    "annotations_of_unlisted_images": "annotations of images that are not listed",
    "annotation_ids_used_twice": "annotations whose id was used before",
    "images_listed_twice": "images listed a second time",
}


def count(stats: dict[str, Counter[str]], record: Mapping[str, Any], picture: Picture) -> None:
    """Add one kept sample to a shard's statistics."""
    captions = record["captions"]
    additions: dict[str, Mapping[str, int]] = {
        "modes": {picture.mode: 1},
        "extensions": {picture.extension: 1},
        "flags": dict.fromkeys(picture.flags, 1),
        "width_px": {str(picture.measured.width): 1},
        "height_px": {str(picture.measured.height): 1},
        "captions_per_image": {str(len(captions)): 1},
        "words_per_caption": Counter(str(len(c.split())) for c in captions),
        "caption_cleaning": record["caption_counts"],
    }
    for name, values in additions.items():
        stats.setdefault(name, Counter()).update(values)


def files(
    config: BuildConfig,
    splits: Sequence[PlannedSplit],
    manifest: Manifest,
    results: Sequence[Mapping[str, Any]],
    folders: Mapping[str, Path],
) -> dict[str, bytes]:
    """report.json and report.html; ``folders`` says where each shard lies. Times and paths stand only here."""
    facts = summarise(config, splits, manifest, results)
    kept = gallery.kept(folders, manifest, config.build.gallery)
    rejects = [row for result in results for row in result["rejects"]]
    rejected = gallery.rejected(splits, rejects, config.build.gallery, config.filters.max_pixels)
    return {
        "report.json": json.dumps(facts, indent=1).encode("ascii") + b"\n",
        # names of files may hold half a character pair, which UTF-8 has no bytes for
        "report.html": render(facts, kept, rejected).encode("utf-8", "backslashreplace"),
    }


def summarise(
    config: BuildConfig, splits: Sequence[PlannedSplit], manifest: Manifest, results: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The content of report.json."""
    stats: dict[str, Counter[str]] = {}
    for result in results:
        for name, values in result["stats"].items():
            stats.setdefault(name, Counter()).update(values)
    rejects = [row for result in results for row in result["rejects"]]
    return {
        "name": config.folder.resolve().name,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "manifest_id": manifest.manifest_id,
        "num_shards": len(manifest.shards),
        "num_bytes": sum(s.num_bytes for s in manifest.shards),
        "kept": sum(manifest.splits.values()),
        "rejected": len(rejects),
        "reasons": _sorted(Counter(str(r["reason"]) for r in rejects)),
        "splits": {
            split.name: {
                "records": split.num_records,
                "kept": manifest.splits.get(split.name, 0),
                "rejected": sum(r["split"] == split.name for r in rejects),
                "left_aside": dict(split.counts),
                "annotations": ", ".join(source.location for source in split.sources),
                "images": ", ".join(str(source.images) for source in split.sources),
            }
            for split in splits
        },
        "sources": _sources(splits, results),
        "statistics": {name: _sorted(values) for name, values in sorted(stats.items())},
        "config": config.model_dump(mode="json"),
        "versions": {"python": platform.python_version(), **_versions("pillow", "numpy", "simplejpeg")},
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


def _versions(*names: str) -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in names}


def _sorted(counts: Counts) -> dict[str, int]:
    """By number where the names are numbers, else the most frequent first."""
    if all(name.isdigit() for name in counts):
        return {name: counts[name] for name in sorted(counts, key=int)}
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def render(facts: Mapping[str, Any], kept: Sequence[gallery.Shown], rejected: Sequence[gallery.Shown]) -> str:
    """The page. Everything that came from the source is escaped."""
    template = Template((Path(__file__).with_name("report.html")).read_text(encoding="utf-8"))
    stats = facts["statistics"]
    num_captions = sum(stats.get("words_per_caption", {}).values())
    share = facts["rejected"] / max(1, facts["kept"] + facts["rejected"])
    tiles = [
        (f"{facts['kept']:,}", "pictures kept"),
        (f"{facts['rejected']:,}", f"rejected, {share:.1%}"),
        (f"{num_captions:,}", "captions"),
        (f"{facts['num_shards']:,}", "shards"),
        (_size(facts["num_bytes"]), "in the tars"),
    ]
    left_aside: Counter[str] = Counter()
    for split in facts["splits"].values():
        left_aside.update(split["left_aside"])
    return template.substitute(
        name=escape(facts["name"]),
        created_at=escape(facts["created_at"].replace("T", " ").replace("+00:00", " UTC")),
        manifest_id=escape(facts["manifest_id"][:16]),
        num_shards=facts["num_shards"],
        tiles="".join(f'<div class="card tile"><b>{number}</b><span>{name}</span></div>' for number, name in tiles),
        splits="".join(_split_bar(name, split) for name, split in facts["splits"].items()),
        reasons=_reason_bars(facts["reasons"]),
        charts="".join(
            _chart(title, unit, stats.get(name, {}))
            for name, title, unit in (
                ("width_px", "Width", "pixels"),
                ("height_px", "Height", "pixels"),
                ("words_per_caption", "Caption length", "words"),
                ("captions_per_image", "Captions of a picture", ""),
            )
        ),
        tables=_table("Colour modes of the files", stats.get("modes", {}), {})
        + _table("Pictures stored as PNG, and why", _conversions(stats.get("flags", {})), {})
        + _table("Captions", stats.get("caption_cleaning", {}), CLEANING)
        + _table("Left aside in the annotation files", left_aside, LEFT_ASIDE),
        kept_note=_note(kept, facts["kept"]),
        kept="".join(map(_figure, kept)),
        rejected_note=_note(rejected, facts["rejected"]),
        rejected="".join(map(_figure, rejected)),
        settings=escape(json.dumps({"config": facts["config"], "versions": facts["versions"]}, indent=1)),
    )


def _size(num_bytes: int) -> str:
    value, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"


def _split_bar(name: str, split: Mapping[str, Any]) -> str:
    parts = "".join(
        f'<i class="{kind}" style="flex:{split[key]}" title="{split[key]:,} {key}"></i>'
        for kind, key in (("kept", "kept"), ("lost", "rejected"))
        if split[key]
    )
    return (
        f'<span>{escape(name)}</span><span class="bar">{parts}</span>'
        f'<span class="n">{split["kept"]:,} of {split["records"]:,}</span>'
    )


def _reason_bars(reasons: Counts) -> str:
    if not reasons:
        return '<p class="sub">None.</p>'
    most = max(reasons.values())
    rows = (
        f'<span>{escape(reason)}</span><span class="bar"><i class="lost" style="width:{100 * n / most:.1f}%"></i></span>'
        f'<span class="n">{n:,}</span>'
        for reason, n in reasons.items()
    )
    return f'<div class="bars">{"".join(rows)}</div>'


def _conversions(flags: Counts) -> Counts:
    names = {"mode": "colour mode", "orientation": "EXIF orientation", "depth": "bits a channel", "frames": "frames"}
    renamed = {
        " ".join((names.get(name, name), value)).strip(): count
        for flag, count in flags.items()
        for name, _, value in [flag.partition("=")]
        if flag != "converted"
    }
    return {**({"in all": flags["converted"]} if "converted" in flags else {}), **renamed}


def _table(title: str, counts: Counts, names: Mapping[str, str]) -> str:
    rows = "".join(f"<tr><td>{escape(names.get(k, k))}</td><td>{n:,}</td></tr>" for k, n in counts.items())
    content = f"<table>{rows}</table>" if rows else '<p class="sub">None.</p>'
    return f'<div class="card"><h3>{escape(title)}</h3>{content}</div>'


def _chart(title: str, unit: str, counts: Counts) -> str:
    values = {int(k): n for k, n in counts.items()}
    small = f" <small>{unit}, median {_median(values):g}</small>" if values and unit else ""
    return f'<div class="card"><h3>{title}{small}</h3>{histogram(values)}</div>'


def _median(values: Mapping[int, int]) -> float:
    """As ``shards stats`` has it: between the two in the middle where their number is even."""
    return float(np.median(np.repeat(list(values.keys()), list(values.values()))))


def histogram(values: Mapping[int, int]) -> str:
    """Bars as inline SVG: one per whole number while there are few, else bins of a round width."""
    if not values:
        return '<p class="sub">None.</p>'
    low, high = min(values), max(values)
    step = next(s for s in _round_steps() if (high // s - low // s) < NUM_BINS)
    first, num_bins = low // step, high // step - low // step + 1
    bins = [0] * num_bins
    for value, number in values.items():
        bins[value // step - first] += number
    width = min(CHART_W / num_bins, 48)
    tallest = max(bins)
    bars = []
    for i, number in enumerate(bins):
        start = (first + i) * step
        tall = CHART_H * number / tallest
        label = f"{start}" if step == 1 else f"{start} to {start + step - 1}"
        bars.append(
            f'<rect x="{i * width + 1:.1f}" y="{CHART_H - tall:.1f}" width="{max(1, width - 2):.1f}" '
            f'height="{tall:.1f}" rx="2"><title>{label}: {number:,}</title></rect>'
        )
    every = max(1, round(num_bins / 6))
    labels = "".join(
        f'<text x="{(i + 0.5) * width:.1f}" y="{CHART_H + 16}" text-anchor="middle">{(first + i) * step}</text>'
        for i in range(0, num_bins, every)
    )
    axis = f'<line x1="0" x2="{CHART_W}" y1="{CHART_H + 0.5}" y2="{CHART_H + 0.5}"/>'
    return f'<svg viewBox="-8 0 {CHART_W + 16} {CHART_H + 22}" role="img">{axis}{"".join(bars)}{labels}</svg>'


def _round_steps() -> list[int]:
    return [digit * 10**power for power in range(9) for digit in (1, 2, 5)]


def _note(shown: Sequence[gallery.Shown], total: int) -> str:
    return "none" if not total else f"{len(shown)} of {total:,}" if len(shown) < total else f"all {total:,}"


def _figure(shown: gallery.Shown) -> str:
    tag = f'<span class="tag">{escape(shown.tag)}</span><br>' if shown.tag else ""
    picture = f'<img src="{shown.thumbnail}" alt="" loading="lazy">' if shown.thumbnail else "no picture"
    return (
        f'<figure><div class="picture">{picture}</div><figcaption>{tag}{escape(shown.title)}'
        f'<span class="sub">{escape(shown.detail)}</span></figcaption></figure>'
    )
