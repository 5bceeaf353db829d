"""Model FLOPs utilisation, by numbers worked out by hand."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from test_xcomposer_weights import PUBLISHED
from xcomposers import build_xcomposer

from xctrain.collate import Row
from xctrain.flops import Part, Shape, Work, peak_flops, step_flops
from xctrain.modelconfig import AdapterConfig, ModelConfig
from xctrain.models.hf import HfFamily
from xctrain.models.xcomposer import XComposerFamily
from xctrain.models.xcomposer_config import XComposerConfig
from xctrain.models.xcomposer_weights import empty_model


def make_row(n: int, caption: str, size: tuple[int, int] = (32, 32)) -> Row:
    return Row(n=n, epoch=0, key=f"key-{n}", image=Image.new("RGB", size, (90, 140, 20)), captions=(caption,))


WORK = Work(tokens=1000, image_tokens=600, patches=500, token_pairs=40_000)
FROZEN = Shape(Part(300), Part(7000), Part(50), layers=4, width=16)
FORWARD = 2 * (500 * 300 + 1000 * 7000 + 20 * 50)
ATTENTION = 4 * 4 * 16 * 40_000  # forward


def trains(part: Part) -> Part:
    return replace(part, trainable=part.weights)


def test_full_training_takes_six_operations_a_token_and_weight() -> None:
    shape = replace(FROZEN, pictures=Part(300, 300), decoder=Part(7000, 7000), head=Part(50, 50))
    assert step_flops(shape, WORK, 20) == 3 * FORWARD + 3 * ATTENTION


def test_frozen_weights_get_no_gradient_but_pass_on_those_of_what_lies_before() -> None:
    shape = replace(FROZEN, pictures=Part(300, 300))
    assert step_flops(shape, WORK, 20) == 2 * FORWARD + 2 * 500 * 300 + 3 * ATTENTION


def test_nothing_runs_backward_through_a_frozen_tower_before_what_trains() -> None:
    shape = replace(FROZEN, decoder=Part(7000, 7000), head=Part(50))
    assert step_flops(shape, WORK, 20) == FORWARD + 2 * 1000 * 7000 * 2 + 2 * 20 * 50 + 3 * ATTENTION


def test_an_adapter_adds_its_own_gradient_only() -> None:
    shape = replace(FROZEN, decoder=Part(7000 + 80, 80))
    due = 2 * 500 * 300 + 1000 * (2 * 7080 + 2 * 7080 + 2 * 80) + 20 * (2 * 50 + 2 * 50) + 3 * ATTENTION
    assert step_flops(shape, WORK, 20) == due


def test_a_part_that_trains_behind_all_others_needs_no_backward_pass_through_them() -> None:
    shape = replace(FROZEN, head=Part(50, 50))
    assert step_flops(shape, WORK, 20) == FORWARD + 20 * 4 * 50 + ATTENTION


def test_a_model_of_7b_at_2048_tokens_is_as_the_paper_has_it() -> None:
    """6 N + 12 layers x width x length a token (PaLM, appendix B), with LLaMA-7B's 32 layers of 4096."""
    n, length = 6_607_077_376, 2048
    shape = Shape(Part(), Part(n, n), Part(), layers=32, width=4096)
    work = Work(tokens=length, token_pairs=length**2)
    assert step_flops(shape, work, 0) / length == 6 * n + 12 * 32 * 4096 * length


@pytest.mark.parametrize(
    ("device", "half", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", True, 312e12),
        ("NVIDIA A100-SXM4-80GB", False, 19.5e12),
        ("NVIDIA H100 80GB HBM3", True, 989.4e12),
        ("NVIDIA H100 PCIe", True, 756e12),
        ("NVIDIA H200", False, 66.9e12),
        ("NVIDIA L40S", True, 362.1e12),
        ("NVIDIA L4", True, 121e12),
        ("cpu", True, None),
        ("NVIDIA Something New", True, None),
    ],
)
def test_the_peak_is_that_of_the_device_or_unknown(device: str, half: bool, peak: float | None) -> None:
    found = peak_flops(device, half=half)
    assert found == (peak and pytest.approx(peak))


