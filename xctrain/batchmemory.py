"""How a batch gets from a loader worker to its trainer: through memory that both have mapped and use again and again.

Torch hands each tensor over in a new file below /dev/shm, whose every page the kernel has to make, clear and map: 100 us
for a uint8 picture of 224 x 224, where copying it into pages that are there takes 3. The mappings here have no name and do
not count towards the size of /dev/shm, which containers keep small.
"""

import ctypes
import io
import mmap
import pickle
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

NUM_BYTES = 1 << 28  # of address space per buffer; only what batches fill is ever memory
_ALIGNMENT = 64  # bytes: a cache line, and what vector instructions like
_MAP_NORESERVE = 0x4000  # Source: mmap(2); the mmap module has it from Python 3.13 on
_Array = ctypes.c_char * NUM_BYTES
_Buffer = mmap.mmap | ctypes.Array[ctypes.c_char]
_here: "weakref.WeakValueDictionary[int, BatchMemory]" = weakref.WeakValueDictionary()
_names = count()


class BatchMemory:
    """Buffers that are made before the workers are forked. The trainer lends one out with each batch it asks for.

    A buffer comes back by itself when the last tensor that lies in it, or a view of one, is gone; until then nothing is
    written to it. Where none is free, or a batch does not fit, that batch goes torch's way.
    """

    def __init__(self, num_buffers: int) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._maps: list[mmap.mmap] = []
        with suppress(OSError):  # address space is limited: fewer, then
            self._maps += (mmap.mmap(-1, NUM_BYTES, flags=flags) for _ in range(num_buffers))
        # The one that came back last is lent first: its pages are there, and near the processor.
        self._free = deque(range(len(self._maps)))
        self._name = next(_names)
        _here[self._name] = self

    def lend(self) -> int | None:
        """The number of a buffer for the next batch, None if there is none."""
        try:
            return self._free.pop()
        except IndexError:
            return None

    def pack(self, batch: Any, number: int) -> "Packed":
        """In a worker: the batch with its tensors in buffer ``number``; as it is if they do not fit."""
        file = io.BytesIO()
        packer = _Packer(file, self._maps[number])
        try:
            packer.dump(batch)
        except _DoesNotFitError:
            return Packed(self._name, number, batch)
        return Packed(self._name, number, file.getvalue())

    def unpack(self, packed: "Packed") -> Any:
        """In the trainer: the batch, whose tensors keep the buffer until they are gone."""
        array = _Array.from_buffer(self._maps[packed.number])
        weakref.finalize(array, self._free.append, packed.number).atexit = False
        return _Unpacker(packed.content, array).load() if isinstance(packed.content, bytes) else packed.content


@dataclass(frozen=True)
class Packed:
    """What goes through the queue: the batch without its tensors as bytes, or all of it where they did not fit."""

    memory: int
    number: int
    content: Any

    def open(self) -> Any:
        """The batch."""
        return _here[self.memory].unpack(self)

    def pin_memory(self) -> Any:
        """The batch in page-locked memory; the torch loader calls it by this name, in a thread of the trainer's."""
        batch = self.open()
        return batch.pin_memory() if hasattr(batch, "pin_memory") else batch


class _DoesNotFitError(Exception):
    """A tensor has more bytes than are left."""


class _Packer(pickle.Pickler):
    """Pickles everything but tensors, which it copies."""

    def __init__(self, file: io.BytesIO, buffer: _Buffer) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._buffer = buffer
        self._end = 0

    def persistent_id(self, thing: Any) -> tuple[int, torch.dtype, torch.Size, tuple[int, ...]] | None:
        if not isinstance(thing, Tensor) or not _is_plain(thing):
            return None
        start = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        self._end = start + thing.nbytes
        if self._end > NUM_BYTES:
            raise _DoesNotFitError
        place = start, thing.dtype, thing.shape, thing.stride()
        _tensor_in(self._buffer, *place).copy_(thing)
        return place


class _Unpacker(pickle.Unpickler):
    """The inverse."""

    def __init__(self, content: bytes, buffer: _Buffer) -> None:
        super().__init__(io.BytesIO(content))
        self._buffer = buffer

    def persistent_load(self, place: tuple[int, torch.dtype, torch.Size, tuple[int, ...]]) -> Tensor:
        return _tensor_in(self._buffer, *place)


def _is_plain(tensor: Tensor) -> bool:
    """Whether values, type, shape and strides are all there is to it, and its values fill one piece of memory."""
    return (
        type(tensor) is Tensor
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and tensor.numel() > 0
        and _is_dense(tensor)
    )


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements lie one behind the other, in whatever order of the dimensions."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


def _tensor_in(buffer: _Buffer, start: int, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    """A tensor over a piece of the buffer, which it keeps. Strides are kept too: kernels are chosen by them."""
    return torch.frombuffer(buffer, dtype=dtype, count=shape.numel(), offset=start).as_strided(shape, strides)
