"""Laws over chains of starts, kills and changing machines: each position once, each epoch whole.

The runs are simulated: real segments, real order, real cuts into ranks and micro-batches, no model.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shards.hashing import slot_digest
from shards.manifest import Manifest, ShardEntry
from shards.quarantine import Quarantine
from shards.reader import SplitReader
from shards.settings import load_settings
from shards.stream import Slot, Stream, divisors
from xctrain.config import Config
from xctrain.data import Data, Dataset
from xctrain.resume import next_segments, run_length
from xctrain.state import Source, TrainState

Place = tuple[str, int]  # a sample: its shard, and its number in it


@dataclass(frozen=True)
class Start:
    """One start of a run: on what, with which data, and when it ends."""

    ranks: int
    micro_batch: int
    accumulation: int
    data: int = 0  # which of the versions of the data
    save_every: int = 3
    steps: int = 5  # until it is killed
    stopped: bool = False  # by a signal, so that it saves

    @property
    def global_batch(self) -> int:
        return self.ranks * self.micro_batch * self.accumulation


@dataclass
class Simulated:
    """A run's checkpoint and logs, as kills leave them."""

    versions: Sequence[Data]
    settings: Sequence[str]
    saved: str = field(default_factory=lambda: json.dumps(TrainState().to_json()))
    trained: list[tuple[int, Place, int]] = field(default_factory=list)  # position, sample, digest
    begun: list[tuple[int, int]] = field(default_factory=list)  # position and data of each start

    def run(self, start: Start, *, to_the_end: bool = False) -> TrainState:
        state = TrainState.from_json(json.loads(self.saved))
        self.trained = [slot for slot in self.trained if slot[0] < state.samples_consumed]  # logs are cut back
        self.begun.append((state.samples_consumed, start.data))
        data = self.versions[start.data]
        config = load_settings(Config, None, [*self.settings, f"train.global_batch={start.global_batch}"])
        state = TrainState(**{**state.__dict__, "segments": next_segments(config, state, data)})
        order = data.order(state.segments)
        _, end = run_length(config, state.segments, order)
        stream = Stream(order, start.global_batch, end)
        done = 0
        while state.samples_consumed < end and (to_the_end or done < start.steps):
            slots = list(self.slots(stream, state.samples_consumed, start))
            for slot in slots:
                shard, inside = data.reader.locate(slot.index)
                self.trained.append((slot.n, (shard.name, inside), int(slot_digest(slot.n, slot.index))))
            state = state.advance(len(slots), 0)
            done += 1
            if done % start.save_every == 0 or state.samples_consumed == end:
                self.saved = json.dumps(state.to_json())
        if start.stopped:
            self.saved = json.dumps(state.to_json())
        return state

    def slots(self, stream: Stream, n: int, start: Start) -> Iterator[Slot]:
        """What all ranks train on in one step."""
        for rank in range(start.ranks):
            micro_batches = stream.micro_batches(n, rank, start.ranks, start.micro_batch)
            assert len(micro_batches) == start.accumulation
            yield from (slot for micro in micro_batches for slot in micro if not slot.surplus)


def entry(name: str, size: int) -> ShardEntry:
    return ShardEntry(f"{name}.tar", "train", size, 0, "0" * 64, "0" * 64, "0" * 64)


def dataset(
    folder: Path, name: str, shards: list[ShardEntry], repeat: int = 1, left_out: Sequence[int] = ()
) -> Dataset:
    manifest = Manifest(tuple(shards))
    reader = SplitReader(folder, "train", manifest)
    quarantine_id = str(left_out) if left_out else None
    kept = len(reader) - len(left_out)
    source = Source(name, manifest.manifest_id, kept, repeat, quarantine_id, tuple(left_out))
    return Dataset(source, reader, Quarantine(()))


def due(data: Data) -> Counter[Place]:
    """How often each sample comes in an epoch."""
    counts: Counter[Place] = Counter()
    for part in data.datasets:
        for index in range(len(part.reader)):
            if index not in part.source.left_out:
                shard, inside = part.reader.locate(index)
                counts[shard.name, inside] += part.source.repeat
    return counts


def require_whole_epochs(run: Simulated, state: TrainState) -> None:
    """Every position once, and every epoch what the data were that its begin found."""
    slots = sorted(run.trained)
    assert [n for n, _, _ in slots] == list(range(state.samples_consumed))
    begin = 0
    while begin < state.samples_consumed:
        expected = due(run.versions[[data for n, data in run.begun if n <= begin][-1]])
        stop = begin + expected.total()
        found = Counter(place for _, place, _ in slots[begin:stop])
        assert found == expected if stop <= state.samples_consumed else found <= expected
        begin = stop


