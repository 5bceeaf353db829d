"""A small XComposer learns from real photos, in every mode."""

import os
import sys
from pathlib import Path

import pytest
import runs
from xcomposers import build_xcomposer

COCO_MINI = runs.TESTS.parents[1] / "shared" / "coco-mini"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 80 photos of COCO."""
    if not COCO_MINI.is_dir():
        pytest.skip(f"{COCO_MINI.name} does not lie in a folder shared beside the checkout")
    out = tmp_path_factory.mktemp("photos") / "shards"
    config = runs.TESTS.parent / "configs" / "build.yaml"
    build = [
        sys.executable,
        "-m",
        "pipelines",
        "build",
        str(config),
        f"source.root={COCO_MINI}",
        f"out={out}",
        "--plain",
    ]
    runs.finish(runs.start(build))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["none", "lora", "qlora"])
def test_loss_falls_on_photos(photos: Path, tmp_path: Path, adapter: str) -> None:
    run, base = tmp_path / "run", build_xcomposer(tmp_path / "base", num_hidden_layers=4)
    values = runs.settings(
        photos,
        run,
        model__family="xcomposer",
        model__path=base,
        model__hd_num=4,
        model__gradient_checkpointing=True,
        adapter__kind=adapter,
        adapter__compute="float32",
        train__num_steps=20,
        optim__lr=3e-3,
    )

    runs.finish(runs.start([sys.executable, "-m", "xctrain", "launch", os.devnull, "--processes", "2", *values]))

    losses = [event["loss"] for event in runs.events(run, "step")]
    assert len(losses) == 20
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
