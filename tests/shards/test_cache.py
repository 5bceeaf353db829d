"""Remote shards in a node's cache: what is fetched, kept, dropped and refused. The server is real, the ranks are played."""

import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import webserver

from shards import remote
from shards.cache import NodeCache
from shards.errors import ConfigError, DamagedSampleError
from shards.fetch import Fetcher, Job, fragments_of, list_bytes, plan_fetching
from shards.joined import join
from shards.mix import Mix, Part
from shards.order import Order, OrderSettings
from shards.reader import SplitReader
from shards.remote import RemoteError
from shards.schedule import Fragments, Node, Schedule, least_cache_bytes, needs, require_lanes
from shards.stream import Stream

# Not ours: aiohttp leaves sessions to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

SIZES = [100, 80, 60, 100, 60]
SETTINGS = OrderSettings(seed=3, fragment=4, window=32, lanes=4)
BATCH = 8


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.01)


@pytest.fixture(scope="module")
def local(make_dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("local") / "shards"
    make_dataset(folder, SIZES)
    return folder


@pytest.fixture
def web(local):
    with webserver.running() as server:
        for path in local.iterdir():
            server.files[f"/shards/{path.name}"] = webserver.Resource(path.read_bytes())
        yield server


def tars(server):
    return {name: resource for name, resource in server.files.items() if name.endswith(".tar")}


def ranges(server) -> Counter[tuple[str, str]]:
    return Counter((name, r["Range"]) for name, resource in tars(server).items() for r in resource.requests)


def mix_of(reader, settings=SETTINGS) -> Mix:
    return Mix([Part(reader.shard_sizes)], settings)


class Play:
    """A node's ranks, read one after the other in this process."""

    def __init__(self, address: str, root: Path, *, ranks=range(1), world_size=1, nodes=1, gb=1.0, start=0, end=800,
                 timeout_s=20.0, requests=4):  # fmt: skip
        cache = NodeCache(address, root)
        self.node = cache.node
        self.reader = SplitReader(cache, "train")
        cache.fetch_lists("train")
        self.stream = Stream(mix_of(self.reader), BATCH, end)
        self.ranks, self.world_size, self.n = ranks, world_size, start
        max_bytes = round(gb * 1e9)
        cache.planned = plan_fetching([self.reader], self.stream, SETTINGS.fragment, nodes, max_bytes, timeout_s)
        lock = self.node.take()
        self.node.begin([start] * len(ranks))
        job = Job((self.reader,), self.stream, Node(ranks, world_size), self.node, SETTINGS.fragment, start,
                  max_bytes - list_bytes([self.reader]), requests, timeout_s)  # fmt: skip
        self.fetcher = Fetcher(job, lock)

    def step(self) -> list[str]:
        keys = []
        for local_rank, rank in enumerate(self.ranks):
            for slots in self.stream.micro_batches(self.n, rank, self.world_size, 1):
                keys += [self.reader.read(s.index, s.epoch).key for s in slots if not s.surplus]
            self.node.report(1 + local_rank, self.n + BATCH)
        self.n += BATCH
        return keys

    def until(self, n: int) -> list[str]:
        return [key for _ in range(self.n, n, BATCH) for key in self.step()]

    def close(self):
        self.fetcher.close()


@contextmanager
def playing(*arguments, **options) -> Iterator[Play]:
    play = Play(*arguments, **options)
    try:
        yield play
    finally:
        play.close()


def expected_keys(local, n, stop, settings=SETTINGS):
    reader = SplitReader(local, "train")
    stream = Stream(mix_of(reader, settings), BATCH)
    return [reader.key(s.index) for at in range(n, stop, BATCH) for s in stream.step(at)]


def fragments_here(local) -> Fragments:
    reader = SplitReader(local, "train")
    return Fragments.cut([reader.shard(i).offsets for i in range(len(SIZES))], SETTINGS.fragment)


def stream_here(local, end=None) -> Stream:
    return Stream(mix_of(SplitReader(local, "train")), BATCH, end)


def least_gb(local, nodes=1):
    lists = sum(p.stat().st_size for p in local.iterdir() if p.suffix in (".idx", ".jsonl"))
    return (lists + least_cache_bytes(stream_here(local), nodes, fragments_here(local))) / 1e9


@contextmanager
def watched(folder: Path):
    """The most bytes that the files of a folder ever had, looked at often."""
    most, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.001):
            total = 0
            for entry in os.scandir(folder):
                with suppress(FileNotFoundError):
                    total += entry.stat().st_size
            most[0] = max(most[0], total)

    folder.mkdir(parents=True, exist_ok=True)
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


