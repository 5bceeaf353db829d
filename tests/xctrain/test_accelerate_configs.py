"""Each shipped file for `accelerate launch` starts and trains, on CPU processes in the place of GPUs."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import runs
import yaml

from xctrain.launch import free_port

FOLDER = runs.TESTS.parent / "configs" / "accelerate"
MODES = {"fsdp-8gpu": "fsdp", "zero2-8gpu": "zero2"}
SLOW = ("1gpu", "4gpu", "8gpu", "zero2-8gpu")


def command(name: str, shards: Path, run: Path, *options: str) -> list[str]:
    arguments = runs.settings(shards, run, train__num_steps=3, parallel__mode=MODES.get(name, "ddp"))
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    port = ["--main_process_port", str(free_port())] if "--main_process_port" not in options else []
    script = [str(runs.TESTS / "tiny.py"), os.devnull, *arguments]
    return [*launcher, "--config_file", str(FOLDER / f"{name}.yaml"), *port, *options, *script]


def world_of(run: Path) -> dict[str, Any]:
    position = json.loads((run / "checkpoints" / "step-00000003" / "position.json").read_text())
    return dict(position["world"])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.stem, marks=pytest.mark.slow if path.stem in SLOW else ())
        for path in sorted(FOLDER.glob("*gpu.yaml"))
        if not path.stem.startswith("2x4")
    ],
)
def test_shipped_file_starts_and_trains(drawn_shards: Path, tmp_path: Path, name: str) -> None:
    if name.startswith("zero"):
        pytest.importorskip("deepspeed")
    wanted = min(2, yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["num_processes"])

    runs.finish(runs.start(command(name, drawn_shards, tmp_path, "--num_processes", str(wanted))))

    assert [line["step"] for line in runs.events(tmp_path, "step")] == [1, 2, 3]
    assert world_of(tmp_path)["world_size"] == wanted


def test_file_of_two_machines_trains_on_two_launchers(drawn_shards: Path, tmp_path: Path) -> None:
    options = ["--num_processes", "2", "--main_process_port", str(free_port()), "--machine_rank"]

    launchers = [runs.start(command("2x4gpu", drawn_shards, tmp_path, *options, str(rank))) for rank in (0, 1)]
    for launcher in launchers:
        runs.finish(launcher)

    assert [line["step"] for line in runs.events(tmp_path, "step")] == [1, 2, 3]
    assert world_of(tmp_path)["world_size"] == 2
