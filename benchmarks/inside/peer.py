"""One loader under test, in an environment that has it: benchmarks/peers.py calls this file, once per job.

    python benchmarks/inside/peer.py NAME FOLDER JOB ...

Every loader shuffles, draws batches of ``BATCH`` samples and hands (key, JPEG) pairs to the same ``Collate``, which runs in
the loader's worker. Its settings are those of its documentation; prefetch is what the library has by default.
"""

import io
import json
import pickle
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

BATCH = 25
MARGIN = (
    6  # batches at either end of an epoch that are not timed: workers have read ahead, or have nothing left to read
)
SIDE = 224
SEED = 7
BUFFER = 1000  # of loaders that shuffle through a buffer
RATE_CPU_S = 1.5  # seconds of CPU time that a rate is measured for, whole epochs
Pairs = Sequence[tuple[str, bytes]]


# What is made of the samples, the same for all


class Collate:
    """Keys and one uint8 tensor: the JPEGs behind each other, or pictures [B, 3, SIDE, SIDE]."""

    def __init__(self, task: str) -> None:
        self.decode: Callable[[bytes], torch.Tensor] | None = {"raw": None, "pillow": by_pillow, "turbo": by_turbo}[
            task
        ]

    def __call__(self, pairs: Iterable[Any]) -> dict[str, Any]:
        found = [pair if isinstance(pair, tuple) else (pair["key"], pair["jpg"]) for pair in pairs]
        if self.decode is None:
            data = torch.frombuffer(bytearray(b"".join(jpeg for _, jpeg in found)), dtype=torch.uint8)
        else:
            data = torch.stack([self.decode(jpeg) for _, jpeg in found])
        return {"keys": [key for key, _ in found], "data": data}


def by_pillow(jpeg: bytes) -> torch.Tensor:
    """Decoded and resized by Pillow, as the documentations of all these loaders do it."""
    from PIL import Image

    with Image.open(io.BytesIO(jpeg)) as image:
        small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(small)).permute(2, 0, 1)


def by_turbo(jpeg: bytes) -> torch.Tensor:
    """Decoded by simplejpeg, resized by torch: what our fast mode does."""
    import simplejpeg

    pixels = torch.from_numpy(simplejpeg.decode_jpeg(jpeg, "RGB")).permute(2, 0, 1)[None]
    return torch.nn.functional.interpolate(pixels, size=(SIDE, SIDE), mode="bicubic", antialias=True)[0]


# The loaders


class Xctrain:
    """Ours: shards, order 1, crc of every payload. Task turbo is `model.decode=fast`, pillow is `exact`."""

    resumes = "one integer"

    def __init__(self, folder: Path, task: str, workers: int) -> None:
        from shards.order import Order, OrderSettings
        from shards.reader import SplitReader
        from shards.stream import Stream
        from xctrain.decode import Decoder
        from xctrain.loader import Loader, SlotRows

        reader = SplitReader(folder / "shards", "train")
        self.per_epoch = len(reader) // BATCH
        self.consumed = 0
        mode = {"pillow": "exact", "turbo": "fast"}.get(task)
        rows: Any = SlotRows(reader, "first", SEED, decoder=Decoder(mode)) if mode else RawSlots(reader)  # type: ignore[arg-type]
        stream = Stream(Order(reader.shard_sizes, OrderSettings(SEED)), BATCH)
        self.loader = Loader(rows, collate_rows, stream, 0, 1, BATCH, workers, 2, 600)
        self.batches: Any = None

    def epoch(self) -> Iterator[dict[str, Any]]:
        """The stream has no end; an epoch is a number of batches."""
        if self.batches is None:
            self.batches = self.loader.global_batches(self.consumed)
        for [batch], _ in islice(self.batches, self.per_epoch - self.consumed // BATCH % self.per_epoch):
            self.consumed += BATCH
            yield {"keys": batch.keys, "data": batch.data}

    def state(self) -> Any:
        return {"samples_consumed": self.consumed}

    def restore(self, state: Any) -> None:
        self.consumed = state["samples_consumed"]


class RawSlots:
    """Slots of the stream as rows whose picture is a JPEG, read and checked as in training, not decoded."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader

    def __getitem__(self, slot: Any) -> Any:
        from xctrain.collate import Row

        sample = self.reader.read(slot.index)
        return Row(slot.n, slot.epoch, sample.key, sample.image, ())


@dataclass(frozen=True)
class Made:
    """A batch of our loader, with the times that it writes into one."""

    keys: list[str]
    data: torch.Tensor
    read_s: float = 0.0
    prepare_s: float = 0.0


def collate_rows(rows: Iterable[Any]) -> Made:
    """Rows of our loader as ``Collate`` makes them of JPEGs."""
    keys, images = zip(*map(keyed, rows), strict=True)
    return Made(list(keys), as_data(images))


def keyed(row: Any) -> tuple[str, Any]:
    """A row's key and what goes into the batch; its decoded picture is let go of, as ``by_turbo`` does."""
    return row.key, row.image if isinstance(row.image, bytes) else resized(row.image)


def resized(image: Any) -> torch.Tensor:
    """A decoded picture as uint8 [3, SIDE, SIDE]."""
    from PIL import Image

    from xctrain.decode import as_tensor, resize

    if isinstance(image, torch.Tensor):
        return resize(image, SIDE, SIDE, "bicubic")
    return as_tensor(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC))


