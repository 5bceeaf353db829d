"""LoRA and QLoRA on three kinds of tiny model."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shards.errors import ConfigError
from shards.settings import load_settings
from xctrain.collate import Row
from xctrain.config import Config
from xctrain.modelconfig import AdapterConfig, ModelConfig
from xctrain.models import open_family
from xctrain.models.adapter import linear_layers, merge, quantise
from xctrain.models.hf import HfFamily, checkpoint_gradients, language_model
from xctrain.models.parameters import parameter_table

Open = Callable[..., HfFamily]
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TEXT = {"llava": "model.language_model", "qwen": "model.language_model", "idefics": "model.text_model"}


@pytest.fixture
def open_kind(kind: str, base_folders: Callable[[str], Path]) -> Open:
    """Opens the tiny model of each kind with an adapter; settings of the model begin with ``model_``."""

    def open_it(adapter: str = "lora", **settings: Any) -> HfFamily:
        model = {name.removeprefix("model_"): settings.pop(name) for name in [*settings] if name.startswith("model_")}
        settings.setdefault("compute", "float32")
        return HfFamily.open(ModelConfig(**model), base_folders(kind), AdapterConfig(kind=adapter, **settings))

    return open_it


def trained(family: HfFamily) -> dict[str, nn.Parameter]:
    return {name: p for name, p in family.module.model.named_parameters() if p.requires_grad}


def layers_of(family: HfFamily) -> set[str]:
    return {name.partition(".lora_")[0] for name in trained(family)}


def gradients(family: HfFamily, rows: list[Row]) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    family.module.zero_grad()
    family.module.train()
    family.module(family.collator(rows)).backward()
    return {name: p.grad for name, p in trained(family).items() if p.grad is not None}


def step(family: HfFamily, rows: list[Row]) -> None:
    optimizer = torch.optim.AdamW(trained(family).values(), lr=1e-2, weight_decay=0.0)
    gradients(family, rows)
    optimizer.step()


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_every_linear_layer_of_the_language_model_is_adapted_and_nothing_else(
    open_kind: Open, kind: str, adapter: str
) -> None:
    family = open_kind(adapter, rank=4)

    names = [f"{TEXT[kind]}.layers.{i}" for i in range(2)]
    assert {re.sub(r"\.(self_attn|mlp)\.", ".", name) for name in layers_of(family)} == {
        f"{start}.{layer}" for start in names for layer in LAYERS
    }
    assert set(trained(family)) == {
        f"{name}.lora_{side}.default.weight" for name in layers_of(family) for side in ("A", "B")
    }


def test_a_name_that_the_vision_tower_has_too_means_the_language_model(open_kind: Open, kind: str) -> None:
    family = open_kind(targets=("*.q_proj", "*.up_proj"))

    assert len(layers_of(family)) == 4
    assert all(name.startswith(TEXT[kind]) for name in layers_of(family))


def test_the_vision_tower_is_adapted_when_asked(base_folders: Callable[[str], Path]) -> None:
    adapter = AdapterConfig(kind="lora", targets=(), other_targets=("*.vision_tower.*.q_proj", "*projector*"))

    family = HfFamily.open(ModelConfig(), base_folders("llava"), adapter)

    assert layers_of(family) == {
        "model.vision_tower.encoder.layers.0.self_attn.q_proj",
        "model.vision_tower.encoder.layers.1.self_attn.q_proj",
        "model.multi_modal_projector.linear_1",
        "model.multi_modal_projector.linear_2",
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"targets": ("*.wqkv",)},
            "adapter.targets: '*.wqkv' fits no linear layer of the language model; use patterns such as "
            "model.language_model.*, *.q_proj, *.k_proj",
        ),
        (
            {"other_targets": ("*.q_porj",)},
            "adapter.other_targets: '*.q_porj' fits no linear layer outside of it; use patterns such as "
            "model.vision_tower.*, model.multi_modal_projector.*, *.k_proj",
        ),
        (
            {"train_also": ("projector",)},
            "adapter.train_also: 'projector' fits no parameter of the base; use patterns such as model.vision_tower.*",
        ),
        (
            {"targets": ()},
            "adapter.targets and adapter.other_targets are empty, adapter.kind is lora; give at least one",
        ),
        (
            {"kind": "qlora", "train_also": ("*.up_proj.weight",)},
            "adapter.train_also: fits model.language_model.layers.0.mlp.up_proj.weight, which qlora holds in 4 bits",
        ),
    ],
)
def test_what_fits_nothing_is_refused_with_what_would(
    base_folders: Callable[[str], Path], settings: dict[str, Any], message: str
) -> None:
    adapter = AdapterConfig(**{"kind": "lora", **settings})

    with pytest.raises(ConfigError, match=re.escape(message)):
        HfFamily.open(ModelConfig(), base_folders("llava"), adapter)


def test_adapter_and_frozen_patterns_exclude_each_other() -> None:
    message = r"model\.freeze is \['\*vision\*'\], adapter\.kind is lora, which freezes the whole base model; leave"

    with pytest.raises(ConfigError, match=message):
        load_settings(Config, None, ["train.num_steps=1", "adapter.kind=lora", "model.freeze=['*vision*']"])


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_b_moves_at_the_first_step_and_every_a_at_the_second(
    open_kind: Open, rows: list[Row], adapter: str, checkpointing: bool
) -> None:
    family = open_kind(adapter, model_gradient_checkpointing=checkpointing)
    before = {name: p.detach().clone() for name, p in trained(family).items()}

    step(family, rows)
    moved = {name for name, p in trained(family).items() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if ".lora_B." in name}

    second = gradients(family, rows)
    assert second.keys() == before.keys()
    assert all(bool(g.isfinite().all()) and bool(g.any()) for g in second.values())


@pytest.mark.parametrize("adapter", ["none", "lora", "qlora"])
def test_gradient_checkpointing_changes_no_bit(open_kind: Open, rows: list[Row], adapter: str) -> None:
    plain, again = (gradients(open_kind(adapter, model_gradient_checkpointing=on), rows) for on in (False, True))

    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_gradient_checkpointing_computes_layers_again(llava: HfFamily, rows: list[Row]) -> None:
    calls = []
    llava.module.model.model.language_model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))

    gradients(llava, rows)
    assert len(calls) == 1
    checkpoint_gradients(llava.module.model)
    gradients(llava, rows)
    assert len(calls) == 3


def test_adapter_begins_as_nothing(open_kind: Open, family: HfFamily, rows: list[Row]) -> None:
    adapted = open_kind().module.eval()

    assert torch.equal(adapted(family.collator(rows)), family.module.eval()(family.collator(rows)))


def test_adapter_begins_as_a_function_of_the_seed_and_draws_nothing_else(base_folders: Callable[[str], Path]) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    folder, adapter = base_folders("llava"), AdapterConfig(kind="lora")

    first, second, other = (trained(HfFamily.open(ModelConfig(), folder, adapter, seed)) for seed in (1, 1, 2))

    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if ".lora_A." in name)


def test_language_model_is_in_4_bits_and_the_rest_as_it_was(open_kind: Open, kind: str, family: HfFamily) -> None:
    from bitsandbytes.functional import dequantize_4bit

    base = dict(family.module.model.named_parameters())

    adapted = open_kind("qlora", targets=("*.q_proj",))

    short = {
        n.replace(".base_layer", ""): p for n, p in adapted.module.model.named_parameters() if hasattr(p, "absmax")
    }
    assert set(short) == {f"{name}.weight" for name in linear_layers(family.module.model, TEXT[kind])}
    for name, weight in short.items():
        assert weight.dtype == torch.uint8
        assert weight.numel() == base[name].numel() // 2
        assert weight.quant_state.nested
        assert weight.quant_state.quant_type == "nf4"
        error = (dequantize_4bit(weight.data, weight.quant_state) - base[name]).norm() / base[name].norm()
        assert 0.01 < float(error.detach()) < 0.12
    rest = {n: p for n, p in adapted.module.model.named_parameters() if not hasattr(p, "absmax") and ".lora_" not in n}
    assert all(torch.equal(p, base[name.replace(".base_layer", "")]) for name, p in rest.items())
    lines = [line.split() for line in parameter_table(adapted.module).splitlines()]
    assert int(lines[-1][2].replace(",", "")) == sum(p.numel() for p in base.values())


@pytest.mark.parametrize("width", [32, 64, 96, 192, 224])
def test_each_weight_keeps_its_own_scale_in_4_bits(width: int) -> None:
    """bitsandbytes reads rows that are not whole blocks wrongly on some CPUs."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(width, 48)})
    exact = model["a"](torch.eye(width)).detach()

    quantise(model, ["a"], torch.float32)

    error = ((model["a"](torch.eye(width)) - exact).norm() / exact.norm()).item()
    assert 0.02 < error < 0.12