def test_a_split_that_fits_is_fetched_once_and_kept_over_the_epochs(web, local, tmp_path):
    with playing(f"{web.url}/shards", tmp_path) as play:
        assert play.until(800) == expected_keys(local, 0, 800)
    sizes = fragments_here(local).num_bytes
    once = ranges(web)
    assert sum(r.sent for r in tars(web).values()) == sizes.sum()
    assert set(once.values()) == {1}
    assert len(once) == len(sizes)


def test_with_the_least_budget_each_fragment_comes_once_an_epoch_and_the_cache_stays_below_it(web, local, tmp_path):
    sizes = fragments_here(local).num_bytes
    assert least_gb(local) * 1e9 < sizes.sum() / 2
    with watched(tmp_path / "fragments") as most, playing(f"{web.url}/shards", tmp_path, gb=least_gb(local)) as play:
        assert play.until(800) == expected_keys(local, 0, 800)
    plan = needs(Schedule(stream_here(local, 800), Node(range(1), 1), fragments_here(local)), 0, 800)
    assert plan.num_bytes == 2 * sizes.sum()
    assert sum(r.sent for r in tars(web).values()) == plan.num_bytes
    assert set(ranges(web).values()) == {2}
    assert plan.most_live_bytes <= most[0] <= least_gb(local) * 1e9


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_nodes_fetch_their_own_lanes_only(web, local, tmp_path, nodes):
    sizes = fragments_here(local).num_bytes
    found = []
    for number in range(nodes):
        ranks = Node.of(number, nodes, 4).ranks
        options = {"ranks": ranks, "world_size": 4, "nodes": nodes, "gb": 1.1 * least_gb(local, nodes), "end": 400}
        with playing(f"{web.url}/shards", tmp_path / str(number), **options) as play:
            found += play.until(400)
    assert sorted(found) == sorted(expected_keys(local, 0, 400))
    most = sizes.sum() + (SETTINGS.lanes - 1) * sizes.max()
    assert sizes.sum() <= sum(r.sent for r in tars(web).values()) <= most


def test_a_budget_that_is_too_small_is_refused_with_one_that_does(web, local, tmp_path):
    with pytest.raises(ConfigError) as error, playing(f"{web.url}/shards", tmp_path, gb=1e-5):
        pass
    text = str(error.value)
    assert text.startswith("data.cache_gb is 1e-05, this order needs 0.00")
    needed = float(text.partition("data.cache_gb=")[2].split()[0])
    assert needed >= least_gb(local)
    with playing(f"{web.url}/shards", tmp_path, gb=needed) as play:
        play.until(80)


def test_lanes_that_do_not_fit_are_refused_with_those_that_do():
    with pytest.raises(ConfigError, match=r"order.lanes may be 1, 2, 4, 8, or train.global_batch a multiple of 3"):
        require_lanes(3, 8, nodes=1, world_size=1)
    with pytest.raises(ConfigError, match=r"nodes 8: .*order.lanes may be 8"):
        require_lanes(4, 8, nodes=8, world_size=8)
    with pytest.raises(ConfigError, match=r"nodes 3: .*no order.lanes does; nodes may be 1, 2, 4, 8"):
        require_lanes(4, 8, nodes=3, world_size=3)
    require_lanes(4, 8, nodes=2, world_size=4)


def test_what_an_earlier_run_left_is_used_if_whole_and_thrown_away_if_not(web, local, tmp_path):
    with playing(f"{web.url}/shards", tmp_path) as play:
        play.until(400)
    files = sorted((tmp_path / "fragments").iterdir())
    files[0].write_bytes(files[0].read_bytes()[:-1])
    damaged = bytearray(files[1].read_bytes())
    damaged[600] ^= 1
    files[1].write_bytes(damaged)
    (tmp_path / "fragments" / ".train-000000.0+4.all.tmp").write_bytes(b"half")
    (tmp_path / "fragments" / "stranger").write_bytes(b"?")
    before = sum(r.sent for r in tars(web).values())
    with playing(f"{web.url}/shards", tmp_path) as play:
        assert play.until(400) == expected_keys(local, 0, 400)
    again = sum(r.sent for r in tars(web).values()) - before
    assert again == files[0].stat().st_size + files[1].stat().st_size
    assert not list((tmp_path / "fragments").glob("*.tmp"))
    assert not (tmp_path / "fragments" / "stranger").exists()