FOLDER = Path("nowhere")
machines = st.builds(
    Start,
    ranks=st.integers(1, 8),
    micro_batch=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    save_every=st.integers(1, 4),
    steps=st.integers(0, 12),
    stopped=st.booleans(),
)
orders = st.builds(
    lambda *values: [f"{name}={value}" for name, value in zip(("train.seed", *ORDER_FIELDS), values, strict=True)],
    st.integers(0, 2**32),
    st.integers(1, 10),
    st.integers(1, 60),
    st.integers(1, 9),
)
ORDER_FIELDS = ("order.fragment", "order.window", "order.lanes")
sizes = st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(any)


@settings(deadline=None, max_examples=60)
@given(sizes, orders, st.lists(machines, min_size=4, max_size=8), machines)
@example([40, 40, 20], ["train.seed=0"], [Start(r, 1, 24 // r, steps=4) for r in (4, 2, 1, 3)], Start(8, 3, 1))
@example([40, 40, 20], ["train.seed=0"], [Start(2, 3, b // 6, steps=1) for b in (24, 96, 48, 24)], Start(1, 4, 3))
def test_any_chain_of_machines_and_kills_trains_what_one_undisturbed_run_trains(
    sizes: list[int], order: list[str], chain: list[Start], last: Start
) -> None:
    data = Data((dataset(FOLDER, "", [entry(f"train-{i:06d}", size) for i, size in enumerate(sizes)]),))
    length = [*order, "train.epochs=3", "train.num_steps=null"]
    straight, moved = Simulated([data], length), Simulated([data], length)
    expected = straight.run(Start(1, 1, 1), to_the_end=True)
    for start in chain:
        moved.run(start)
    state = moved.run(last, to_the_end=True)

    assert state.samples_consumed == expected.samples_consumed == 3 * sum(sizes)
    assert sorted(moved.trained) == sorted(straight.trained)
    require_whole_epochs(moved, state)


@settings(deadline=None, max_examples=40)
@given(
    versions=st.lists(
        st.tuples(st.booleans(), st.integers(1, 3), st.sets(st.integers(0, 9), max_size=4)), min_size=2, max_size=5
    ),
    order=orders,
    chain=st.lists(machines, min_size=4, max_size=8),
    last=machines,
)
def test_data_that_change_anywhere_in_a_chain_leave_every_epoch_whole(
    versions: list[tuple[bool, int, set[int]]], order: list[str], chain: list[Start], last: Start
) -> None:
    opened = []
    main, small = [entry("a-0", 10), entry("a-1", 7)], [entry("b-0", 6)]
    for number, (grows, repeat, left_out) in enumerate(versions):
        if grows:
            main, small = [*main, entry(f"a-{number + 2}", number + 3)], [*small, entry(f"b-{number + 1}", 2)]
        parts = dataset(FOLDER, "a", main, 1, sorted(left_out)), dataset(FOLDER, "b", small, repeat)
        opened.append(Data(parts))
    run = Simulated(opened, [*order, "train.epochs=9", "train.num_steps=null"])
    for number, start in enumerate(chain):
        run.run(Start(**{**start.__dict__, "data": min(number * len(versions) // len(chain), len(versions) - 1)}))
    state = run.run(Start(**{**last.__dict__, "data": len(versions) - 1}), to_the_end=True)

    require_whole_epochs(run, state)
    segments = state.segments
    assert [s.first_n for s in segments] == sorted({s.first_n for s in segments})
    assert all((s.base_n, s.base_epoch) == (s.first_n, s.first_epoch) for s in segments if s.base_n == s.first_n)
    assert TrainState.from_json(json.loads(json.dumps(state.to_json()))) == state


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("size", [100, 1003])
def test_every_rank_takes_the_same_number_of_steps_at_an_epochs_uneven_end(ranks: int, size: int) -> None:
    data = Data((dataset(FOLDER, "", [entry("train-000000", size)]),))
    batch = 24 if 24 % ranks == 0 else 8 * ranks
    settings = ["train.epochs=1", "train.num_steps=null", f"train.global_batch={batch}"]
    config = load_settings(Config, None, settings)
    segments = next_segments(config, TrainState(), data)
    steps, end = run_length(config, segments, data.order(segments))
    stream = Stream(data.order(segments), batch, end)
    assert (steps, end) == (-(-size // batch), size)
    for micro_batch in divisors(batch // ranks):
        for rank in range(ranks):
            taken = [stream.micro_batches(n, rank, ranks, micro_batch) for n in range(0, end, batch)]
            assert {(len(micros), len(micro)) for micros in taken for micro in micros} == {
                (batch // ranks // micro_batch, micro_batch)
            }


def test_position_file_is_one_for_all_ranks_and_small() -> None:
    data = Data((dataset(FOLDER, "", [entry(f"train-{i:06d}", 10_000) for i in range(1000)]),))
    run = Simulated([data], ["train.epochs=1", "train.num_steps=null"])
    run.run(Start(4, 2, 1, stopped=True))
    assert len(run.saved) < 1000