def test_work_is_counted_without_padding(llava: HfFamily) -> None:
    rows = [make_row(0, "a dog"), make_row(1, "two small green triangles on a white background")]
    batch = llava.collator(rows)
    lengths = batch.inputs["attention_mask"].sum(dim=1).tolist()
    assert lengths[0] < lengths[1]
    vision = llava.module.model.config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2
    assert batch.work == Work(sum(lengths), 2 * patches, 2 * patches, sum(n * n for n in lengths))


def test_work_of_pictures_that_come_as_patches_counts_them(base_folders) -> None:  # type: ignore[no-untyped-def]
    family = HfFamily.open(ModelConfig(prompt="Describe the image."), base_folders("qwen"))
    batch = family.collator([make_row(0, "a dog", (60, 40))])
    assert batch.work.patches == len(batch.inputs["pixel_values"])
    assert batch.work.image_tokens == batch.work.patches // 4  # 2 x 2 patches become a token


def test_work_of_tiles_counts_the_view_of_the_whole_too(tmp_path: Path) -> None:
    family = XComposerFamily.open(ModelConfig(prompt="Describe the image."), build_xcomposer(tmp_path))
    side = family.collator.encoder.side
    batch = family.collator([make_row(0, "a dog", (2 * side, side))])
    vision = family.module.model.config.vision_config
    assert batch.inputs["grids"].tolist() == [[1, 2]] or len(batch.inputs["tiles"]) > 1
    assert batch.work.patches == (len(batch.inputs["tiles"]) + 1) * vision.patches**2
    assert batch.work.tokens == int(batch.inputs["attention_mask"].sum())
    assert batch.work.image_tokens == int(batch.inputs["image_mask"].sum())


def test_the_shape_of_the_published_7b_is_that_of_its_weights() -> None:
    with torch.device("meta"):
        model = empty_model(XComposerConfig.model_validate(PUBLISHED))
    family = XComposerFamily(SimpleNamespace(model=model), None, None)  # type: ignore[arg-type]
    shape = family.shape()
    assert (shape.layers, shape.width) == (32, 4096)
    assert shape.head.weights == 4096 * model.config.vocab_size
    assert 7.0e9 < shape.decoder.weights < 8.5e9  # InternLM2-7B and its PLoRA
    assert 0.3e9 < shape.pictures.weights < 0.35e9  # CLIP ViT-L and the projector


def test_the_shape_of_a_model_holds_its_matrices_once(kind: str, base_folders) -> None:  # type: ignore[no-untyped-def]
    family = HfFamily.open(ModelConfig(prompt="Describe the image."), base_folders(kind))
    shape, model = family.shape(), family.module.model
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    tables = model.get_input_embeddings().weight.numel()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    parts = (shape.pictures, shape.decoder, shape.head)
    positions = sum(
        m.weight.numel() for name, m in model.named_modules() if type(m).__name__ == "Embedding" and "posit" in name
    )
    assert sum(part.weights for part in parts) == matrices - positions - (0 if tied else tables)
    assert all(part.trainable == part.weights > 0 for part in parts)
    assert (shape.layers, shape.width) == (2, 96 if kind == "llava" else 64)


def test_of_an_adapted_model_the_adapter_alone_trains(base_folders) -> None:  # type: ignore[no-untyped-def]
    config = ModelConfig(prompt="Describe the image.")
    full = HfFamily.open(config, base_folders("llava")).shape()
    shape = HfFamily.open(config, base_folders("llava"), AdapterConfig(kind="lora", rank=4)).shape()
    assert shape.decoder.weights == full.decoder.weights + shape.decoder.trainable
    assert 0 < shape.decoder.trainable < full.decoder.weights / 4
    assert shape.pictures == Part(full.pictures.weights, 0)
    assert shape.head == Part(full.head.weights, 0)
