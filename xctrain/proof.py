"""What an audit found, as parts of a run's page."""

from collections.abc import Mapping
from html import escape
from typing import Any

from xctrain.page import Bad, table


def verdict(audit: Mapping[str, Any] | None) -> str:
    """The audit in one card."""
    if audit is None:
        state, sign, title = "", "?", "Not audited"
        text = "python -m xctrain audit RUN compares what was trained with what the order says"
    elif audit.get("ok"):
        hidden = sum(epoch.get("masked") or 0 for epoch in audit.get("epochs") or ())
        state, sign, title = "good", "✓", f"Every sample exactly once{f', but {hidden} masked' if hidden else ''}"
        by_key = audit.get("evidence") == "keys"
        text = (
            "Audited key by key: none repeated, none skipped"
            if by_key
            else "The digest of all trained samples is that of the order"
        )
    else:
        state, sign, title = "bad", "!", "The audit failed"
        text = "; ".join(map(str, audit.get("findings") or ())) or "samples were repeated or skipped, see below"
    return f'<div class="card verdict {state}"><i>{sign}</i><p><b>{title}</b>{escape(text)}</p></div>'


def audit_table(audit: Mapping[str, Any] | None) -> str:
    """The audit's rows, by dataset of a mix and by segment where there are several; then what the segments were."""
    epochs, segments = (audit or {}).get("epochs") or (), (audit or {}).get("segments") or ()
    mixed, split = any(e.get("source") for e in epochs), len(segments) > 1
    heads = [*(["Dataset"] if mixed else []), "Epoch", *(["Segment"] if split else [])]
    rows = []
    for e in epochs:
        where = [*([e.get("source")] if mixed else []), e.get("epoch", "?"), *([e.get("segment")] if split else [])]
        counts = [
            e.get("seen"),
            e.get("num_samples"),
            *(Bad(e.get(n)) if e.get(n) else e.get(n) for n in ("repeated", "skipped", "masked")),
        ]
        rows.append([*where, *counts])
    totals = [[e.get(n) for e in epochs] for n in ("seen", "", "repeated", "skipped", "masked")]
    if len(rows) > 1:
        sums = [None if None in column else sum(column) for column in totals]
        rows.append(["all", *[""] * (len(heads) - 1), *(Bad(n) if n and i else n for i, n in enumerate(sums))])
    about = "samples of each epoch, compared with what manifest and order say"
    audited = table("Audit", about, (*heads, "Seen", "Of", "Repeated", "Skipped", "Masked"), rows)
    if not split:
        return audited
    made_of = [
        [i, s["first_n"], s["first_step"], s["first_epoch"], s["global_batch"], "; ".join(s["sources"])]
        for i, s in enumerate(segments)
    ]
    for row, segment in zip(made_of, segments, strict=True):
        row[-1] += "" if segment["begun"] else ", not reached yet"
    heads = ["Segment", "From position", "Step", "Epoch", "Global batch", "Data"]
    return audited + table("Segments", "what was changed between two starts", heads, made_of)
