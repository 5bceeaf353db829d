"""The loader over the stream: told where to start, it never counts."""

import gc
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from conftest import write_dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import collate

from shards.errors import FormatError, UserError
from shards.order import Order, OrderSettings
from shards.reader import SplitReader
from shards.stream import Slot, Stream
from xctrain.captions import choose_captions
from xctrain.collate import Batch, Row
from xctrain.loader import Loader, SlotRows, num_workers, worker_notes


def make_loader(
    shards: Path,
    workers: int = 0,
    rank: int = 0,
    world_size: int = 1,
    micro_batch: int = 2,
    end: int | None = None,
    collator: Any = collate,
    timeout_s: int = 60,
) -> Loader:
    reader = SplitReader(shards, "train")
    stream = Stream(Order(reader.shard_sizes, OrderSettings(seed=1, fragment=8, window=32, lanes=4)), 12, end)
    return Loader(
        SlotRows(reader, "random", seed=1), collator, stream, rank, world_size, micro_batch, workers, 2, timeout_s
    )


def take(loader: Loader, start: int, count: int) -> list[list[Batch]]:
    batches = loader.global_batches(start)
    return [next(batches)[0] for _ in range(count)]


def keys(step: list[Batch]) -> list[str]:
    return [key for batch in step for key in batch.keys]


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_nothing(drawn_shards: Path, workers: int) -> None:
    alone, many = make_loader(drawn_shards), make_loader(drawn_shards, workers)
    for a, b in zip(take(alone, 84, 4), take(many, 84, 4), strict=True):
        assert [x.positions for x in a] == [x.positions for x in b]
        assert [x.keys for x in a] == [x.keys for x in b]
        assert all(torch.equal(x.labels, y.labels) for x, y in zip(a, b, strict=True))
        assert all(torch.equal(x.inputs["pixels"], y.inputs["pixels"]) for x, y in zip(a, b, strict=True))


