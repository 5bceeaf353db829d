"""Batches through memory that trainer and workers share: all of it arrives, and nothing is overwritten while it is used."""

import gc
import resource
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_loader import make_loader
from torch import Tensor

from shards.errors import ConfigError
from xctrain.batchmemory import NUM_BYTES, BatchMemory, Packed

DTYPES = [torch.uint8, torch.bool, torch.int64, torch.float32, torch.float64, torch.bfloat16, torch.float16]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Of any type, shape and order of strides; some empty, some a view of more, some that say one value many times."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    whole = (torch.arange(2 * int(np.prod(shape))) % 251).to(draw(st.sampled_from(DTYPES))).view(2, *shape)
    tensor = draw(st.sampled_from([whole, whole[1], whole[1].clone()]))
    tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    return tensor.expand(2, *tensor.shape) if draw(st.booleans()) else tensor


def through(memory: BatchMemory, thing: Any) -> Any:
    """What arrives of it."""
    number = memory.lend()
    assert number is not None
    return memory.pack(thing, number).open()


@given(parts=st.lists(tensors(), max_size=5), text=st.text())
def test_what_is_packed_arrives_with_types_shapes_and_strides(parts: list[Tensor], text: str) -> None:
    sent = {"parts": parts, "text": (text, None, 1.5)}
    found = through(BatchMemory(1), sent)
    assert found["text"] == sent["text"]
    assert len(found["parts"]) == len(parts)
    for a, b in zip(parts, found["parts"], strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


@pytest.mark.parametrize(
    "view",
    [lambda t: t, lambda t: t[3:5], lambda t: t.numpy(), lambda t: t.permute(1, 0), lambda t: t.view(torch.uint8)],
)
def test_buffer_is_lent_again_only_when_the_last_view_is_gone(view: Any) -> None:
    memory = BatchMemory(1)
    batch = through(memory, {"pixels": torch.ones(8, 4), "labels": torch.zeros(2)})
    kept = view(batch.pop("pixels"))
    del batch
    gc.collect()
    assert memory.lend() is None
    del kept
    assert memory.lend() == 0


def test_buffer_of_a_batch_that_was_never_opened_stays_lent() -> None:
    memory = BatchMemory(1)
    number = memory.lend()
    assert number is not None
    packed = memory.pack(torch.ones(3), number)
    assert memory.lend() is None
    assert torch.equal(packed.open(), torch.ones(3))
    assert memory.lend() == 0


def test_batch_larger_than_a_buffer_arrives_and_gives_the_buffer_back() -> None:
    memory = BatchMemory(1)
    large = {"small": torch.ones(3), "large": torch.zeros(NUM_BYTES - 63, dtype=torch.uint8)}
    fits = through(memory, large["large"])
    assert fits.shape == large["large"].shape
    del fits
    found = through(memory, large)
    assert found is large
    assert memory.lend() == 0


def test_error_for_the_user_arrives_with_its_fields() -> None:
    error = through(BatchMemory(1), ConfigError("data: is not", path=Path("data")))
    assert isinstance(error, ConfigError)
    assert (str(error), error.path) == ("data: is not", Path("data"))


@dataclass(frozen=True)
class Pinnable:
    """A batch that knows how to go to page-locked memory, as a copy."""

    tensor: Tensor
    pinned: bool = False

    def pin_memory(self) -> "Pinnable":
        return replace(self, tensor=self.tensor.clone(), pinned=True)


def test_pinning_opens_the_batch_and_frees_its_buffer() -> None:
    memory = BatchMemory(1)
    number = memory.lend()
    assert number is not None
    found = memory.pack(Pinnable(torch.arange(5)), number).pin_memory()
    assert found.pinned
    assert memory.lend() == 0  # what is in page-locked memory needs it no longer
    assert found.tensor.tolist() == [0, 1, 2, 3, 4]
    error = memory.pack(ConfigError("no"), 0).pin_memory()
    assert isinstance(error, ConfigError)


def pixels(batches: Iterator[Any], count: int) -> list[Tensor]:
    """Of the first micro-batches, all held at once."""
    return [batch.inputs["pixels"][1:] for _, (step, _) in zip(range(count), batches, strict=False) for batch in step]


def test_batches_that_are_held_are_never_overwritten(drawn_shards: Path) -> None:
    """More than there are buffers: the rest goes torch's way."""
    held = pixels(make_loader(drawn_shards, workers=2).global_batches(0), 12)
    assert len(held) == 72
    alone = pixels(make_loader(drawn_shards).global_batches(0), 12)
    assert all(torch.equal(a, b) for a, b in zip(alone, held, strict=True))


def test_batches_take_no_room_below_dev_shm(drawn_shards: Path) -> None:
    batches = make_loader(drawn_shards, workers=2, micro_batch=12).global_batches(0)
    step, _ = next(batches)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/torch_" in line]
    assert step[0].inputs["pixels"].numel()
    assert mapped == []


def test_less_address_space_is_fewer_buffers(drawn_shards: Path) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + NUM_BYTES + NUM_BYTES // 2, limits[1]))
    try:
        memory = BatchMemory(3)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert memory.lend() == 0
    assert memory.lend() is None
    assert isinstance(memory.pack(torch.ones(2), 0), Packed)
