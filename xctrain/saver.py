"""Checkpoints that are written while training goes on: the loop waits only while the state is copied.

A thread is enough: writing, hashing and syncing leave the interpreter's lock to the loop (benchmarks/checkpoint.py). It
is no daemon, so that a run that ends with an error still makes the checkpoint whole that it had begun.
"""

import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from xctrain import phase
from xctrain.checkpoint import Checkpoints, Content
from xctrain.hostmemory import available_bytes
from xctrain.push import Pusher

_SPARE_BYTES = 512 * 2**20  # memory of the machine that a copy leaves to others
_SMALL_BYTES = 2**20  # of a tensor that is not worth looking


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole."""

    path: Path
    step: int
    samples_consumed: int
    save_s: float  # from the copy to the checkpoint being whole, older ones gone
    blocked_s: float  # of which the loop waited


class Saver:
    """Writes the checkpoints of a run from rank 0, one at a time. On other ranks it is never given one."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        *,
        asynchronous: bool,
        every_s: float | None = None,
        pusher: Pusher | None = None,
    ) -> None:
        self.checkpoints = checkpoints
        self.pusher = pusher  # is given each checkpoint that is whole
        self._copies = HostCopies() if asynchronous else None
        self._every_s = every_s
        self._began = time.monotonic()
        self._preparing: threading.Thread | None = None
        self._thread: threading.Thread | None = None
        self._result: Saved | BaseException | None = None

    def prepare(self, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        """Take the memory for copies of such tensors meanwhile, as that takes longer than the copying."""
        copies = self._copies
        if copies is None:
            return

        def reserve() -> None:
            for name, (shape, dtype) in shapes.items():
                held = copies.reserve(name, shape, dtype, pinned=torch.cuda.is_available())
                if held is not None:
                    held.zero_()  # the kernel gives memory when it is first written to

        self._preparing = threading.Thread(target=reserve, name="memory for checkpoints", daemon=True)
        self._preparing.start()

    def due(self) -> bool:
        """Whether so much time has passed since a save last began, or since the start."""
        return self._every_s is not None and time.monotonic() - self._began >= self._every_s

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the state in memory of this process that training does not change before the next save.

        If saves are not asynchronous, or memory does not suffice, it may be the tensor itself.
        """
        if self._copies is None:
            return tensor.cpu().contiguous()
        if self._preparing:
            self._preparing.join()
            self._preparing = None
        return self._copies(name, tensor)

    def begin(self, content: Content, began: float) -> None:
        """Start to write a checkpoint of copies; ``began``: when the loop stopped for it, by time.perf_counter."""
        assert self._thread is None
        self._began = time.monotonic()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # copies into pinned memory are under way
        own = self._copies is not None and self._copies.complete
        blocked_s = time.perf_counter() - began

        def write() -> None:
            try:
                with phase.saving():
                    path = self.checkpoints.save(content)
                save_s = time.perf_counter() - began
                state = content.state
                if self.pusher:
                    self.pusher.offer(state.step, state.samples_consumed, content.logs)
                self._result = Saved(path, state.step, state.samples_consumed, save_s, blocked_s if own else save_s)
            except BaseException as error:  # noqa: BLE001 - raised again by the loop
                self._result = error

        self._thread = threading.Thread(target=write, name="checkpoint", daemon=False)
        self._thread.start()
        if not own:
            self._thread.join()
            if self._copies:
                self._copies = HostCopies()  # there may be room next time

    def ended(self) -> bool:
        """Whether a save has ended since ``finish`` was last called."""
        return self._thread is not None and not self._thread.is_alive()

    def finish(self) -> Saved | None:
        """Wait for the save that is under way; the checkpoint, None if none was begun.

        Raises:
            TrainError, OSError: it could not be written; older checkpoints stand as they were.
        """
        if self._thread is None:
            return None
        self._thread.join()
        self._thread, result, self._result = None, self._result, None
        if isinstance(result, BaseException):
            raise result
        assert result is not None
        return result


class HostCopies:
    """Memory that the state is copied to, the same at every save; pinned beside a GPU, which copies faster then."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}
        self.complete = True  # whether memory sufficed for all

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that is whole once the GPU is synchronized; the tensor itself where memory does not suffice."""
        held = self._held.get(name)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            held = self.reserve(name, tensor.shape, tensor.dtype, pinned=tensor.is_cuda)
        return tensor.cpu().contiguous() if held is None else held.copy_(tensor, non_blocking=True)

    def reserve(self, name: str, shape: torch.Size, dtype: torch.dtype, *, pinned: bool) -> torch.Tensor | None:
        """Memory for a tensor; None where there is not enough."""
        self._held.pop(name, None)
        num_bytes = shape.numel() * dtype.itemsize
        if not self._fits(1 << (num_bytes - 1).bit_length() if pinned else num_bytes):  # pinned in powers of two
            return None
        self._held[name] = torch.empty(shape, dtype=dtype, pin_memory=pinned)
        return self._held[name]

    def _fits(self, num_bytes: int) -> bool:
        if not self.complete or num_bytes < _SMALL_BYTES:
            return self.complete
        available = available_bytes()
        if available - num_bytes < _SPARE_BYTES:
            self.complete = False
            print(
                f"this machine has {available / 1e9:.1f} GB of memory left, too little for a copy of the state: training "
                "waits while checkpoints are written; checkpoint.asynchronous=false asks for that without a word",
                file=sys.stderr,
            )
        return self.complete
