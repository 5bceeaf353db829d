"""How a run lies at an address: names of what is there, and what they say. Read by what sends it and what brings it back.

ADDRESS/run.json               which run it is
ADDRESS/metrics.jsonl, keys-rank0.jsonl …   its logs, up to the newest checkpoint or beyond
ADDRESS/step-00000010/…        a checkpoint, files.json last: without that it is none

RUN/push.json                  the same id, and the address that the run was brought from, if it was
"""

import json
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from shards.atomic import write_file
from shards.remote import Remote
from xctrain.best import Scores
from xctrain.checkpoint import FILES, POSITION, SCORES

ABOUT = "run.json"  # there
_OWN = "push.json"  # here


def step_name(step: int) -> str:
    """Name of a checkpoint's folder."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of the checkpoint that a file there belongs to; None of other files."""
    folder, slash, _ = name.partition("/")
    number = folder.removeprefix("step-")
    return int(number) if slash and folder != number and number.isdigit() else None


def whole_steps(there: Iterable[str]) -> list[int]:
    """Steps of the checkpoints that are complete there, newest first."""
    found = (step_of(name) for name in there if name.endswith(f"/{FILES}"))
    return sorted((step for step in found if step is not None), reverse=True)


def scores_of(remote: Remote, steps: Iterable[int]) -> dict[int, Scores]:
    """What the checkpoints there say of themselves."""
    found = {}
    for step in steps:
        with suppress(ValueError, AttributeError):
            found[step] = json.loads(remote.read(f"{step_name(step)}/{POSITION}")).get(SCORES, {})
    return found


def id_at(remote: Remote, there: Iterable[str]) -> str | None:
    """What names the run there; None where there is none, or what is there is damaged."""
    try:
        return str(json.loads(remote.read(ABOUT))["id"]) if ABOUT in there else None
    except (ValueError, TypeError, KeyError):
        return None


def known(run_dir: Path) -> dict[str, Any]:
    """The id of the run here, and from where it was brought; empty for one that was neither sent nor brought."""
    try:
        found = json.loads((run_dir / _OWN).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def remember(run_dir: Path, run_id: str | None, brought_from: str | None) -> None:
    """Note them; without an id, a new one."""
    run_dir.mkdir(parents=True, exist_ok=True)
    write_file(run_dir / _OWN, json.dumps({"id": run_id or uuid.uuid4().hex, "from": brought_from}).encode())
