"""How far each mode's pixels are from those that the model's own processor would make."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from shards.errors import ConfigError, DamagedSampleError
from shards.reader import SplitReader
from shards.sample import Sample
from shards.stream import Slot
from xctrain.decode import Decoder, as_tensor, resize
from xctrain.loader import SlotRows
from xctrain.modelconfig import ModelConfig
from xctrain.models import hf, open_family
from xctrain.models.xcomposer_images import CHAT, FINETUNE, Tiling


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Soft shapes, hard edges and a little noise, as in a photo."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (6, 8, 3), np.uint8))
    soft = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    edges = 60 * (np.add.outer(np.arange(height) // 37, np.arange(width) // 53) % 2)[..., None]
    noise = generator.normal(0, 4, (height, width, 3))
    return Image.fromarray(np.clip(soft + edges + noise, 0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> Sample:
    data = io.BytesIO()
    image.save(data, kind, **options)
    extension = {"JPEG": "jpg"}.get(kind, kind.lower())
    return Sample("a", data.getvalue(), extension, {"width": image.width, "height": image.height, "captions": ["a"]})


def levels(one: Tensor, other: Image.Image) -> Tensor:
    assert one.dtype == torch.uint8
    return (one.int() - as_tensor(other).int()).abs()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from(["L", "RGB", "CMYK"]),
    st.sampled_from([0, 1, 2]),
    st.booleans(),
    st.integers(20, 100),
)
def test_fast_decoding_gives_pillows_pixels_bit_by_bit(
    width: int, height: int, mode: str, subsampling: int, progressive: bool, quality: int
) -> None:
    image = photo(width, height, quality).convert(mode)
    sample = encoded(image, quality=quality, subsampling=subsampling, progressive=progressive)
    pixels = Decoder("fast")(sample)
    assert isinstance(pixels, Tensor)
    assert torch.equal(pixels, as_tensor(sample.open_image()))


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_other_formats_are_decoded_alike_in_every_mode(kind: str) -> None:
    sample = encoded(photo(90, 60), kind)
    expected = as_tensor(sample.open_image())
    assert all(torch.equal(Decoder(mode)(sample), expected) for mode in ("fast", "scaled"))  # type: ignore[arg-type]


def test_an_orientation_is_applied_in_every_mode() -> None:
    sample = encoded(photo(90, 60), exif=_oriented(6))
    sample = replace(sample, meta={**sample.meta, "orientation": 6})
    assert sample.open_image().size == (60, 90)
    assert torch.equal(Decoder("fast")(sample), as_tensor(sample.open_image()))  # type: ignore[arg-type]


def _oriented(value: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


def test_damage_is_the_same_error_in_every_mode() -> None:
    sample = encoded(photo(300, 200))
    cut = replace(sample, image=sample.image[: len(sample.image) // 2])
    for mode in ("exact", "fast", "scaled"):
        with pytest.raises(DamagedSampleError, match=r"a: a\.jpg cannot be decoded: image file is truncated"):
            Decoder(mode)(cut)  # type: ignore[arg-type]


@pytest.mark.parametrize("filter_name", ["bilinear", "bicubic"])
def test_fast_resizing_is_off_by_a_fiftieth_of_a_level(filter_name: Any) -> None:
    found = []
    for seed in range(4):
        image = encoded(photo(640, 480, seed), quality=90).open_image()
        exact = image.resize((224, 224), Image.Resampling[filter_name.upper()])
        found.append(levels(resize(as_tensor(image), 224, 224, filter_name), exact).float())
    differences = torch.stack(found)
    assert float(differences.mean()) < 0.03
    assert float(differences.max()) <= 10


def test_scaled_decoding_is_off_by_about_a_level() -> None:
    decoder = Decoder("scaled", lambda width, height: (224, 224))
    found = []
    for seed in range(4):
        sample = encoded(photo(640, 480, seed), quality=90)
        pixels = decoder(sample)
        assert isinstance(pixels, Tensor)
        assert pixels.shape == (3, 240, 320)
        exact = sample.open_image().resize((224, 224), Image.Resampling.BICUBIC)
        found.append(levels(resize(pixels, 224, 224, "bicubic"), exact).float())
    assert 0.1 < float(torch.stack(found).mean()) < 1.5


@given(st.integers(16, 400), st.integers(16, 400), st.integers(8, 200), st.integers(8, 200))
@settings(max_examples=40, deadline=None)
def test_scaled_decoding_never_goes_below_what_is_needed(
    width: int, height: int, least_width: int, least_height: int
) -> None:
    pixels = Decoder("scaled", lambda w, h: (least_width, least_height))(encoded(photo(width, height)))
    assert isinstance(pixels, Tensor)
    found_height, found_width = pixels.shape[1:]
    assert found_width >= min(width, least_width)
    assert found_height >= min(height, least_height)
    assert (found_width, found_height) == (width, height) or 2 * found_width <= width + 1


@pytest.mark.parametrize("tiling", [CHAT, FINETUNE])
@pytest.mark.parametrize("size", [(640, 480), (333, 500), (60, 40)])
def test_xcomposers_tiles_are_the_same_to_within_rounding(tiling: Tiling, size: tuple[int, int]) -> None:
    sample = encoded(photo(*size), quality=90)
    exact = tiling.apply(sample.open_image(), 112, 18)
    fast = tiling.apply(Decoder("fast")(sample), 112, 18)
    assert fast.size == exact.size
    differences = levels(as_tensor(fast), exact).float()
    assert float(differences.mean()) < 0.1
    assert float(differences.max()) <= 3


# Hugging Face processors


def clip(folder: Path, pil: bool, **size: int) -> Any:
    from transformers import CLIPImageProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    kind = CLIPImageProcessorPil if pil else CLIPImageProcessor
    kind(size=size, crop_size={"height": 32, "width": 32}).save_pretrained(folder)
    return kind.from_pretrained(folder)


class Bare:
    """A processor of pictures alone."""

    def __init__(self, image_processor: Any) -> None:
        self.image_processor = image_processor


@pytest.mark.parametrize(("pil", "limit"), [(True, 0.1), (False, 0.0)])
def test_fast_mode_equals_a_processor_that_works_on_tensors_and_is_near_one_that_does_not(
    tmp_path: Path, pil: bool, limit: float
) -> None:
    exact = Bare(clip(tmp_path, pil, shortest_edge=32))
    config = ModelConfig(family="hf", path=str(tmp_path), decode="fast")
    fast = hf.processor_on_tensors(config, tmp_path, exact)
    found = []
    for seed in range(4):
        sample = encoded(photo(160, 120, seed), quality=90)
        one = exact.image_processor(sample.open_image(), return_tensors="pt")["pixel_values"]
        other = fast.image_processor(Decoder("fast")(sample), return_tensors="pt")["pixel_values"]
        deviation = torch.tensor(exact.image_processor.image_std)[None, :, None, None]
        found.append(((one - other) * deviation * 255).abs())
    assert float(torch.cat(found).mean()) <= limit


@pytest.mark.parametrize(
    ("size", "least"),
    [
        ({"shortest_edge": 32}, (43, 32)),
        ({"height": 30, "width": 20}, (20, 30)),
        ({"longest_edge": 32}, (640, 480)),
        ({"shortest_edge": 3136, "longest_edge": 1003520}, (640, 480)),
    ],
)
def test_least_size_is_what_the_processor_resizes_to(
    tmp_path: Path, size: dict[str, int], least: tuple[int, int]
) -> None:
    processor = Bare(clip(tmp_path, pil=False, shortest_edge=32))
    processor.image_processor.size = size
    collator = hf.Collator.__new__(hf.Collator)
    collator.processor = processor
    assert collator.least_size(640, 480) == least


def test_xcomposer_refuses_the_scaled_mode(tmp_path: Path) -> None:
    config = ModelConfig(family="xcomposer", path="x", decode="scaled")
    with pytest.raises(ConfigError, match=r"XComposer.s tiles go by a picture.s own size; use model\.decode=fast"):
        open_family(config, tmp_path)


def test_rows_of_the_loader_have_tensors_damaged_and_surplus_ones_too(drawn_shards: Path) -> None:
    rows = SlotRows(SplitReader(drawn_shards, "train"), "first", 0, decoder=Decoder("fast"))
    exact = SlotRows(SplitReader(drawn_shards, "train"), "first", 0)
    slot = Slot(n=0, epoch=0, index=3)
    assert torch.equal(rows[slot].image, as_tensor(exact[slot].image))  # type: ignore[arg-type]
    surplus = rows[slot._replace(surplus=True)].image
    assert isinstance(surplus, Tensor)
    assert surplus.shape == (3, 64, 64)
