"""One JSON line per event, cut back on resume so that each step stands once."""

import json
import os
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from types import UnionType
from typing import Any

from shards.atomic import write_file
from shards.errors import UserError, counted

METRICS = "metrics.jsonl"
CAPTIONS = "captions"  # folder of what evaluations said
SAMPLES = "samples"  # folder of what the model said of a few pictures on the way

_Kind = type | UnionType
_KINDS: dict[_Kind, str] = {str: "text", int: "a whole number", int | float: "a number", list: "a list"}
# Fields that readers look up without asking whether they are there.
_OF_METRICS: dict[str, _Kind] = {"event": str, "step": int}
_OF_EVENTS: dict[str, dict[str, _Kind]] = {
    "start": {"samples_consumed": int},
    "step": {"samples_consumed": int, "loss": int | float, "digest": str},
    "skip": {"samples_consumed": int},
    "eval": {"samples_consumed": int},
}
_OF_KEYS: dict[str, _Kind] = {"step": int, "samples_consumed": int, "n": list, "keys": list}

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def keys_name(rank: int) -> str:
    """File of what one rank trained on."""
    return f"keys-rank{rank}.jsonl"


class JsonLines:
    """Appends events to one file; each line is whole in the page cache when ``write`` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("a", encoding="utf-8")

    def write(self, **fields: Any) -> None:
        """Append one line.

        Raises:
            UserError: the disk is full.
        """
        try:
            self._file.write(_encode(fields) + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be written: {error.strerror}; make room, then start again to go on",
                path=self.path,
            ) from error

    def sync(self) -> None:
        """Make what was written durable; called before the checkpoint that counts on it."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Make durable and close."""
        self.sync()
        self._file.close()


def read_lines(path: Path, damaged: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Every whole line of a log; none when there is no such file. A torn last line, left by a kill, is passed over.

    Raises:
        UserError: a line is not what this log has, and no torn last one; with ``damaged``, it is named there and left out.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, 1):
            try:
                line = parse(text, path.name)
            except ValueError as error:
                if not text.endswith("\n"):
                    continue
                found = f"{path}: line {number} {error}"
                if damaged is None:
                    raise UserError(f"{found}; {way_out(path)}", path=path) from None
                damaged.append(found)
                continue
            yield line


def parse(text: str | bytes, name: str) -> dict[str, Any]:
    """One line of the log of this name, with the fields that its readers count on.

    Raises:
        ValueError: it is something else; the message says what.
    """
    try:
        line = json.loads(text)
    except ValueError:
        raise ValueError("is not JSON") from None
    if not isinstance(line, dict):
        raise ValueError("is no JSON object")
    for field, kind in _fields(name, line).items():
        if field not in line:
            raise ValueError(f"has no {field}")
        if not isinstance(line[field], kind):
            raise ValueError(f"has {json.dumps(line[field])[:40]} as {field}, expected {_KINDS[kind]}")
    if _is_keys(name) and len(line["n"]) != len(line["keys"]):
        raise ValueError(f"has {counted(len(line['n']), 'position')} and {counted(len(line['keys']), 'key')}")
    return line


def _fields(name: str, line: dict[str, Any]) -> dict[str, _Kind]:
    if name == METRICS:
        return {**_OF_METRICS, **_OF_EVENTS.get(str(line.get("event")), {})}
    return _OF_KEYS if _is_keys(name) else {}


def _is_keys(name: str) -> bool:
    return fnmatch(name, keys_name(0).replace("0", "*"))


def require_whole_log(run_dir: Path) -> None:
    """Refuse a damaged log before a model is loaded for it.

    Raises:
        UserError: a line is not what the log has.
    """
    for _ in read_lines(run_dir / METRICS):
        pass


def way_out(path: Path) -> str:
    """What to do about a damaged line of a log."""
    if path.name != METRICS and not _is_keys(path.name):
        return "remove that line"
    return (
        "put it back from a copy of the run, or remove it if the run did not write it; a removed line of its own is gone for "
        "the audit, which misses its step for good, unless a checkpoint before it is still kept and training goes back to it "
        "(train.resume=RUN/checkpoints/step-N) and writes it again"
    )


def cut_back(run_dir: Path, samples_consumed: int) -> None:
    """Drop from the logs of every rank, also of ranks that are no more, what came after ``samples_consumed``."""
    for path in [run_dir / METRICS, *sorted(run_dir.glob(keys_name(0).replace("0", "*")))]:
        if path.exists():
            _cut_file(path, samples_consumed)


def _cut_file(path: Path, samples_consumed: int) -> None:
    data = path.read_bytes()
    kept = b"".join(line for line in data.splitlines(keepends=True) if _stands(line, samples_consumed))
    if kept != data:
        write_file(path, kept)


def _stands(line: bytes, samples_consumed: int) -> bool:
    try:
        return bool(json.loads(line)["samples_consumed"] <= samples_consumed) and line.endswith(b"\n")
    except (ValueError, KeyError, TypeError):
        return False