def as_data(images: Sequence[Any]) -> torch.Tensor:
    """JPEGs behind each other, or pictures as one tensor."""
    if isinstance(images[0], bytes):
        return torch.frombuffer(bytearray(b"".join(images)), dtype=torch.uint8)
    return torch.stack(images)


class TorchLike:
    """A loader that is iterated once per epoch, with state_dict and load_state_dict if the library has them."""

    resumes = "state_dict"
    loader: Any

    def epoch(self) -> Iterator[dict[str, Any]]:
        return iter(self.loader)

    def state(self) -> Any:
        return self.loader.state_dict()

    def restore(self, state: Any) -> None:
        self.loader.load_state_dict(state)


class Streaming(TorchLike):
    """mosaicml-streaming: MDS shards, its own loader."""

    def __init__(self, folder: Path, task: str, workers: int) -> None:
        from streaming import StreamingDataLoader, StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()
        dataset = StreamingDataset(local=str(folder / "mds"), shuffle=True, shuffle_seed=SEED, batch_size=BATCH)
        self.loader = StreamingDataLoader(
            dataset, batch_size=BATCH, num_workers=workers, collate_fn=Collate(task), persistent_workers=workers > 0
        )

    @staticmethod
    def prepare(folder: Path, pairs: Iterable[tuple[str, bytes]]) -> None:
        from streaming import MDSWriter

        with MDSWriter(out=str(folder / "mds"), columns={"key": "str", "jpg": "bytes"}) as writer:
            for key, jpeg in pairs:
                writer.write({"key": key, "jpg": jpeg})


class Litdata(TorchLike):
    """litdata: optimized chunks, its own loader."""

    def __init__(self, folder: Path, task: str, workers: int) -> None:
        from litdata import StreamingDataLoader, StreamingDataset

        dataset = StreamingDataset(str(folder / "litdata"), shuffle=True, seed=SEED)
        self.loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers, collate_fn=Collate(task))

    @staticmethod
    def prepare(folder: Path, pairs: Iterable[tuple[str, bytes]]) -> None:
        from litdata import optimize

        paths = sorted(str(path) for path in (folder / "files").iterdir())
        optimize(read_file, paths, output_dir=str(folder / "litdata"), chunk_bytes="64MB", num_workers=1)


def read_file(path: str) -> dict[str, Any]:
    """A sample for litdata."""
    return {"key": Path(path).stem, "jpg": Path(path).read_bytes()}


