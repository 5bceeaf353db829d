"""What the commands print alike: tables, sizes, findings and JSON."""

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shards.errors import counted

if TYPE_CHECKING:
    from shards.verify import Finding

MAX_SHOWN = 20  # findings printed per file; --json gives all


def print_json(value: Any) -> None:
    """As text that the terminal can show."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding)
    except UnicodeEncodeError:  # not a UTF-8 terminal, or half a character pair in a caption
        text = json.dumps(value, indent=1)
    print(text)


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their longest cell; the first one stands left, the others right."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  ".join(cells).rstrip())


def print_findings(findings: "Sequence[Finding]") -> dict[str, int]:
    """The first findings of each file; how many each has."""
    shown: dict[str, int] = {}
    for finding in findings:
        shown[finding.path] = shown.get(finding.path, 0) + 1
        if shown[finding.path] <= MAX_SHOWN:
            print(finding)
    for path, count in shown.items():
        if count > MAX_SHOWN:
            print(f"{path}: {counted(count - MAX_SHOWN, 'more finding')}; --json lists them")
    return shown


def size_text(num_bytes: int) -> str:
    """In MB or GB."""
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:.2f} GB"
