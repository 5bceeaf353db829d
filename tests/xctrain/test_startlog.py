import json
from pathlib import Path

import pytest

from xctrain.startlog import previous_end
from xctrain.state import TrainState

START = {"event": "start", "step": 0, "samples_consumed": 0, "time": 0.0}
STEPS = [{"event": "step", "step": n, "samples_consumed": 12 * n, "loss": 1.0, "digest": "0"} for n in (1, 2, 3)]
AHEAD = {"event": "out_of_memory", "step": 4, "samples_consumed": 36}
STOP = {"event": "stop", "step": 3, "samples_consumed": 36, "reason": "signal"}


@pytest.mark.parametrize(
    ("lines", "end", "lost"),
    [
        ([], None, 0),
        ([START, *STEPS], "killed", 2),
        ([START, *STEPS, AHEAD], "killed", 2),  # of a step that was still to come
        ([START, *STEPS, STOP], "signal", 2),
        ([START, *STEPS, {**START, "step": 1, "samples_consumed": 12}], "killed", 0),
    ],
)
def test_start_says_how_the_last_one_ended_and_how_many_steps_it_lost(
    tmp_path: Path, lines: list[dict[str, object]], end: str | None, lost: int
) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    state = TrainState(step=1, samples_consumed=12)
    assert previous_end(tmp_path, state) == {"previous_end": end, "lost_steps": lost}