class Energon:
    """Megatron-Energon on our shards: savable loader, shuffle buffer, slices of 100 as its documentation has it."""

    resumes = "save_state_rank"

    def __init__(self, folder: Path, task: str, workers: int) -> None:
        from megatron.energon import Cooker, TaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset, stateless

        class Encoder(TaskEncoder):  # type: ignore[misc]
            decoder = None
            cookers = (Cooker(stateless(cook)),)

            def batch(self, samples: list[Any]) -> Any:
                return Collate(task)((sample["__key__"], sample["jpg"]) for sample in samples)

        self.per_epoch = num_samples(folder) // BATCH
        dataset = get_train_dataset(
            folder / "energon",
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=workers, seed_offset=SEED),
            batch_size=BATCH,
            shuffle_buffer_size=BUFFER,
            max_samples_per_sequence=100,
            task_encoder=Encoder(),
        )
        self.loader = get_savable_loader(dataset)
        self.drawn = 0
        self.batches: Any = None

    def epoch(self) -> Iterator[dict[str, Any]]:
        """It has no epochs either."""
        if self.batches is None:
            self.batches = iter(self.loader)
        for batch in islice(self.batches, self.per_epoch - self.drawn % self.per_epoch):
            self.drawn += 1
            yield batch

    def state(self) -> Any:
        return self.drawn, self.loader.save_state_rank()

    def restore(self, state: Any) -> None:
        self.drawn, inner = state
        self.loader.restore_state_rank(inner)

    @staticmethod
    def prepare(folder: Path, pairs: Iterable[tuple[str, bytes]]) -> None:
        """Our shards under other names, with our .nv-meta, told to hand over bytes."""
        from shards.energon import write_energon

        (folder / "energon").mkdir()
        for path in (folder / "shards").iterdir():
            (folder / "energon" / path.name).hardlink_to(path)
        write_energon(folder / "energon")
        kind = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
        (folder / "energon" / ".nv-meta" / "dataset.yaml").write_text(json.dumps(kind))


def cook(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample for Energon."""
    from megatron.energon import basic_sample_keys

    return {**basic_sample_keys(sample), "jpg": sample["jpg"]}


class Webdataset(TorchLike):
    """webdataset on our shards. It has no state: what a restart does is what it does by itself."""

    resumes = "none"

    def __init__(self, folder: Path, task: str, workers: int) -> None:
        import webdataset

        urls = sorted(str(path) for path in (folder / "shards").glob("*.tar"))
        dataset = webdataset.WebDataset(urls, shardshuffle=len(urls), seed=SEED).shuffle(BUFFER, seed=SEED)
        dataset = dataset.to_tuple("__key__", "jpg").batched(BATCH, collation_fn=Collate(task))
        self.loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=workers)

    def state(self) -> Any:
        return {}

    def restore(self, state: Any) -> None:
        pass


class Datasets(TorchLike):
    """Hugging Face datasets: Parquet, streamed, under torchdata's StatefulDataLoader, as its documentation resumes."""

    resumes = "state_dict"

    def __init__(self, folder: Path, task: str, workers: int) -> None:
        from datasets import load_dataset
        from torchdata.stateful_dataloader import StatefulDataLoader

        files = sorted(str(path) for path in (folder / "parquet").iterdir())
        cache = str(folder / "datasets-cache")
        dataset = load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=cache)
        dataset = dataset.shuffle(seed=SEED, buffer_size=BUFFER)
        self.loader = StatefulDataLoader(
            dataset, batch_size=BATCH, num_workers=workers, collate_fn=Collate(task), persistent_workers=workers > 0
        )

    @staticmethod
    def prepare(folder: Path, pairs: Iterable[tuple[str, bytes]]) -> None:
        import pyarrow
        import pyarrow.parquet

        (folder / "parquet").mkdir()
        rows, number = list(pairs), 0
        for number in range(8):
            part = rows[number::8]
            table = pyarrow.table({"key": [key for key, _ in part], "jpg": [jpeg for _, jpeg in part]})
            pyarrow.parquet.write_table(table, folder / "parquet" / f"{number}.parquet", row_group_size=100)


class Torchdata(TorchLike):
    """torchdata's StatefulDataLoader over a folder of JPEG files, shuffled by its random sampler."""

    def __init__(self, folder: Path, task: str, workers: int) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader

        self.loader = StatefulDataLoader(
            Files(folder / "files"),
            batch_size=BATCH,
            shuffle=True,
            num_workers=workers,
            collate_fn=Collate(task),
            persistent_workers=workers > 0,
        )


class Files(torch.utils.data.Dataset[tuple[str, bytes]]):
    """A folder of JPEG files."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(str(path) for path in folder.iterdir())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[str, bytes]:
        path = Path(self.paths[index])
        return path.stem, path.read_bytes()


LOADERS: dict[str, Any] = {
    "xctrain": Xctrain,
    "streaming": Streaming,
    "litdata": Litdata,
    "energon": Energon,
    "webdataset": Webdataset,
    "datasets": Datasets,
    "torchdata": Torchdata,
}


# The jobs


def num_samples(folder: Path) -> int:
    """Of the dataset."""
    return len(list((folder / "files").iterdir()))


def prepare(name: str, folder: Path) -> dict[str, Any]:
    """Bring the dataset into the loader's own format, if it has one."""
    make = getattr(LOADERS[name], "prepare", None)
    if make:
        make(folder, ((path.stem, path.read_bytes()) for path in sorted((folder / "files").iterdir())))
    return {}


