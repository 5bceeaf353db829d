"""The launcher with ranks that need no torch: exit codes, signals, and what is left behind."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import runs

from xctrain.errors import ConfigError
from xctrain.launch import Nodes

# Each rank says where it is and does what the test wants; ``sleep`` waits to be ended.
RANK = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
def sleep():
    time.sleep(60)
def at(number, code):
    signal.signal(number, lambda *_: os._exit(code))
def ready():
    open(f"{sys.argv[1]}/{rank}", "w").write(str(os.getpid()))
"""


def launch(body: str, folder: Path, processes: int = 2, more: str = "") -> "runs.subprocess.Popen[str]":
    command = [sys.executable, "-c", RANK + body, str(folder)]
    code = f"""
import sys
from pathlib import Path
from xctrain import launch as launcher
from xctrain.launch import Nodes, launch
def graces(usual_s, saving_s):
    launcher._GRACE_S, launcher.SAVING_GRACE_S = usual_s, saving_s
    return {{}}
sys.exit(launch({command!r}, {processes}, {more}))
"""
    return runs.start([sys.executable, "-c", code])


def wait_for(folder: Path, processes: int = 2) -> list[int]:
    """Process ids of the ranks, once all are ready."""
    until = time.monotonic() + 120
    while True:
        texts = [path.read_text() for path in sorted(folder.iterdir())]
        if len(texts) == processes and all(texts):
            return [int(text) for text in texts]
        assert time.monotonic() < until, "the ranks did not start"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int]) -> bool:
    until = time.monotonic() + 30
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(alive, pids))


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((0, 0), 0),
        ((75, 75), 75),
        ((0, 75), 75),
        ((0, 1), 1),
        ((75, 1), 1),
        ((2, 2), 2),
        ((1, 2), 2),
        ((0, 3), 3),
    ],
)
def test_exit_codes_are_kept_apart(tmp_path: Path, codes: tuple[int, int], expected: int) -> None:
    runs.finish(launch(f"os._exit({codes}[rank])", tmp_path), code=expected)


def test_ranks_get_the_standard_variables(tmp_path: Path) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    text = runs.finish(
        launch(f"os.write(1, (' '.join(os.environ[n] for n in {names}) + chr(10)).encode())", tmp_path, 3)
    )
    assert sorted(text.splitlines()) == [f"{r} {r} 3 3 127.0.0.1" for r in range(3)]


def test_ranks_of_a_node_are_numbered_behind_those_of_the_nodes_before_it(tmp_path: Path) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    body = f"os.write(1, (' '.join(os.environ[n] for n in {names}) + chr(10)).encode())"
    text = runs.finish(launch(body, tmp_path, 2, "Nodes(3, 1, 'first', 4567)"))
    assert sorted(text.splitlines()) == [
        "2 0 6 2 first 4567",
        "3 1 6 2 first 4567",
        "node 1: done; the summary stands on node 0",
    ]


def test_only_rank_0_speaks_on_the_screen_and_the_last_words_of_one_that_failed(tmp_path: Path) -> None:
    ready, logs = tmp_path / "ready", tmp_path / "logs"
    ready.mkdir()
    body = "print(f'here is {rank}', flush=True); sys.exit('error: no disk') if rank == 2 else ready(); sleep()"
    for _ in range(2):
        text = runs.finish(launch(body, ready, 3, f"logs=Path({str(logs)!r})"), code=1)
        log = logs / "rank-2.log"
        assert text.splitlines() == [
            "here is 0",
            "rank 2: here is 2",
            "rank 2: error: no disk",
            f"rank 2: more in {log}",
        ]
    assert sorted(path.name for path in logs.iterdir()) == ["rank-1.log", "rank-2.log"]
    assert [line for line in (logs / "rank-1.log").read_text().splitlines() if line[:4] == "here"] == ["here is 1"] * 2


def test_run_in_which_nothing_moves_is_ended_and_says_what_each_rank_did_last(tmp_path: Path) -> None:
    body = "from xctrain.phase import enter; enter(f'step {7 + rank}'); at(signal.SIGTERM, 9); ready(); sleep()"
    process = launch(body, tmp_path, 2, "stall_s=1.5")
    pids = wait_for(tmp_path)
    lines = runs.finish(process, code=1).splitlines()
    assert lines[0] == "no rank has come further for 1.5 seconds, all are ended"
    assert [line.partition(", since")[0] for line in lines[1:]] == [
        "rank 0 was last at: step 7",
        "rank 1 was last at: step 8",
    ]
    assert gone(pids)


