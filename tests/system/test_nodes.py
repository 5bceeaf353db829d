"""Several nodes, as launchers of their own on this machine, started by the commands that a dry run prints."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import runs

from xctrain.launch import free_port

NUM_STEPS = 30


def settings(shards: Path, run: Path) -> list[str]:
    return runs.settings(shards, run, train__num_steps=NUM_STEPS, train__log_keys=True)


def commands(shards: Path, run: Path, master: str) -> list[list[str]]:
    """The command of each node, as printed."""
    config = runs.TESTS.parent / "configs" / "demo.yaml"
    options = ["--processes", "1", "--nodes", "2", "--master", master, "--dry-run"]
    asked = [sys.executable, "-m", "xctrain", "launch", str(config), *settings(shards, run), *options]
    printed = subprocess.run(asked, capture_output=True, text=True, check=True, cwd=runs.TESTS.parent).stdout
    lines = [shlex.split(line) for line in printed.splitlines()]
    assert [line[:4] for line in lines] == [["python", "-m", "xctrain", "launch"]] * 2
    return [[sys.executable, *line[1:]] for line in lines]


def start_nodes(shards: Path, run: Path) -> list[Any]:
    return [runs.start(command) for command in commands(shards, run, f"127.0.0.1:{free_port()}")]


def test_two_nodes_train_together_and_go_on_after_one_is_lost(drawn_shards: Path, tmp_path: Path) -> None:
    straight, lost = tmp_path / "straight", tmp_path / "lost"
    for node in start_nodes(drawn_shards, straight):
        runs.finish(node)
    first, second = start_nodes(drawn_shards, lost)
    runs.kill_at(second, lost, step=12)
    text = runs.finish(first, code=1)
    for node in start_nodes(drawn_shards, lost):
        runs.finish(node)

    assert "rank 0: lost another rank" in text
    assert runs.trajectory(lost) == runs.trajectory(straight)
    assert len(runs.trajectory(lost)) == NUM_STEPS
    assert runs.key_files(lost) == runs.key_files(straight)
    assert runs.weights(lost, NUM_STEPS) == runs.weights(straight, NUM_STEPS)


def test_signal_to_one_node_saves_and_stops_both(drawn_shards: Path, tmp_path: Path) -> None:
    nodes = start_nodes(drawn_shards, tmp_path)
    while runs.last_step(tmp_path) < 3:
        assert nodes[0].poll() is None
        time.sleep(0.01)
    nodes[1].send_signal(signal.SIGTERM)

    assert "start again to go on" in runs.finish(nodes[0], code=75)
    assert "node 1: stopped after saving; the summary stands on node 0" in runs.finish(nodes[1], code=75)


def test_nodes_that_do_not_share_the_run_folder_are_refused(drawn_shards: Path, tmp_path: Path) -> None:
    master = f"127.0.0.1:{free_port()}"
    folders = [tmp_path / name for name in ("here", "there")]
    nodes = [runs.start(commands(drawn_shards, run, master)[rank]) for rank, run in enumerate(folders)]

    text = runs.finish(nodes[0], code=1)
    runs.finish(nodes[1], code=1)
    host = socket.gethostname()
    assert f"{folders[0]}: is not the same folder for all: rank 0 on {host} sees lock" in text
    assert f"rank 1 on {host} sees lock none" in text


def test_first_node_that_cannot_be_reached_is_named(drawn_shards: Path, tmp_path: Path) -> None:
    second = commands(drawn_shards, tmp_path, f"127.0.0.1:{free_port()}")[1]
    text = runs.finish(runs.start([*second, "train.timeout_s=3"]), code=1)
    assert "rank 1: the ranks did not meet at 127.0.0.1:" in text
    assert "Traceback" not in text


def test_address_that_is_taken_is_named(drawn_shards: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        first = commands(drawn_shards, tmp_path, f"127.0.0.1:{port}")[0]
        text = runs.finish(runs.start(first), code=1)
    assert f"rank 0 cannot listen at 127.0.0.1:{port}, another process does; take another port" in text
    assert "Traceback" not in text


SRUN = """#!/bin/bash
# As Slurm does: the command once a node, signals passed on, the largest exit code.
shift
for node in 0 1; do SLURM_NODEID=$node "$@" & pids="$pids $!"; done
trap 'kill -TERM $pids' TERM
code=0
for pid in $pids; do
  wait $pid; ended=$?
  while kill -0 $pid 2> /dev/null; do wait $pid; ended=$?; done
  [ $ended -gt $code ] && code=$ended
done
exit $code
"""
SCONTROL = """#!/bin/bash
case $1 in show) echo 127.0.0.1; echo 127.0.0.2;; requeue) echo "requeued $2";; esac
"""


@pytest.mark.slow
def test_slurm_script_starts_every_node_and_is_queued_again_after_a_stop(drawn_shards: Path, tmp_path: Path) -> None:
    tools, run = tmp_path / "tools", tmp_path / "run"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    port = free_port()
    job = {"SLURM_JOB_ID": str(port - 20000), "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "GPUS": "1"}
    environment = {**os.environ, **job, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(runs.TESTS.parent)}
    config = str(runs.TESTS.parent / "configs" / "demo.yaml")

    def queue() -> "subprocess.Popen[str]":
        command = ["bash", "configs/slurm.sh", config, *settings(drawn_shards, run)]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=runs.TESTS.parent, env=environment, **pipes)

    stopped = queue()
    while runs.last_step(run) < 3:
        assert stopped.poll() is None
        time.sleep(0.01)
    stopped.send_signal(signal.SIGTERM)

    assert f"requeued {port - 20000}" in runs.finish(stopped, code=75)
    assert "requeued" not in runs.finish(queue())
    assert len(runs.trajectory(run)) == NUM_STEPS