def rate(name: str, folder: Path, task: str, workers: int) -> dict[str, float]:
    """Samples/s and per second of CPU time of all processes, inside epochs; seconds from making the loader to a batch."""
    began = time.perf_counter()
    loader = LOADERS[name](folder, task, workers)
    first: float | None = None
    timed = used = samples = 0.0
    stop = num_samples(folder) // BATCH - MARGIN
    while used < RATE_CPU_S:
        for number, _ in enumerate(loader.epoch(), 1):
            first = first or time.perf_counter() - began
            if number == MARGIN:
                since, cpu = time.perf_counter(), cpu_seconds()
            if number == stop:
                timed, used = timed + time.perf_counter() - since, used + cpu_seconds() - cpu
                samples += (stop - MARGIN) * BATCH
    return {"samples_per_s": samples / timed, "samples_per_cpu_s": samples / used, "first_batch_s": first or 0.0}


def cpu_seconds() -> float:
    """CPU time of this process and its children, which on a busy machine says more than a clock."""
    import psutil

    children = psutil.Process().children(recursive=True)
    return time.process_time() + sum(sum(child.cpu_times()[:2]) for child in children)


def rates(name: str, folder: Path, _round: str) -> dict[str, Any]:
    """All rates."""
    found = {}
    for task in ("raw", "pillow", "turbo"):
        for workers in (0, 2):
            found[f"{task}_{workers}"] = rate(name, folder, task, workers)
    return found


def interrupt(name: str, folder: Path, out: Path) -> dict[str, Any]:
    """Run one epoch and keep state and keys at 5, 50 and 95 % of it; what the epoch itself held."""
    loader = LOADERS[name](folder, "pillow", 2)
    total = num_samples(folder) // BATCH
    stops = {max(1, total * percent // 100): percent for percent in (5, 50, 95)}
    keys: list[str] = []
    for number, batch in enumerate(islice(loader.epoch(), total), 1):
        keys += batch["keys"]
        if number in stops:
            state = pickle.dumps((loader.state(), keys))
            (out / f"{name}-{stops[number]}.pickle").write_bytes(state)
    return {"epoch": counts(keys, folder)}


def resume(name: str, folder: Path, out: Path, percent: int) -> dict[str, Any]:
    """Go on in a new process: seconds to the first batch, and what was drawn twice or never, over one epoch's draws."""
    state, keys = pickle.loads((out / f"{name}-{percent}.pickle").read_bytes())
    total = num_samples(folder) // BATCH
    left = total - len(keys) // BATCH
    began = time.perf_counter()
    loader = LOADERS[name](folder, "pillow", 2)
    loader.restore(state)
    first = None
    for batch in islice(loader.epoch(), left):
        first = first or time.perf_counter() - began
        keys += batch["keys"]
    return {"first_batch_s": first, "state_bytes": size_of(state), **counts(keys, folder)}


def counts(keys: Sequence[str], folder: Path) -> dict[str, int]:
    """Of so many draws: draws of a key that had been drawn before, and keys that were never drawn."""
    found = Counter(keys)
    return {"draws": len(keys), "repeated": len(keys) - len(found), "skipped": num_samples(folder) - len(found)}


def size_of(state: Any) -> int:
    """Bytes of a loader's state: as JSON where it can be written so."""
    try:
        return len(json.dumps(state))
    except TypeError:
        return len(pickle.dumps(state))


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    name, folder, job, *rest = sys.argv[1:]
    jobs: dict[str, Callable[..., dict[str, Any]]] = {
        "prepare": prepare,
        "rates": rates,
        "interrupt": lambda n, f, out: interrupt(n, f, Path(out)),
        "resume": lambda n, f, out, percent: resume(n, f, Path(out), int(percent)),
    }
    print("\n" + json.dumps(jobs[job](name, Path(folder), *rest)))


if __name__ == "__main__":
    main()