def test_a_width_that_does_not_fit_4_bits_is_refused() -> None:
    model = nn.ModuleDict({"a": nn.Linear(48, 8)})

    with pytest.raises(
        ConfigError, match=r"adapter\.kind is qlora, a is 48 wide, not a multiple of 32; use adapter\.kind"
    ):
        quantise(model, ["a"], torch.float32)


def test_captioning_leaves_4_bit_weights_as_they_were(open_kind: Open, rows: list[Row]) -> None:
    family = open_kind("qlora")
    before = gradients(family, rows)
    packed = {n: p.detach().clone() for n, p in family.module.model.named_parameters() if p.dtype == torch.uint8}
    before = {name: g.clone() for name, g in before.items()}

    family.generate([row.image for row in rows], 3)

    after = gradients(family, rows)
    assert packed
    parameters = dict(family.module.model.named_parameters())
    assert all(torch.equal(parameters[name], weight) for name, weight in packed.items())
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_adapter_is_float32_beside_a_base_in_bfloat16(open_kind: Open, rows: list[Row], adapter: str) -> None:
    family = open_kind(adapter, model_dtype="bfloat16", compute="bfloat16")

    assert {p.dtype for p in trained(family).values()} == {torch.float32}
    assert all(bool(g.any()) for name, g in gradients(family, rows).items() if ".lora_B." in name)
    assert family.generate([rows[0].image], 2)


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_parameters_of_the_base_train_beside_the_adapter_when_asked(
    base_folders: Callable[[str], Path], rows: list[Row], adapter: str
) -> None:
    config = AdapterConfig(kind=adapter, targets=("*.q_proj",), train_also=("*projector*", "*embed_tokens*"))
    family = HfFamily.open(ModelConfig(), base_folders("llava"), config)

    found = gradients(family, rows)

    whole = {name for name in found if ".lora_" not in name}
    assert {name.split(".")[1] for name in whole} == {"multi_modal_projector", "language_model"}
    assert len(whole) == 5
    assert all(bool(found[name].any()) for name in whole)


