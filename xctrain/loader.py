"""The torch loader over a Stream: told where to start, it never counts; what it read ahead is dropped at a stop."""

import os
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from shards.errors import DamagedSampleError, UserError, counted
from shards.joined import SampleReader
from shards.sample import Sample
from shards.stream import Slot, Stream, share
from xctrain.batchmemory import BatchMemory, Packed
from xctrain.captions import CaptionChoice, choose_captions
from xctrain.collate import Batch, Row
from xctrain.decode import Decoder
from xctrain.phase import enter
from xctrain.processes import become_worker

if TYPE_CHECKING:
    from PIL.Image import Image

Collator = Callable[[Iterable[Row]], Batch]

SURPLUS = "surplus"  # reason of slots past the run's end
DAMAGED = "damaged"  # first word of the reason of slots that could not be read

_READ_TRIES = 3
_FIRST_PAUSE_S = 0.5
_GRAY = (127, 127, 127)


class SlotRows(Dataset[Row]):
    """Slots of the stream as decoded rows. Holds no position."""

    def __init__(
        self,
        reader: SampleReader,
        choice: CaptionChoice,
        seed: int,
        *,
        blank: bool = False,
        decoder: Decoder = Decoder(),  # noqa: B008 - frozen
    ) -> None:
        self.reader = reader
        self.choice = choice
        self.seed = seed
        self.decoder = decoder
        self.blank = blank  # gray pictures, for scoring what a model says without looking

    def __getitem__(self, slot: Slot) -> Row:
        """One row. A damaged sample keeps its slot, without loss: nothing is ever substituted or shifted."""
        if slot.surplus:
            return Row(slot.n, slot.epoch, "", self._blank(), ("",), masked=SURPLUS)
        since = time.perf_counter()
        try:
            sample = self._read(slot)
            read_s = time.perf_counter() - since
            if self.blank:
                image = self._blank(sample.meta["width"], sample.meta["height"])
            else:
                image = self.decoder(sample)
        except DamagedSampleError as error:
            key = error.key or f"sample-{slot.index}"  # without one where the list of samples itself is damaged
            return Row(slot.n, slot.epoch, key, self._blank(), ("",), masked=f"{DAMAGED}: {error}")
        captions = choose_captions(sample.captions, self.choice, seed=self.seed, epoch=slot.epoch, key=sample.key)
        return Row(slot.n, slot.epoch, sample.key, image, captions, read_s=read_s)

    def _read(self, slot: Slot) -> Sample:
        """Read a sample; a passing I/O error is tried again, a lasting one fails the run."""
        pause = _FIRST_PAUSE_S
        for left in reversed(range(_READ_TRIES)):
            try:
                return self.reader.read(slot.index, slot.epoch)
            except OSError as error:
                if not left:
                    shard, _ = self.reader.locate(slot.index)
                    raise UserError(
                        f"{shard.name}: sample {slot.index} cannot be read after {_READ_TRIES} tries: {error}; see that the "
                        "disk is there, then start again to go on",
                        path=shard.name,
                    ) from error
                time.sleep(pause)
                pause *= 2
        raise AssertionError

    def _blank(self, width: int = 64, height: int = 64) -> "Image | Tensor":
        from PIL import Image

        return self.decoder.ready(Image.new("RGB", (width, height), _GRAY))


@dataclass(frozen=True)
class MicroBatchSampler(Sampler[list[Slot]]):
    """The slots of one rank's micro-batches from position ``start`` on. Stateless: iterating again begins again."""

    stream: Stream
    start: int
    rank: int
    world_size: int
    micro_batch: int

    def __iter__(self) -> Iterator[list[Slot]]:
        for step in self.stream.steps_from(self.start):
            yield from share(step, self.rank, self.world_size, self.micro_batch)


@dataclass(frozen=True)
class _Requests(Sampler["tuple[list[Slot], int | None]"]):
    """What workers are asked for: the slots of a micro-batch, and the buffer that it goes into."""

    slots: MicroBatchSampler
    memory: BatchMemory | None  # none without workers

    def __iter__(self) -> Iterator[tuple[list[Slot], int | None]]:
        for slots in self.slots:
            yield slots, self.memory.lend() if self.memory else None


@dataclass(frozen=True)
class _MicroBatches(Dataset["Batch | UserError | Packed"]):
    """Slots as one micro-batch. An error for the user crosses the process border as a value, not as a traceback."""

    rows: SlotRows
    collator: Collator
    memory: BatchMemory | None = None

    def __getitem__(self, request: tuple[list[Slot], int | None]) -> Batch | UserError | Packed:
        slots, buffer = request
        batch = self.make(slots)
        return batch if self.memory is None or buffer is None else self.memory.pack(batch, buffer)

    def make(self, slots: list[Slot]) -> Batch | UserError:
        """The micro-batch."""
        since = time.perf_counter()
        waits: list[float] = []

        def row_of(slot: Slot) -> Row:
            row = self.rows[slot]
            waits.append(row.read_s)
            return row

        try:
            # One by one: a collator may resize a picture while the caches hold it, and let go of it before the next.
            batch = self.collator(map(row_of, slots))
        except UserError as error:
            return error
        read_s = sum(waits)
        return replace(batch, read_s=read_s, prepare_s=time.perf_counter() - since - read_s)


