"""What a run folder holds, read leniently: whatever is absent or torn is left out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xctrain.charts import Point
from xctrain.log import CAPTIONS, METRICS, SAMPLES, read_lines

Event = Mapping[str, Any]


@dataclass(frozen=True)
class History:
    """What a run folder holds, by kind; each list may be empty."""

    name: str
    steps: list[Event]
    evals: list[Event]  # of the only dataset, or the first one of a mix
    others: list[Event]  # of the other datasets of a mix
    blind: list[Event]  # evaluations on blank pictures: what the scores are worth without looking
    starts: list[Event]
    stops: list[Event]
    captions: dict[int, dict[str, Event]]  # by step, then by key: of evaluations and of samples on the way
    config: dict[str, Any]
    environment: dict[str, Any]
    damaged: list[str]  # lines of metrics.jsonl that cannot be read, and so are left out

    @classmethod
    def read(cls, run_dir: Path) -> "History":
        """Read what is there; a torn last line, damaged ones and absent files are passed over."""
        damaged: list[str] = []
        kinds: dict[str, list[Event]] = {"step": [], "eval": [], "start": [], "stop": []}
        for event in read_lines(run_dir / METRICS, damaged):
            kinds.setdefault(event["event"], []).append(event)
        seeing = [event for event in kinds["eval"] if not event.get("blank")]
        first_source = seeing[0].get("source") if seeing else None
        return cls(
            name=run_dir.resolve().name,
            steps=kinds["step"],
            evals=[event for event in seeing if event.get("source") == first_source],
            others=[event for event in seeing if event.get("source") != first_source],
            blind=[event for event in kinds["eval"] if event.get("blank")],
            starts=kinds["start"],
            stops=kinds["stop"],
            captions=_captions(run_dir),
            config=_mapping(run_dir / "config.yaml"),
            environment=_mapping(run_dir / "environment.json"),
            damaged=damaged,
        )

    def curve(self, name: str) -> list[Point]:
        """A field of the step lines over steps."""
        return curve(self.steps, name)

    def doubts(self) -> list[str]:
        """What a reader of the run's page has to know."""
        found = [f"{line}; the rest is drawn" for line in self.damaged]
        return found if self.steps else [*found, f"{self.name}: no step was trained, or none is in the log"]

    def setting(self, name: str) -> Any:
        """A field of the config, None where it is not set."""
        value: Any = self.config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


def number(value: Any) -> float | None:
    """A figure of a log line, None where it is absent or no number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def curve(events: Sequence[Event], name: str) -> list[Point]:
    """One field of log lines over their steps."""
    pairs = ((number(e.get("step")), number(e.get(name))) for e in events)
    return [(step, value) for step, value in pairs if step is not None and value is not None]


def _captions(run_dir: Path) -> dict[int, dict[str, Event]]:
    found: dict[int, dict[str, Event]] = {}
    for folder in (SAMPLES, CAPTIONS):
        for path in (run_dir / folder).glob("step-*.jsonl"):
            digits = path.stem.removeprefix("step-")
            lines = {str(line.get("key")): line for line in read_lines(path, [])}
            if digits.isdecimal() and lines:
                found.setdefault(int(digits), {}).update(lines)
    return found


def _mapping(path: Path) -> dict[str, Any]:
    """What a YAML or JSON file holds; nothing where it is absent or not whole."""
    import yaml

    read: Callable[[str], Any] = yaml.safe_load
    try:
        values = read(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}