def test_run_that_moves_is_not_ended(tmp_path: Path) -> None:
    body = "from xctrain.phase import enter; [(enter(f'{i}'), time.sleep(0.1)) for i in range(40)]"
    assert runs.finish(launch(body, tmp_path, 1, "stall_s=1.5")) == ""


def test_work_that_may_take_longer_is_not_ended(tmp_path: Path) -> None:
    body = "from xctrain.phase import enter; enter('compiling', 60); time.sleep(3)"
    assert runs.finish(launch(body, tmp_path, 1, "stall_s=1.5")) == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 0, None), "--nodes is 0, expected 1 or more"),
        ((2, 2, "a"), "--node-rank is 2, of 2 nodes; expected 0 to 1"),
        ((2, 0, None), "--nodes is 2, --master is missing; give name or address of node 0, or HOST:PORT"),
        ((2, 0, "a:b"), "--master is a:b, expected HOST or HOST:PORT; correct the port"),
    ],
)
def test_nodes_that_cannot_be_are_refused(arguments: tuple[int, int, str | None], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Nodes.of(*arguments)
    assert str(caught.value) == text


def test_threads_are_shared_out_unless_they_are_set(tmp_path: Path) -> None:
    text = runs.finish(launch("print(os.environ['OMP_NUM_THREADS'])", tmp_path, 1))
    assert text.split() == ["1"]


def test_killed_rank_ends_the_others_and_is_named_with_its_signal(tmp_path: Path) -> None:
    process = launch("ready(); at(signal.SIGTERM, 9); sleep()", tmp_path, 3)
    pids = wait_for(tmp_path, 3)
    os.kill(pids[1], signal.SIGKILL)
    text = runs.finish(process, code=1)
    assert text == "rank 1 was ended by SIGKILL; start again to go on from the newest checkpoint\n"
    assert gone(pids)


def test_rank_that_fails_ends_a_rank_that_hangs(tmp_path: Path) -> None:
    process = launch("ready(); sleep() if rank else os._exit(1)", tmp_path)
    runs.finish(process, code=1)
    assert gone(wait_for(tmp_path))


SAVES = """
from xctrain.phase import enter, saving
at(signal.SIGTERM, 9)
if rank == 0:
    with saving():
        ready()
        enter("waiting for the checkpoint to be written")
        time.sleep(1)
        print("saved", flush=True)
    os._exit(1)
ready()
sleep()
"""


@pytest.mark.parametrize(("limit_s", "expected"), [(60, ["saved"]), (0.3, [])])
def test_checkpoint_under_way_when_a_rank_dies_is_given_time_within_a_limit(
    tmp_path: Path, limit_s: float, expected: list[str]
) -> None:
    process = launch(SAVES, tmp_path, more=f"**graces(0.1, {limit_s})")
    pids = wait_for(tmp_path)
    os.kill(pids[1], signal.SIGKILL)
    lines = runs.finish(process, code=1).splitlines()
    assert [line for line in lines if line == "saved"] == expected
    assert f"a checkpoint is being written; waiting for it, {limit_s} seconds at most" in lines
    assert gone(pids)


def test_killed_launcher_leaves_no_rank(tmp_path: Path) -> None:
    process = launch("at(signal.SIGTERM, 9); ready(); sleep()", tmp_path)
    pids = wait_for(tmp_path)
    process.kill()
    process.communicate()
    assert gone(pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_reaches_every_rank_once(tmp_path: Path, number: signal.Signals) -> None:
    process = launch(f"at({int(number)}, 75); ready(); sleep()", tmp_path)
    wait_for(tmp_path)
    os.killpg(process.pid, number)  # as a terminal does; the ranks are not in this group
    assert runs.finish(process, code=75) == ""


def test_signal_before_the_ranks_listen_is_a_stop_too(tmp_path: Path) -> None:
    process = launch("signal.signal(signal.SIGINT, signal.SIG_DFL); ready(); sleep()", tmp_path)
    wait_for(tmp_path)
    process.send_signal(signal.SIGINT)
    text = runs.finish(process, code=75)
    assert text == "stopped before the first step, nothing was to be saved; start again to go on\n"


def test_second_signal_is_passed_on_too(tmp_path: Path) -> None:
    body = """
def note(*_):
    at(signal.SIGTERM, 1)
    open(f"{sys.argv[1]}/{rank}", "w").write("1")
signal.signal(signal.SIGTERM, note)
ready()
while True:
    time.sleep(1)
"""
    process = launch(body, tmp_path)
    wait_for(tmp_path)
    process.send_signal(signal.SIGTERM)
    while {path.read_text() for path in tmp_path.iterdir()} != {"1"}:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    runs.finish(process, code=1)
