"""A trained XComposer becomes a folder in the layout of the published checkpoint."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from small import train_here
from xcomposers import build_xcomposer

from shards.reader import SplitReader
from shards.settings import load_settings
from xctrain import tensors
from xctrain.config import Config
from xctrain.export import export
from xctrain.models import open_family
from xctrain.session import open_model

# A new process, without a network, that knows the folder alone.
CAPTION = """
import sys
from shards.reader import SplitReader
from xctrain.modelconfig import ModelConfig
from xctrain.models import open_family
folder, shards = sys.argv[1:]
family = open_family(ModelConfig(family="xcomposer", path=folder, hd_num=4), folder)
reader = SplitReader(shards, "val")
print("\\n".join(family.generate([reader.read(i).open_image() for i in range(4)], 12)))
"""


SLOW = pytest.mark.slow


@pytest.mark.parametrize("adapter", [pytest.param("none", marks=SLOW), pytest.param("lora", marks=SLOW), "qlora"])
def test_export_has_official_names_and_captions_as_base_and_adapter_do(
    drawn_shards: Path, tmp_path: Path, adapter: str
) -> None:
    base, run, out = build_xcomposer(tmp_path / "base"), tmp_path / "run", tmp_path / "out"
    settings = {
        "model__family": "xcomposer",
        "model__path": base,
        "model__hd_num": 4,
        "adapter__kind": adapter,
        "adapter__rank": 8,
        "adapter__compute": "float32",
        "optim__lr": 1e-2,
        "optim__warmup_steps": 0,
    }
    train_here(drawn_shards, run, open_model, train__num_steps=8, **settings)

    result = export(run, out)

    assert result.adapters_merged == (0 if adapter == "none" else 10)
    assert result.largest_difference < 1e-3 * result.largest_logit
    assert result.renamed == ()
    before, after = (load_file(folder / "model.safetensors") for folder in (base, out))
    assert {n: (t.shape, t.dtype) for n, t in after.items()} == {n: (t.shape, t.dtype) for n, t in before.items()}
    changed = {name for name in after if not after[name].equal(before[name])}
    if adapter != "none":
        assert {name.split(".")[-2] for name in changed} == {"wqkv", "wo", "w1", "w2", "w3"}
    assert len(changed) >= 10

    config = load_settings(Config, run / "config.yaml")
    whole = config.adapter.model_copy(update={"kind": "none" if adapter == "none" else "lora"})
    family = open_family(config.model, base, whole)
    tensors.load_weights(run / "checkpoints" / "step-00000008", family.module, every_trainable=False)
    reader = SplitReader(drawn_shards, "val")
    expected = family.generate([reader.read(i).open_image() for i in range(4)], 12)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CAPTION, str(out), str(drawn_shards)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == expected
    assert any(expected)
