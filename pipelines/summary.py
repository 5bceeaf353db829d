"""What a build or an addition came to, for people and programs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shards.errors import counted
from shards.remote import is_remote


@dataclass(frozen=True)
class Summary:
    """What a build came to. ``unchanged``: the folder held just this already, nothing was written."""

    out: Path | str
    manifest_id: str
    splits: Mapping[str, int]
    rejected: Mapping[str, int]
    unchanged: bool
    stale: Sequence[str] = field(default_factory=tuple)
    parent: str | None = None  # what was added to
    added: Mapping[str, int] = field(default_factory=dict)  # samples by split
    num_sent: int = 0  # objects sent to an address
    rejects: str = ""  # file on this machine that says of each rejected record why
    report: str = ""  # the page of the same

    def to_json(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            **vars(self),
            "out": str(self.out),
            "splits": dict(self.splits),
            "rejected": dict(self.rejected),
            "stale": list(self.stale),
            "added": dict(self.added),
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Summary":
        """The summary that ``to_json`` gave."""
        out = values["out"]
        return Summary(**{**values, "out": out if is_remote(out) else Path(out)})

    def __str__(self) -> str:
        kept = ", ".join(f"{split} {count}" for split, count in self.splits.items())
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self.rejected.items()))
        what = f"{sum(self.splits.values())} kept ({kept})"
        if self.added:
            added = ", ".join(f"{split} {count}" for split, count in self.added.items())
            what = f"{sum(self.added.values())} added ({added}) to now {sum(self.splits.values())} ({kept})"
        lines = [
            f"{self.out}: {what}, {sum(self.rejected.values())} rejected"
            + (f" ({reasons})" if reasons else "")
            + (", nothing has changed" if self.unchanged else ""),
            f"manifest_id {self.manifest_id}",
        ]
        if self.added:
            lines.append(f"parent      {self.parent}")
        if self.rejected:
            lines.append(f"rejects     {self.rejects}")
        if self.num_sent:
            lines.append(f"{counted(self.num_sent, 'object')} sent")
        if self.stale:
            lines.append(f"no longer part of it: {', '.join(self.stale)}; build.overwrite=true removes them")
        return "\n".join(lines)