def _as_it_is(batch: Any) -> Any:
    return batch  # torch's own would look into every list of it for arrays


@dataclass(frozen=True)
class Loader:
    """Global batches of one rank."""

    rows: SlotRows
    collator: Collator
    stream: Stream
    rank: int
    world_size: int
    micro_batch: int
    num_workers: int
    prefetch: int
    timeout_s: int  # for a batch, after which the run ends with an error
    delivered: Callable[[int], None] | None = None  # told the position below which every sample is here

    def micro_batches(self, start: int) -> "DataLoader[Any]":
        """Micro-batches from position ``start``; not to be passed to ``accelerator.prepare``, which shards again."""
        workers: dict[str, Any] = {}
        memory = None
        if self.num_workers:
            # As many as are under way, and those of the step that is computed and of the one that is put together.
            memory = BatchMemory(self.num_workers * self.prefetch + 2 * self._per_step)
            workers = {
                "multiprocessing_context": "fork",  # what inherits the memory, and is the trainer's own child
                "prefetch_factor": self.prefetch,
                "worker_init_fn": become_worker,
                "timeout": self.timeout_s,
            }
        return DataLoader(
            _MicroBatches(self.rows, self.collator, memory),
            sampler=_Requests(
                MicroBatchSampler(self.stream, start, self.rank, self.world_size, self.micro_batch), memory
            ),
            batch_size=None,
            num_workers=self.num_workers,
            collate_fn=_as_it_is,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # a private one: iterating draws from it, and the global one must not move
            **workers,
        )

    def first_batch(self, start: int) -> Batch | None:
        """The first micro-batch from position ``start`` on; None if there is none or it cannot be made."""
        if self.stream.end is not None and start >= self.stream.end:
            return None
        slots = self.stream.micro_batches(start, self.rank, self.world_size, self.micro_batch)[0]
        batch = _MicroBatches(self.rows, self.collator).make(slots)
        return batch if isinstance(batch, Batch) else None

    def global_batches(self, start: int) -> Generator[tuple[list[Batch], float], None, None]:
        """This rank's micro-batches of each step from ``start`` on, and the seconds that were spent waiting for them.

        Raises:
            UserError: what a worker met.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create")  # worker_notes says it
            batches = iter(self.micro_batches(start))
        for n in count(start, self.stream.global_batch):
            if self.stream.end is not None and n >= self.stream.end:
                return
            since = time.perf_counter()
            enter(f"waiting for data from position {n} on")
            micro_batches = []
            for number in range(self._per_step):
                batch = self._next(batches, n, number)
                if isinstance(batch, UserError):
                    try:
                        raise batch
                    finally:
                        del batch, batches  # an error that its own frame holds would keep the workers alive
                micro_batches.append(batch)
            if self.delivered:
                self.delivered(n + self.stream.global_batch)
            yield micro_batches, time.perf_counter() - since

    @property
    def _per_step(self) -> int:
        return self.stream.global_batch // (self.world_size * self.micro_batch)

    def _next(self, batches: "Iterator[Batch | UserError | Packed]", n: int, number: int) -> Batch | UserError:
        try:
            batch = next(batches)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader "):  # torch's own: a worker that stalls, or was killed
                raise
            slots = self.stream.micro_batches(n, self.rank, self.world_size, self.micro_batch)[number]
            places = [(shard.name, inside) for shard, inside in (self.rows.reader.locate(s.index) for s in slots)]
            raise UserError(
                f"{', '.join(f'{shard} sample {inside}' for shard, inside in places)}: {error}; see that the disk answers "
                "and memory is left, then start again to go on",
                path=places[0][0],
            ) from None
        return batch.open() if isinstance(batch, Packed) else batch


def lost_worker(error: BaseException | None) -> str | None:
    """How torch noticed that a loader worker of this process was killed; None for any other error.

    It says so in its handler of SIGCHLD, which raises wherever the process is at that moment.
    """
    while error is not None:
        if str(error).startswith("DataLoader worker (pid"):
            return str(error).rstrip(". ")
        error = error.__cause__ or error.__context__
    return None


def num_workers(setting: int | Literal["auto"], local_world_size: int, num_cpus: int | None = None) -> int:
    """Loader workers a process: as many as processes on the node, at most CPUs div processes, at least 1."""
    if setting != "auto":
        return setting
    return max(1, min(local_world_size, (num_cpus or _usable_cpus()) // local_world_size))


def worker_notes(setting: int | Literal["auto"], local_world_size: int) -> list[str]:
    """What to say of more workers than can run at once, which is allowed and seldom meant."""
    cpus = _usable_cpus()
    if setting == "auto" or setting * local_world_size <= cpus:
        return []
    automatic = num_workers("auto", local_world_size, cpus)
    return [
        f"data.workers is {setting}, {setting * local_world_size} on this node, which has {counted(cpus, 'CPU')} for them: they "
        f"take memory and wait for each other; auto would be {automatic}"
    ]


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0))
