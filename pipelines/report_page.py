"""The page of a build: report.html, one file that needs no network. Everything that came from the source is escaped."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from pipelines.gallery import Shown

Counts = Mapping[str, int]
NUM_BINS = 24
CHART_W, CHART_H = 340, 120  # of a histogram's bars, in SVG units
MOST_COLUMNS = 120  # of a chart over shards; more shards are drawn as means of neighbours
TOP_WORDS = 36

CLEANING = {
    "changed": "normalised (Unicode, white space)",
    "duplicate": "dropped: said twice of one picture",
    "empty": "dropped: empty or punctuation only",
    "not_text": "dropped: not a text",
    "script": "dropped: written in another script",
    "too_long": "dropped: too long",
    "too_short": "dropped: too short",
}
LEFT_ASIDE = {
    "annotations_of_unlisted_images": "annotations of images that are not listed",
    "annotation_ids_used_twice": "annotations whose id was used before",
    "images_listed_twice": "images listed a second time",
    "ids_used_twice": "images whose id another one has",
    "records_without_split": "images of no split",
    "beyond_limit": "images beyond the limit of their source",
    "json_members_that_are_no_object": "json members that are damaged",
}


def render(
    facts: Mapping[str, Any], kept: Sequence[Shown], rejected: Sequence[Shown], groups: Sequence[Sequence[Shown]]
) -> str:
    """The page from the content of report.json and thumbnails."""
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
    title, heading, about = _headings(facts)
    return template.substitute(
        title=escape(title),
        heading=escape(heading),
        about=about,
        tiles="".join(f'<div class="card tile"><b>{number}</b><span>{name}</span></div>' for number, name in tiles),
        splits="".join(_split_bar(name, split) for name, split in facts["splits"].items()),
        sources=_sources(facts["sources"]),
        reasons=_reason_bars(facts["reasons"]),
        charts="".join(
            _chart(title, unit, stats.get(name, {}))
            for name, title, unit in (
                ("width_px", "Width", "pixels"),
                ("height_px", "Height", "pixels"),
                ("size_kb", "Size of a stored picture", "kB"),
                ("words_per_caption", "Caption length", "words"),
                ("captions_per_image", "Captions of a picture", ""),
            )
        ),
        filters=_filters(facts["filters"]),
        vocabulary_note=_vocabulary_note(facts["vocabulary"], num_captions),
        vocabulary=_word_bars(facts["vocabulary"]["top"]),
        shards=_balance(facts["shards"]),
        groups_note=_groups_note(groups, facts),
        groups="".join(f'<div class="gallery group">{"".join(map(_figure, group))}</div>' for group in groups),
        tables=_table("Colour modes of the files", stats.get("modes", {}), {})
        + _table("Pictures stored in another form, and why", _conversions(stats.get("flags", {})), {})
        + _table("Captions", stats.get("caption_cleaning", {}), CLEANING)
        + _table("Left aside in the sources", left_aside, LEFT_ASIDE),
        kept_note=_note(kept, facts["kept"]),
        kept="".join(map(_figure, kept)),
        rejected_note=_note(rejected, facts["rejected"]),
        rejected="".join(map(_figure, rejected)),
        settings=escape(json.dumps({"config": facts["config"], "versions": facts["versions"]}, indent=1)),
    )


def _headings(facts: Mapping[str, Any]) -> tuple[str, str, str]:
    """Title, heading and the line below it: what this is a report of. Only what was published has an id."""
    name, why = facts["name"], facts.get("why", "")
    at = escape(facts["created_at"].replace("T", " ").replace("+00:00", " UTC"))
    dataset = f"Dataset <code>{escape((facts['manifest_id'] or '')[:16])}</code>"
    if facts["of"] == "addition":
        added_to = f"which was <code>{escape(why[:16])}</code> before. All numbers are of what was added."
        return (
            f"Addition report: {name}",
            f"{name}: addition",
            f"Added {at} in {facts['num_shards']} shards. {dataset}, {added_to}",
        )
    if facts["of"] == "preview":
        records = facts["kept"] + facts["rejected"]
        tried = f"Tried {at} on {records:,} records of the source. No shard was written and this is no dataset."
        return f"Preview: {name}", f"{name}: preview of {records:,} records", tried
    if facts["of"] == "unpublished":
        return f"Not published: {name}", f"{name}: not published", f"Tried {at}. This is no dataset: {escape(why)}"
    return f"Build report: {name}", name, f"Built {at} in {facts['num_shards']} shards. {dataset}"


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


def _sources(sources: Sequence[Mapping[str, Any]]) -> str:
    if len(sources) < 2:
        return ""
    bars = (_split_bar(s["name"] or s["kind"], {**s, "records": s["kept"] + s["rejected"]}) for s in sources)
    return f'<h3 class="next">By source</h3><div class="bars">{"".join(bars)}</div>'


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


def _filters(rows: Sequence[Mapping[str, Any]]) -> str:
    """One row a filter: what is always on, then what has a setting, then the limits on captions."""
    cells = "".join(
        f'<tr class="{"zero" if not row["count"] else ""}"><td>{escape(row["filter"])}</td>'
        f"<td>{escape(row['setting'] or 'always on')}</td><td>{row['count']:,}</td></tr>"
        for row in rows
    )
    return f'<table class="filters"><tr><th>Filter</th><th>Setting</th><th>Took</th></tr>{cells}</table>'


def _vocabulary_note(vocabulary: Mapping[str, Any], num_captions: int) -> str:
    number = vocabulary["num_words"]
    shown = f"{number:,}" if number < 512 else f"about {float(f'{number:.2g}'):,.0f}"
    return f"{shown} different words in {num_captions:,} captions; the most frequent ones" if number else "none"


def _groups_note(groups: Sequence[Any], facts: Mapping[str, Any]) -> str:
    if facts["config"]["filters"]["near_duplicate_bits"] is None:
        return "not looked for: filters.near_duplicate_bits is off"
    return f"{_note(groups, facts['near_duplicate_groups'])} groups, the largest first"


def _word_bars(top: Counts) -> str:
    shown = list(top.items())[:TOP_WORDS]
    most = max((n for _, n in shown), default=1)
    rows = (
        f'<div><span>{escape(word)}</span><span class="bar"><i class="kept" style="width:{100 * n / most:.1f}%"></i></span>'
        f'<span class="n">{n:,}</span></div>'
        for word, n in shown
    )
    return "".join(rows)


def _balance(shards: Sequence[Mapping[str, Any]]) -> str:
    charts = (
        ("samples", "Samples", "{:,.0f}", 1),
        ("bytes", "Size in MB", "{:,.3g}", 1e6),
        ("words_per_caption", "Words of a caption, mean", "{:.2f}", 1),
        ("rejected", "Records rejected", "{:,.0f}", 1),
    )
    return "".join(_columns(title, shards, name, form, unit) for name, title, form, unit in charts)


def _columns(title: str, shards: Sequence[Mapping[str, Any]], name: str, form: str, unit: float) -> str:
    """A column a shard, in order, from zero; neighbours are drawn as their mean where there are too many."""
    if not shards:
        return f'<div class="card"><h3>{title}</h3><p class="sub">None.</p></div>'
    values = [shard[name] / unit for shard in shards]
    least, middle, most = (form.format(v) for v in (min(values), float(np.median(values)), max(values)))
    groups = np.array_split(np.arange(len(values)), min(len(values), MOST_COLUMNS))
    width, tallest = min(CHART_W / len(groups), 48), max(values) or 1
    bars = []
    for i, group in enumerate(groups):
        mean = float(np.mean([values[j] for j in group]))
        tall = CHART_H * mean / tallest
        first, last = shards[group[0]]["name"], shards[group[-1]]["name"]
        label = escape(first if first == last else f"{first} to {last}")
        gap = min(2, width / 4)
        bars.append(
            f'<rect x="{i * width + gap / 2:.1f}" y="{CHART_H - tall:.1f}" width="{width - gap:.1f}" height="{tall:.1f}">'
            f"<title>{label}: {form.format(mean)}</title></rect>"
        )
    axis = f'<line x1="0" x2="{CHART_W}" y1="{CHART_H + 0.5}" y2="{CHART_H + 0.5}"/>'
    chart = f'<svg viewBox="-8 0 {CHART_W + 16} {CHART_H + 4}" role="img">{axis}{"".join(bars)}</svg>'
    spread = f"{least}" if least == most else f"{least} to {most}, median {middle}"
    return f'<div class="card"><h3>{title} <small>{spread}</small></h3>{chart}</div>'


def _conversions(flags: Counts) -> Counts:
    totals = {"converted": "in all as PNG", "resized": "in all as JPEG, made smaller"}
    names = {"mode": "colour mode", "orientation": "EXIF orientation", "depth": "bits a channel", "frames": "frames"}
    renamed = {
        " ".join((names.get(name, name), value)).strip(): count
        for flag, count in flags.items()
        for name, _, value in [flag.partition("=")]
        if flag not in totals
    }
    return {text: flags[flag] for flag, text in totals.items() if flag in flags} | renamed


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


def _note(shown: Sequence[Any], total: int) -> str:
    return "none" if not total else f"{len(shown)} of {total:,}" if len(shown) < total else f"all {total:,}"


def _figure(shown: Shown) -> str:
    kind = "tag kept-tag" if shown.tag.startswith("stays") else "tag"
    tag = f'<span class="{kind}">{escape(shown.tag)}</span><br>' if shown.tag else ""
    picture = f'<img src="{shown.thumbnail}" alt="" loading="lazy">' if shown.thumbnail else "no picture"
    return (
        f'<figure><div class="picture">{picture}</div><figcaption>{tag}{escape(shown.title)}'
        f'<span class="sub">{escape(shown.detail)}</span></figcaption></figure>'
    )