@given(step=st.integers(0, 30), cut=st.sampled_from([(1, 12), (1, 3), (2, 6), (2, 1), (3, 2), (4, 3), (6, 1), (12, 1)]))
@settings(deadline=None, max_examples=30)
def test_ranks_share_each_global_batch_and_starting_later_equals_dropping(
    drawn_shards: Path, step: int, cut: tuple[int, int]
) -> None:
    world_size, micro_batch = cut
    parts = [
        take(make_loader(drawn_shards, 0, rank, world_size, micro_batch), 12 * step, 1)[0] for rank in range(world_size)
    ]
    assert {len(part) for part in parts} == {12 // (world_size * micro_batch)}
    [whole] = take(make_loader(drawn_shards, micro_batch=12), 12 * step, 1)
    assert [key for part in parts for key in keys(part)] == keys(whole)


@pytest.mark.parametrize("workers", [0, 1])
def test_worker_that_lives_on_through_the_epochs_never_serves_a_leftover(drawn_shards: Path, workers: int) -> None:
    loader = make_loader(drawn_shards, workers, micro_batch=12, end=500)
    slots = [
        (n, key)
        for batches, _ in loader.global_batches(start=156)  # within epoch 1
        for batch in batches
        for n, key, masked in zip(batch.positions, batch.keys, batch.masked, strict=True)
        if not masked
    ]
    assert sorted(n for n, _ in slots) == list(range(156, 500))
    everything = sorted(SplitReader(drawn_shards, "train").keys())
    for epoch in (2, 3, 4):
        assert sorted(key for n, key in slots if n // 100 == epoch) == everything


def test_first_batch_late_in_an_epoch_reads_less_than_a_window_and_no_picture_before(tmp_path: Path) -> None:
    write_dataset(tmp_path, {"train": [500] * 3})
    reader = SplitReader(tmp_path, "train")
    settings = OrderSettings(seed=1, fragment=8, window=256, lanes=4)
    stream = Stream(Order(reader.shard_sizes, settings), 12)
    loader = Loader(SlotRows(reader, "random", seed=1), collate, stream, 0, 1, 12, 0, 2, 60)
    size = sum(shard.num_bytes for shard in reader.shards) / len(reader)

    before = bytes_read()
    [[batch]] = take(loader, 1428, 1)  # 95 % of the first epoch
    num_bytes = bytes_read() - before

    assert sorted(batch.positions) == list(range(1428, 1440))
    assert (
        num_bytes < 256 * size / 2
    )  # the batch itself, indexes of the shards that it touches, lines of the sample lists


def bytes_read() -> int:
    """Bytes that this process has asked the kernel for."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_preparing_a_loader_with_accelerate_leaves_it_as_it_is(drawn_shards: Path) -> None:
    loader = make_loader(drawn_shards)
    assert Accelerator(cpu=True).prepare(loader) is loader  # no torch loader, so nothing that would be sharded again


def test_iterating_leaves_the_global_generators_alone(drawn_shards: Path) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    take(make_loader(drawn_shards, workers=1), 0, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_stream_ends_with_surplus_slots_that_have_no_loss(drawn_shards: Path) -> None:
    *_, last = make_loader(drawn_shards, end=100).global_batches(84)
    reasons = {n: why for batch in last[0] for n, why in zip(batch.positions, batch.masked, strict=True)}
    assert reasons == {n: "surplus" if n >= 100 else None for n in range(96, 108)}
    assert len(list(make_loader(drawn_shards, end=100).global_batches(0))) == 9
    assert list(make_loader(drawn_shards, end=100).global_batches(100)) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_missing_shard_is_an_error_for_the_user_from_any_process(
    drawn_shards: Path, tmp_path: Path, workers: int
) -> None:
    shards = Path(shutil.copytree(drawn_shards, tmp_path / "shards"))
    loader = make_loader(shards, workers)
    (shards / "train-000001.tar").unlink()
    with pytest.raises(FormatError) as error:
        take(loader, 0, 1)
    assert str(error.value).startswith(f"{shards}/train-000001.tar: is missing, the manifest lists its shard")
    assert "Traceback" not in str(error.value)


def refuse_rows(_rows: Iterable[Row]) -> Batch:
    raise UserError("rows are refused", key="k")


@pytest.mark.parametrize("workers", [0, 1])
def test_error_of_the_collator_keeps_its_text_and_fields(drawn_shards: Path, workers: int) -> None:
    with pytest.raises(UserError, match=r"^rows are refused$") as error:
        take(make_loader(drawn_shards, workers, collator=refuse_rows), 0, 1)
    assert error.value.key == "k"


def fail(_rows: Iterable[Row]) -> Batch:
    raise RuntimeError("a bug")


def test_bug_in_a_worker_keeps_its_traceback(drawn_shards: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)Caught RuntimeError in DataLoader worker.*in fail.*a bug"):
        take(make_loader(drawn_shards, workers=1, collator=fail), 0, 1)


def stall(rows: Iterable[Row]) -> Batch:
    rows = list(rows)
    if rows[0].n >= 24:
        time.sleep(8)
    return collate(rows)


def test_stalled_read_names_shard_and_sample_after_the_timeout(drawn_shards: Path) -> None:
    loader = make_loader(drawn_shards, workers=1, collator=stall, timeout_s=4, micro_batch=12)
    batches = loader.global_batches(0)
    next(batches)
    next(batches)
    with pytest.raises(UserError) as error:
        next(batches)
    names = []
    for slot in loader.stream.step(24):
        shard, inside = loader.rows.reader.locate(slot.index)
        names.append(f"{shard.name} sample {inside}")
    assert str(error.value).startswith(", ".join(names) + ": DataLoader timed out after 4 seconds; see that the disk")


def test_damaged_line_of_the_sample_list_masks_its_slot(drawn_shards: Path, tmp_path: Path) -> None:
    shards = Path(shutil.copytree(drawn_shards, tmp_path / "shards"))
    loader = make_loader(shards, micro_batch=12)
    loader.rows.reader.require_whole()
    path = shards / "train-000000.meta.jsonl"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"key":"000000000005"', b'"kez":"000000000005"', 1))
    assert path.read_bytes() != data
    steps = take(loader, 0, 9)
    masked = [(k, why) for [b] in steps for k, why in zip(b.keys, b.masked, strict=True) if why]
    assert masked[0][0] == "sample-5"
    assert masked[0][1].startswith("damaged: train-000000.tar: sample 5: line 6 of train-000000.meta.jsonl is damaged")


class FailingReader(SplitReader):
    """Its disk does not answer the first times."""

    failures = 0

    def read(self, index: int, epoch: int | None = None) -> Any:
        if self.failures:
            self.failures -= 1
            raise OSError(5, "Input/output error")
        return super().read(index, epoch)


@pytest.fixture
def failing(drawn_shards: Path, monkeypatch: pytest.MonkeyPatch) -> SlotRows:
    monkeypatch.setattr("xctrain.loader._FIRST_PAUSE_S", 0.001)
    return SlotRows(FailingReader(drawn_shards, "train"), "first", seed=0)


def test_passing_input_error_is_tried_again(failing: SlotRows) -> None:
    failing.reader.failures = 2  # type: ignore[attr-defined]
    assert failing[Slot(0, 0, 7)].key == "000000000007"


def test_lasting_input_error_fails_with_the_shard_and_never_masks(failing: SlotRows) -> None:
    failing.reader.failures = 3  # type: ignore[attr-defined]
    with pytest.raises(
        UserError, match=r"train-000000.tar: sample 7 cannot be read after 3 tries: \[Errno 5\] Input/out"
    ):
        failing[Slot(0, 0, 7)]


@given(seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000), k=st.integers(1, 7))
@settings(deadline=None, max_examples=50)
def test_as_many_epochs_as_captions_see_every_caption(seed: int, epoch: int, k: int) -> None:
    captions = [str(i) for i in range(k)]
    seen = [choose_captions(captions, "random", seed=seed, epoch=epoch + i, key="x") for i in range(k)]
    assert sorted(c for [c] in seen) == captions


def test_first_and_all_captions() -> None:
    assert choose_captions(["a", "b"], "first", seed=1, epoch=5, key="x") == ("a",)
    assert choose_captions(["a", "b"], "all", seed=1, epoch=5, key="x") == ("a", "b")


def test_keys_and_seeds_draw_different_captions() -> None:
    captions = [str(i) for i in range(5)]
    by_key = {choose_captions(captions, "random", seed=1, epoch=0, key=str(i)) for i in range(50)}
    by_seed = {choose_captions(captions, "random", seed=i, epoch=0, key="x") for i in range(50)}
    assert len(by_key) == len(by_seed) == 5


@pytest.mark.parametrize(
    ("processes", "cpus", "expected"), [(4, 16, 4), (4, 64, 4), (4, 12, 3), (2, 2, 1), (8, 4, 1), (1, 64, 1)]
)
def test_automatic_workers_match_the_processes_of_the_node(processes: int, cpus: int, expected: int) -> None:
    assert num_workers("auto", processes, cpus) == expected


def test_workers_that_are_set_are_taken() -> None:
    assert num_workers(0, 4, 64) == 0
    assert num_workers(7, 4, 4) == 7


def test_more_workers_than_cpus_are_noted_by_us_alone(drawn_shards: Path, recwarn: pytest.WarningsRecorder) -> None:
    cpus = len(os.sched_getaffinity(0))
    assert worker_notes("auto", cpus + 1) == worker_notes(cpus, 1) == []
    [note] = worker_notes(cpus, 2)
    assert note.startswith(
        f"data.workers is {cpus}, {2 * cpus} on this node, which has {cpus} CPUs for them: they take"
    )
    take(make_loader(drawn_shards, cpus + 1), 0, 1)
    assert not recwarn.list


def test_loader_leaves_no_worker_and_no_open_file(drawn_shards: Path) -> None:
    take(make_loader(drawn_shards, workers=1), 0, 1)
    gc.collect()
    before = open_files()
    for _ in range(3):
        take(make_loader(drawn_shards, workers=2), 0, 1)
    gc.collect()
    assert len(open_files()) <= len(before), sorted(set(open_files()) - set(before))
    assert children() == []


def open_files() -> list[str]:
    return [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]


def children() -> list[str]:
    found = []
    for task in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        with suppress(OSError):  # that thread has ended
            found += task.read_text().split()
    return found


@pytest.mark.slow
def test_memory_of_trainer_and_workers_is_flat_over_ten_epochs(drawn_shards: Path) -> None:
    sizes = []
    for number, _ in enumerate(make_loader(drawn_shards, workers=2, end=1200).global_batches(0)):
        if number % 8 == 7:  # about an epoch; the workers live as long as the iteration
            processes = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
            assert len(processes) == 3
            sizes.append(sum(_bytes_of(pid) for pid in processes if pid))
    assert len(sizes) >= 10
    assert max(sizes[2:]) < 1.05 * sizes[2]


def _bytes_of(pid: int) -> int:
    """Memory that a process has written, its share of what it has in common with others; files that others map are left out."""
    [line] = [x for x in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if x.startswith("Pss_Dirty")]
    return int(line.split()[1]) * 1024