def test_leftovers_count_in_the_budget_and_go_first(web, local, tmp_path):
    with playing(f"{web.url}/shards", tmp_path) as play:
        play.until(400)
    least = least_gb(local)
    with watched(tmp_path / "fragments") as most:
        play = Play(f"{web.url}/shards", tmp_path, gb=least)
        try:
            play.until(80)
            most[0] = 0
            assert play.until(400) == expected_keys(local, 80, 400)
        finally:
            play.close()
    assert most[0] <= least * 1e9


def test_passing_errors_are_tried_again(web, local, tmp_path):
    for number, resource in enumerate(tars(web).values()):
        resource.tricks = webserver.passing_faults(number)
    with playing(f"{web.url}/shards", tmp_path) as play:
        assert play.until(400) == expected_keys(local, 0, 400)


@pytest.mark.parametrize(("trick", "words"), [
    ("status:403", "access is denied (403"),
    ("ignore-range", "the server sends whole files where ranges are asked for"),
])  # fmt: skip
def test_what_lasts_ends_the_reading_at_once_with_shard_and_sample(web, tmp_path, trick, words):
    for resource in tars(web).values():
        resource.tricks = [trick] * 99
    with playing(f"{web.url}/shards", tmp_path) as play:
        began = time.monotonic()
        with pytest.raises(RemoteError) as error:
            play.until(80)
    text = str(error.value)
    assert time.monotonic() - began < 30
    assert words in text
    assert text.startswith("train-0000")
    assert ": sample " in text
    assert f"{web.url}/shards/train-0000" in text
    with pytest.raises(RemoteError) as error:
        play.reader.cache.try_range(play.reader.shards)
    assert words in str(error.value)


def test_a_missing_shard_is_named(web, tmp_path):
    del web.files["/shards/train-000002.tar"]
    with playing(f"{web.url}/shards", tmp_path) as play, pytest.raises(RemoteError) as error:
        play.until(400)
    assert f"{web.url}/shards/train-000002.tar: is missing, the manifest lists it; run the build again" in str(
        error.value
    )


def test_a_read_that_stalls_ends_with_an_error_that_names_shard_and_sample(web, tmp_path):
    web.files["/shards/train-000001.tar"].tricks = ["stall:10"] * 99
    with playing(f"{web.url}/shards", tmp_path, timeout_s=1.5) as play:
        began = time.monotonic()
        with pytest.raises(
            RemoteError, match=r"^train-000001.tar: sample \d+ \(0000\d+\): .*train-000001.tar: samples \d+ to"
        ):
            play.until(400)
    assert time.monotonic() - began < 30


def test_a_fetcher_that_was_killed_is_noticed(web, local, tmp_path):
    with playing(f"{web.url}/shards", tmp_path, gb=least_gb(local)) as play:
        play.step()
        play.reader.cache.planned = replace(play.reader.cache.planned, timeout_s=0.5)
        play.fetcher._process.kill()
        with pytest.raises(RemoteError, match="the process that fetches them says nothing"):
            play.until(800)


def test_damage_at_the_address_is_the_reader_s_to_report(web, local, tmp_path):
    reader = SplitReader(local, "train")
    tar = bytearray((local / "train-000001.tar").read_bytes())
    tar[int(reader.shard(1).offsets[5]) + 700] ^= 1
    web.files["/shards/train-000001.tar"].data = bytes(tar)
    with playing(f"{web.url}/shards", tmp_path) as play:
        found = []
        for n in range(0, 400, BATCH):
            for slot in play.stream.step(n):
                with suppress(DamagedSampleError):
                    found.append(play.reader.read(slot.index, slot.epoch).key)
            play.node.report(1, n + BATCH)
        assert sorted(found) == sorted(set(expected_keys(local, 0, 400)) - {f"{105:012d}"})
        with pytest.raises(DamagedSampleError, match=r"^train-000001.tar: sample 5 \(000000000105\): "):
            play.reader.read(105, 0)


def test_two_runs_do_not_share_a_cache(web, tmp_path, monkeypatch):
    monkeypatch.setattr("shards.cache._LOCK_S", 0.2)
    with (
        playing(f"{web.url}/shards", tmp_path),
        pytest.raises(
            ConfigError, match=f"process {os.getpid()} fetches shards into it.*choose another data.cache_dir"
        ),
    ):
        Play(f"{web.url}/shards", tmp_path)
    with playing(f"{web.url}/shards", tmp_path) as play:
        play.step()


