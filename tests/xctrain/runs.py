"""Start, kill and compare real training processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

TESTS = Path(__file__).parents[1]
BASE = {
    "train.global_batch": 12,
    "train.micro_batch": 2,
    "train.num_steps": 40,
    "train.save_every": 5,
    "train.log_keys": True,
    "data.workers": 1,
    "order.window": 32,
    "order.fragment": 8,
    "order.lanes": 4,
    "optim.warmup_steps": 5,
}


def settings(shards: Path, run: Path, **changes: Any) -> list[str]:
    """``section.field=value`` texts of a small run; changes are written ``train__seed=3``."""
    values = {**BASE, "data.shards": shards, "run.dir": run}
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    return [f"{name}={'null' if value is None else value}" for name, value in values.items()]


def rank_command(arguments: list[str]) -> list[str]:
    """The command of one rank of the tiny family."""
    return [sys.executable, str(TESTS / "tiny.py"), os.devnull, *arguments]


def launcher(arguments: list[str], processes: int, **options: Any) -> "subprocess.Popen[str]":
    """Real processes of the tiny family under the project's launcher."""
    command = [*rank_command(arguments), f"train.processes={processes}"]
    code = f"import sys; from xctrain.launch import launch; sys.exit(launch({command!r}, {processes}))"
    return start([sys.executable, "-c", code], **options)


def start(command: list[str], *, imports_from: Path | None = None, **options: Any) -> "subprocess.Popen[str]":
    """A process of its own session, so that a test can end it and nothing else; it looks for modules in a folder first."""
    paths = [*([imports_from] if imports_from else []), TESTS.parent, TESTS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(map(str, paths))}
    return subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment,
        **options,
    )


def finish(process: "subprocess.Popen[str]", code: int = 0, timeout_s: float = 240) -> str:
    """Wait for the exit code; what it printed."""
    out, err = process.communicate(timeout=timeout_s)
    assert process.returncode == code, f"exit code {process.returncode}, expected {code}: {err}"
    return out + err


def train(shards: Path, run: Path, processes: int = 1, code: int = 0, **changes: Any) -> str:
    """Train to the end; what was printed."""
    return finish(launcher(settings(shards, run, **changes), processes), code)


def kill_at(
    process: "subprocess.Popen[str]", run: Path, step: int, delay_s: float = 0.0, *, saved: bool = False
) -> None:
    """SIGKILL launcher and, through it, its ranks, once the log shows ``step``, and if ``saved`` a checkpoint is whole."""
    until = time.monotonic() + 120
    while process.poll() is None and (
        last_step(run) < step or (saved and not any(run.glob("checkpoints/step-????????")))
    ):
        assert time.monotonic() < until, f"step {step} was not reached: {process.communicate()[1]}"
        time.sleep(0.002)
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def kill_after(process: "subprocess.Popen[str]", seconds: float) -> None:
    """SIGKILL launcher and, through it, its ranks, wherever they are by then; sooner if they have ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def events(run: Path, event: str) -> list[dict[str, Any]]:
    """The lines of one kind in metrics.jsonl."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    return [e for e in (json.loads(x) for x in lines if x.endswith(b"\n")) if e["event"] == event]


def last_step(run: Path) -> int:
    """The newest step in the log, 0 before there is one."""
    steps = events(run, "step")
    return steps[-1]["step"] if steps else 0


def trajectory(run: Path) -> list[tuple[Any, ...]]:
    """What must not differ by a bit: step, position, loss, rate, gradient norm, digest."""
    names = ("step", "samples_consumed", "loss", "lr", "grad_norm", "num_targets", "digest")
    return [tuple(line[name] for name in names) for line in events(run, "step")]


def keys_by_step(run: Path) -> dict[int, list[tuple[int, str]]]:
    """(n, key) of every step, over all ranks, in order of n."""
    result: dict[int, list[tuple[int, str]]] = {}
    for path in run.glob("keys-rank*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            result.setdefault(line["step"], []).extend(zip(line["n"], line["keys"], strict=True))
    return {step: sorted(result[step]) for step in sorted(result)}


def read_keys(path: Path) -> list[dict[str, Any]]:
    """The lines of one rank's key log."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def key_files(run: Path) -> dict[str, str]:
    """The key log of each rank, byte by byte."""
    return {path.name: path.read_text() for path in run.glob("keys-rank*.jsonl")}


def weights(run: Path, step: int = 40) -> dict[str, bytes]:
    """Weights and optimizer state of a checkpoint, as bytes."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    return {name: (folder / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors", "rng.json")}


def gradient(run: Path, step: int, beta1: float) -> "np.ndarray[Any, Any]":
    """The whole gradient of the first step, from the optimizer's mean, which started at 0."""
    tensors = load_file(run / "checkpoints" / f"step-{step:08d}" / "optimizer.safetensors")
    parts = [tensors[name].ravel() for name in sorted(tensors) if name.startswith("exp_avg:")]
    return np.concatenate(parts) / (1 - beta1)