def test_merged_model_has_the_names_of_the_base_and_says_what_the_adapter_said(
    open_kind: Open, family: HfFamily, rows: list[Row]
) -> None:
    adapted = open_kind(dropout=0.5)
    step(adapted, rows)
    batch = family.collator(rows)
    base, said = family.module.eval().last_logits(batch), adapted.module.eval().last_logits(batch)
    assert float((said - base).abs().max().detach()) > 0.1

    assert merge(adapted.module.model) == 14

    assert adapted.module.model.state_dict().keys() == family.module.model.state_dict().keys()
    torch.testing.assert_close(adapted.module.last_logits(batch), said, rtol=1e-4, atol=1e-4)
    assert merge(adapted.module.model) == 0


def test_layers_that_share_their_weight_are_no_candidates(llava: HfFamily) -> None:
    model = llava.module.model

    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    assert "lm_head" not in linear_layers(model)
    assert "model.multi_modal_projector.linear_1" in linear_layers(model)


def test_a_model_without_a_language_model_of_its_own_is_refused() -> None:
    class Whole(nn.Linear):
        def get_decoder(self) -> nn.Module:
            return self

    with pytest.raises(
        ConfigError, match=r"adapter\.kind: Whole does not keep its language model in a module of its own"
    ):
        language_model(Whole(1, 1))


def test_a_model_that_cannot_compute_layers_again_is_refused() -> None:
    class Plain(nn.Linear):
        supports_gradient_checkpointing = False

    with pytest.raises(
        ConfigError, match=r"gradient_checkpointing is true, Plain does not support it; set it to false"
    ):
        checkpoint_gradients(Plain(1, 1))


def test_a_base_that_is_quantised_already_is_refused(base_folders: Callable[[str], Path], tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor, BitsAndBytesConfig

    short = AutoModelForImageTextToText.from_pretrained(
        base_folders("llava"), quantization_config=BitsAndBytesConfig(load_in_4bit=True)
    )
    short.save_pretrained(tmp_path / "short")
    AutoProcessor.from_pretrained(base_folders("llava")).save_pretrained(tmp_path / "short")

    with pytest.raises(ConfigError, match=r"short is quantised already, .* give the model that it was made from"):
        open_family(ModelConfig(family="hf", path="x"), tmp_path / "short")
