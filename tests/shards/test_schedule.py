"""What nodes fetch of a dataset of COCO's size, and how well their batches are mixed; nothing is read."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shards import cli
from shards.__main__ import main
from shards.manifest import Manifest
from shards.mix import Mix, Part
from shards.order import OrderSettings
from shards.plan import Machines, make_plan
from shards.schedule import Fragments, Node, Schedule, least_cache_bytes, needs
from shards.stream import Stream

COCO = [500] * 236 + [287]  # 118,287 samples
BATCH = 128


def drawn_offsets(sizes: Sequence[int], seed: int = 0) -> list["np.ndarray"]:
    """Offsets of samples as large as COCO's, 163 kB in the mean."""
    generator = np.random.default_rng(seed)
    return [np.cumsum([0, *generator.lognormal(np.log(150e3), 0.4, size).astype(np.int64)]) for size in sizes]


def stream_of(sizes: Sequence[int], batch: int, epochs: int = 1, **order: int) -> Stream:
    return Stream(Mix([Part(tuple(sizes))], OrderSettings(**{"seed": 1, **order})), batch, epochs * sum(sizes))


@pytest.fixture(scope="module")
def coco() -> Fragments:
    return Fragments.cut(drawn_offsets(COCO), 16)


@pytest.mark.parametrize("nodes", [1, 2, 4, 8])
def test_nodes_together_fetch_the_dataset_once_an_epoch_and_hold_less_than_the_least_budget(
    coco: Fragments, nodes: int
) -> None:
    stream = stream_of(COCO, BATCH, epochs=2)
    found = [needs(Schedule(stream, Node.of(i, nodes, 8), coco), 0, 2 * sum(COCO)) for i in range(nodes)]
    fetched, whole = sum(n.num_bytes for n in found), 2 * int(coco.num_bytes.sum())
    assert whole <= fetched <= 1.02 * whole
    assert max(n.most_live_bytes for n in found) <= least_cache_bytes(stream, nodes, coco)
    assert least_cache_bytes(stream, nodes, coco) < 1.4 * max(n.most_live_bytes for n in found)


@pytest.mark.parametrize("batch", [64, 128, 512])
@pytest.mark.parametrize("seed", [0, 3])
def test_batches_of_coco_s_size_are_mixed_like_a_permutation_from_the_first_on(batch: int, seed: int) -> None:
    mixing = make_plan(COCO, OrderSettings(seed), batch, 1, 8, 4).facts["mixing"]
    assert mixing["ratio"] > 0.9
    assert mixing["in the first 20 batches"] > 0.85 * mixing["of a random permutation"]


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(sum),
    fragment=st.integers(1, 9),
    window=st.integers(1, 80),
    lanes=st.sampled_from([1, 2, 4]),
    nodes=st.sampled_from([1, 2, 4]),
    rows=st.integers(1, 3),
    left_out=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_no_order_needs_more_at_once_than_the_least_budget(
    sizes: list[int], fragment: int, window: int, lanes: int, nodes: int, rows: int, left_out: bool
) -> None:
    nodes = min(nodes, lanes)
    order = OrderSettings(5, fragment, window, lanes)
    part = Part(tuple(sizes), left_out=(0,) if left_out and sum(sizes) > 1 else ())
    mix = Mix([part], order)
    stream = Stream(mix, lanes * rows, 3 * mix.num_positions)
    fragments = Fragments.cut(drawn_offsets(sizes), fragment)
    for number in range(nodes):
        found = needs(Schedule(stream, Node.of(number, nodes, nodes), fragments), 0, 3 * mix.num_positions)
        least = least_cache_bytes(stream, nodes, fragments)
        # One that is enough for everything keeps all, and then a fragment does not count once an epoch.
        assert found.most_live_bytes <= least or least == fragments.num_bytes.sum()


def test_plan_says_what_each_node_fetches_and_holds(coco: Fragments) -> None:
    machines = Machines(coco, 31_000_000, nodes=4, cache_gb=20.0)
    plan = make_plan(COCO, OrderSettings(0), BATCH, 4, 32, 4, machines)
    assert not plan.refusals
    node = plan.facts["each node"]
    assert plan.facts["loader workers per node"] == 32
    assert 1 <= plan.facts["fetched by all nodes over the split's size"] < 1.02
    assert node["fetches an epoch"] == pytest.approx(len(coco.starts) / 4, rel=0.02)
    assert node["GB an epoch"] == pytest.approx(coco.num_bytes.sum() / 4e9, rel=0.02)
    assert node["most GB needed at once"] < node["least data.cache_gb"] < 20
    assert node["keeps all, so that later epochs fetch only what is new to it"]


@pytest.mark.parametrize(("options", "words"), [
    (["--cache-gb", "0.000001"], "refused: data.cache_gb (1e-06) is below what a node needs, 0.00"),
    (["--nodes", "3", "--gpus", "3", "--global-batch", "24"], "order.lanes may be 3, 6, 12, 24"),
    (["--nodes", "2", "--gpus", "3"], "3 processes on 2 nodes"),
    (["--cache-gb", "1", "--lanes", "5"], "order.lanes may be 1, 2, 4, 8, 16, 32, 64"),
])  # fmt: skip
def test_plan_says_what_would_be_refused(
    dataset: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    code = cli.run(main, ["plan", str(dataset), *options])
    assert words in capsys.readouterr().out
    assert code == 2


def test_plan_of_a_budget_gives_numbers_for_a_program(
    make_dataset: Callable[[Path, Sequence[int]], Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_dataset(tmp_path, [64, 64, 30])
    options = ["--global-batch", "8", "--lanes", "4", "--gpus", "2", "--nodes", "2", "--cache-gb", "1", "--json"]
    assert cli.run(main, ["plan", str(tmp_path), *options]) == 0
    facts = json.loads(capsys.readouterr().out)["train"]
    assert facts["nodes"] == 2
    assert facts["each node"]["fetches an epoch"] >= 3