def test_lists_are_compared_with_the_manifest_and_fetched_again_when_damaged_here(web, tmp_path):
    cache = NodeCache(f"{web.url}/shards", tmp_path)
    num_bytes = cache.fetch_lists("train")
    assert num_bytes == list_bytes([SplitReader(cache, "train")])
    (cache.folder / "train-000000.tar.idx").write_bytes(b"x")
    assert cache.fetch_lists("train") == num_bytes
    counts = {name: len(r.requests) for name, r in web.files.items() if not name.endswith(".tar")}
    assert counts.pop("/shards/train-000000.tar.idx") == 2
    assert set(counts.values()) == {1}
    shutil.rmtree(cache.folder)
    web.files["/shards/train-000003.meta.jsonl"].data += b"\n"
    with pytest.raises(Exception, match=r"train-000003.meta.jsonl: sha256 is .*, the manifest says"):
        cache.fetch_lists("train")


def test_reads_beside_the_plan_take_single_samples_and_more_where_neighbours_are_read(web, local, tmp_path):
    cache = NodeCache(f"{web.url}/shards", tmp_path)
    cache.fetch_lists("train")
    reader, here = SplitReader(cache, "train"), SplitReader(local, "train")
    for i in (50, 7, 90, 3):
        assert reader.read(i) == here.read(i)
        assert reader.read_json(i) == here.read_json(i)
    assert sum(ranges(web).values()) == 8
    assert sum(r.sent for r in tars(web).values()) < sum(here.meta(i).parts[0].num_bytes + 4096 for i in (50, 7, 90, 3))
    assert [reader.read(i) for i in range(100, 165)] == [here.read(i) for i in range(100, 165)]
    assert sum(ranges(web).values()) == 8 + 3
    assert not (tmp_path / "fragments").exists()


def test_a_mix_with_samples_left_out_stays_below_the_least_budget_and_fetches_each_fragment_once_an_epoch(
    web, local, make_dataset, tmp_path
):
    make_dataset(tmp_path / "other", [40, 50])
    for path in (tmp_path / "other").iterdir():
        web.files[f"/other/{path.name}"] = webserver.Resource(path.read_bytes())
    caches = [NodeCache(f"{web.url}/{name}", tmp_path / "cache") for name in ("shards", "other")]
    for cache in caches:
        cache.fetch_lists("train")
    readers = tuple(SplitReader(cache, "train") for cache in caches)
    left_out = (5, 6, 99)
    mix = Mix(
        [Part(readers[0].shard_sizes, left_out=left_out), Part(readers[1].shard_sizes, repeat=2, first_index=400)],
        SETTINGS,
    )
    end = 2 * mix.num_positions
    stream = Stream(mix, BATCH, end)
    fragments = fragments_of(readers, SETTINGS.fragment)
    lists = list_bytes(readers)
    least = lists + least_cache_bytes(stream, 1, fragments)
    assert least - lists < fragments.num_bytes.sum()
    planned = plan_fetching(readers, stream, SETTINGS.fragment, 1, least, 20)
    for cache in caches:
        cache.planned = planned
    here = join([SplitReader(local, "train"), SplitReader(tmp_path / "other", "train")])
    node, reader = caches[0].node, join(readers)
    with watched(node.fragments) as most:
        lock = node.take()
        node.begin([0])
        fetcher = Fetcher(
            Job(readers, stream, Node(range(1), 1), node, SETTINGS.fragment, 0, least - lists, 4, 20), lock
        )
        try:
            for n in range(0, end, BATCH):
                for slot in stream.step(n):
                    if not slot.surplus:
                        assert reader.read(slot.index, slot.epoch) == here.read(slot.index)
                node.report(1, n + BATCH)
        finally:
            fetcher.close()
    plan = needs(Schedule(stream, Node(range(1), 1), fragments), 0, end)
    assert sum(r.sent for r in tars(web).values()) == plan.num_bytes
    assert plan.most_live_bytes <= most[0] <= least - lists


def test_cut_fragments_are_those_that_two_lanes_share():
    order = Order(SIZES, SETTINGS)
    for epoch in range(3):
        lanes = np.arange(400)
        served = order.indices(epoch * 400 + np.arange(400))
        by_fragment: dict[int, set[int]] = {}
        for lane, fragment in zip(
            (lanes % 4).tolist(),
            (np.searchsorted(order.fragment_starts, served, side="right") - 1).tolist(),
            strict=True,
        ):
            by_fragment.setdefault(fragment, set()).add(lane)
        assert order.cut_fragments(epoch).tolist() == sorted(f for f, found in by_fragment.items() if len(found) > 1)
