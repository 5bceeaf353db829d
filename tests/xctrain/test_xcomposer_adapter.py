"""LoRA and QLoRA of the family xcomposer: what trains, what is held in 4 bits, and how much memory loading takes."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_xcomposer import noise
from torch import nn
from xcomposers import CONFIG, build_xcomposer, write_large

from shards.errors import ConfigError
from shards.settings import load_settings
from xctrain.collate import Row
from xctrain.config import Config
from xctrain.modelconfig import AdapterConfig, ModelConfig
from xctrain.models import open_family
from xctrain.models.parameters import parameter_table
from xctrain.models.xcomposer import XComposerFamily
from xctrain.models.xcomposer_decoder import DECODER_LINEARS

LINEARS = {
    f"model.layers.{i}.{'attention' if linear in ('wqkv', 'wo') else 'feed_forward'}.{linear}"
    for i in range(CONFIG["num_hidden_layers"])
    for linear in DECODER_LINEARS
}
KINDS = ("lora", "qlora")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_xcomposer(tmp_path_factory.mktemp("xcomposer") / "base")


@pytest.fixture
def rows() -> list[Row]:
    captions = ("a red circle", "two small green triangles")
    return [
        Row(n=n, epoch=0, key=f"key-{n}", image=noise(n, (60, 40 + 20 * n)), captions=(caption,))
        for n, caption in enumerate(captions)
    ]


def opened(base: Path, kind: str = "lora", **changes: Any) -> XComposerFamily:
    """The family with an adapter; settings of the adapter begin with ``adapter_``."""
    adapter = {name.removeprefix("adapter_"): changes.pop(name) for name in [*changes] if name.startswith("adapter_")}
    model = ModelConfig(family="xcomposer", path=str(base), **{"hd_num": 4, **changes})
    family = open_family(model, base, AdapterConfig(kind=kind, **{"rank": 4, "compute": "float32", **adapter}), seed=1)
    assert isinstance(family, XComposerFamily)
    return family


def trained(family: XComposerFamily) -> dict[str, nn.Parameter]:
    return {name: p for name, p in family.module.model.named_parameters() if p.requires_grad}


def gradients(family: XComposerFamily, rows: list[Row]) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    family.module.zero_grad()
    family.module.train()
    family.module(family.collator(rows)).backward()
    return {name: p.grad.clone() for name, p in trained(family).items() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_exactly_the_adapters_of_the_decoder_train(base: Path, kind: str) -> None:
    family = opened(base, kind)

    assert set(trained(family)) == {f"{name}.lora_{side}.default.weight" for name in LINEARS for side in "AB"}
    assert {p.dtype for p in trained(family).values()} == {torch.float32}
    table = {line.split()[0]: line.split()[1:] for line in parameter_table(family.module).splitlines()}
    assert table["model.layers"][0] == table["total"][0] == f"{sum(p.numel() for p in trained(family).values()):,}"
    assert {table[block][0] for block in table if block not in ("parameters", "model.layers", "total")} == {"0"}


@pytest.mark.parametrize("kind", KINDS)
def test_plora_and_separators_train_beside_the_adapter_where_the_config_says_so(base: Path, kind: str) -> None:
    names = {name for name in trained(opened(base, kind, plora="training", separators="training")) if "lora_" in name}

    others = {name for name in names if ".lora_" not in name}
    assert others == {
        "plora_glb_GN",
        "plora_sub_GN",
        *(f"{name}_plora.Plora_{side}.weight" for name in LINEARS for side in "AB"),
    }


def test_plora_and_separators_are_frozen_in_full_fine_tuning_where_the_config_says_so(base: Path) -> None:
    all_names = set(trained(opened(base, "none")))

    names = set(trained(opened(base, "none", plora="frozen", separators="frozen")))

    assert all_names - names == {name for name in all_names if "lora" in name}
    assert len(all_names - names) == 2 + 2 * len(LINEARS)


def test_adapters_of_this_family_are_as_published_unless_told_otherwise() -> None:
    settings = ["train.num_steps=1", "model.family=xcomposer", "model.path=x"]

    published = load_settings(Config, None, [*settings, "adapter.kind=lora"]).adapter
    own = load_settings(Config, None, [*settings, "adapter.kind=qlora", "adapter.rank=8"]).adapter
    other = load_settings(Config, None, ["train.num_steps=1", "adapter.kind=lora"]).adapter

    assert (published.rank, published.alpha, published.dropout) == (64, 64, 0.05)
    assert (own.rank, own.alpha) == (8, 64)
    assert (other.rank, other.alpha) == (16, 32)


def test_exactly_the_linears_of_the_decoder_are_in_4_bits(base: Path) -> None:
    from bitsandbytes.functional import dequantize_4bit

    weights = load_file(base / "model.safetensors")
    parameters = {n.replace(".base_layer", ""): p for n, p in opened(base, "qlora").module.model.named_parameters()}

    short = {name: p for name, p in parameters.items() if hasattr(p, "quant_state")}
    assert set(short) == {f"{name}.weight" for name in LINEARS}
    for name, weight in short.items():
        assert (weight.dtype, weight.quant_state.quant_type, weight.quant_state.nested) == (torch.uint8, "nf4", True)
        error = dequantize_4bit(weight.data, weight.quant_state) - weights[name]
        assert 0.01 < float(error.norm() / weights[name].norm()) < 0.12
    assert all(torch.equal(parameters[n], w) for n, w in weights.items() if n in parameters and n not in short)


def test_weights_in_4_bits_are_those_of_a_model_that_was_loaded_whole(base: Path, rows: list[Row]) -> None:
    from xctrain.models.adapter import quantise
    from xctrain.models.xcomposer_weights import decoder_linears

    streamed, whole = opened(base, "qlora").module.eval(), opened(base, "none").module.eval()
    quantise(whole.model, decoder_linears(whole.model), torch.float32)
    batch = opened(base).collator(rows)

    assert torch.equal(streamed(batch), whole(batch))


def test_a_width_that_does_not_fit_4_bits_is_refused(tmp_path: Path) -> None:
    folder = build_xcomposer(tmp_path / "odd", intermediate_size=72)

    message = "adapter.kind is qlora, model.layers.0.feed_forward.w2 is 72 wide, not a multiple of 32; use adapter.kind"
    with pytest.raises(ConfigError, match=re.escape(message)):
        opened(folder, "qlora")


@pytest.mark.parametrize("kind", KINDS)
def test_every_b_moves_at_the_first_step_and_every_a_at_the_second(base: Path, rows: list[Row], kind: str) -> None:
    family = opened(base, kind, gradient_checkpointing=True, adapter_dropout=0.1)
    start = {name: p.detach().clone() for name, p in trained(family).items()}
    optimizer = torch.optim.AdamW(trained(family).values(), lr=1e-3, weight_decay=0.0)

    gradients(family, rows)
    optimizer.step()
    moved = {name for name, p in trained(family).items() if not torch.equal(p, start[name])}
    assert moved == {name for name in start if ".lora_B." in name}

    gradients(family, rows)
    optimizer.step()
    assert not [name for name, p in trained(family).items() if torch.equal(p, start[name])]


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_changes_no_bit(base: Path, rows: list[Row], kind: str) -> None:
    options = {"adapter_dropout": 0.1}
    plain, again = (gradients(opened(base, kind, gradient_checkpointing=on, **options), rows) for on in (False, True))

    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize("compute", ["bfloat16", "float16", "float32"])
def test_4_bits_multiply_in_each_type_beside_a_base_in_bfloat16(base: Path, rows: list[Row], compute: str) -> None:
    family = opened(base, "qlora", dtype="bfloat16", adapter_compute=compute)
    whole = opened(base).module.eval()(family.collator(rows))

    found = gradients(family, rows)

    assert all(bool(g.isfinite().all()) and bool(g.any()) for name, g in found.items() if ".lora_B." in name)
    torch.testing.assert_close(family.module.eval()(family.collator(rows)), whole, rtol=0.05, atol=0)
    assert family.generate([rows[0].image], 3)


def test_logits_of_targets_give_the_loss(base: Path, rows: list[Row]) -> None:
    family = opened(base)
    module, batch = family.module.eval(), family.collator(rows)

    labels = batch.labels[:, 1:]
    loss = nn.functional.cross_entropy(module.last_logits(batch), labels[labels != -100], reduction="sum")

    torch.testing.assert_close(loss, module(batch))


def test_loading_in_4_bits_holds_little_more_than_the_result(tmp_path: Path) -> None:
    """An eighth of the published width, in bfloat16 files. Measured: resident memory above that before loading."""
    folder = tmp_path / "large"
    num_bytes, shard = write_large(folder, max_shard_bytes=2**24)

    above = _peak_of_loading(folder)

    assert num_bytes > 5 * 2**24, "too small to tell"
    assert above < 1.3 * num_bytes + shard
    assert above < 0.75 * num_bytes + shard, "the whole model, in full, was there at once"


_LOAD = """
import gc, sys
from pathlib import Path
import torch
from xctrain.modelconfig import AdapterConfig, ModelConfig
from xctrain.models import open_family

def resident(name):
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024

config = ModelConfig(family="xcomposer", path=sys.argv[1], dtype="bfloat16")
adapter = AdapterConfig(kind="qlora", rank=8)
open_family(config, sys.argv[2], adapter)  # a small one first: libraries are not what is measured
gc.collect()
Path("/proc/self/clear_refs").write_text("5")  # forget the highest so far
before = resident("VmHWM")
family = open_family(config, sys.argv[1], adapter)
print(resident("VmHWM") - before)
"""


def _peak_of_loading(folder: Path) -> int:
    small = build_xcomposer(folder.parent / "small")
    command = [sys.executable, "-c", _LOAD, str(folder), str(small)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
