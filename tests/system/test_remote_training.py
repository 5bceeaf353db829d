"""Real training processes on shards behind a web server and in an S3 store, both on this machine."""

import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import objectstore
import pytest
import runs
import webserver

from shards.reader import SplitReader
from shards.remote import Remote


@pytest.fixture(scope="module")
def straight(drawn_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks on the shards as a folder of this machine."""
    run = tmp_path_factory.mktemp("straight") / "run"
    runs.train(drawn_shards, run, 2)
    return run


@pytest.fixture
def web(drawn_shards: Path) -> Iterator[webserver.WebServer]:
    with webserver.running() as server:
        for path in drawn_shards.iterdir():
            server.files[f"/shards/{path.name}"] = webserver.Resource(path.read_bytes())
        yield server


def fetches(server: webserver.WebServer, shards: Path) -> Counter[tuple[str, str]]:
    """Requests for whole fragments, by file and range; others are for single samples beside the plan."""
    reader = SplitReader(shards, "train")
    wanted = set()
    for number, entry in enumerate(reader.shards):
        offsets = reader.shard(number).offsets.tolist()
        cuts = [*offsets[:-1:8], offsets[-1]]
        wanted |= {(f"/shards/{entry.name}", f"bytes={a}-{b - 1}") for a, b in pairwise(cuts)}
    asked = ((name, r["Range"]) for name, file in server.files.items() for r in file.requests if "Range" in r)
    return Counter(found for found in asked if found in wanted)


def same(run: Path, straight: Path) -> None:
    assert runs.trajectory(run) == runs.trajectory(straight)
    assert runs.keys_by_step(run) == runs.keys_by_step(straight)
    assert runs.weights(run) == runs.weights(straight)


def settings(address: str, run: Path, cache: Path, **changes: Any) -> list[str]:
    return runs.settings(address, run, data__cache_dir=cache, data__read_timeout_s=60, **changes)


def run_through(arguments: list[str], processes: int = 2, code: int = 0) -> str:
    return runs.finish(runs.launcher(arguments, processes), code)


def test_training_from_a_web_server_that_fails_is_bit_identical(
    web: webserver.WebServer, drawn_shards: Path, straight: Path, tmp_path: Path
) -> None:
    for number, (name, resource) in enumerate(sorted(web.files.items())):
        if name.endswith(".tar"):
            resource.tricks = webserver.passing_faults(number)
        elif "train" in name:
            resource.tricks = ["status:503", "drop:10"]
    run_through(settings(f"{web.url}/shards", tmp_path / "run", tmp_path / "cache"))
    same(tmp_path / "run", straight)


def test_two_ranks_with_four_workers_each_fetch_each_fragment_once(
    web: webserver.WebServer, drawn_shards: Path, straight: Path, tmp_path: Path
) -> None:
    run_through(settings(f"{web.url}/shards", tmp_path / "run", tmp_path / "cache", data__workers=4))
    same(tmp_path / "run", straight)
    assert set(fetches(web, drawn_shards).values()) == {1}
    assert len(fetches(web, drawn_shards)) == 13  # the split fits, so all were kept over the epochs


def test_cache_that_is_emptied_and_filled_again_all_the_time_changes_nothing(
    web: webserver.WebServer, drawn_shards: Path, tmp_path: Path
) -> None:
    order = {"order__fragment": 2, "order__window": 8}
    runs.train(drawn_shards, tmp_path / "here", 2, **order)
    arguments = settings(f"{web.url}/shards", tmp_path / "run", tmp_path / "cache", data__workers=4, **order)
    refused = run_through([*arguments, "data.cache_gb=0.00001"], code=2)
    least = refused.partition("data.cache_gb=")[2].split()[0]
    run_through([*arguments, f"data.cache_gb={least}"])
    same(tmp_path / "run", tmp_path / "here")
    assert web.files["/shards/train-000000.tar"].sent > 2.5 * len(web.files["/shards/train-000000.tar"].data)  # epochs


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_every_rank_killed_many_times_in_a_row_starts_clean_each_time(
    web: webserver.WebServer, drawn_shards: Path, straight: Path, tmp_path: Path, kills: int
) -> None:
    arguments = settings(f"{web.url}/shards", tmp_path / "run", tmp_path / "cache")
    for kill in range(kills):
        process = runs.launcher(arguments, 2)
        runs.kill_at(process, tmp_path / "run", 3 * kill + 1, delay_s=0.003 * kill)
    run_through(arguments)
    same(tmp_path / "run", straight)
    left = [
        p.name for p in (tmp_path / "cache" / "fragments").iterdir() if p.name.startswith(".") or p.suffix == ".tmp"
    ]
    assert not left
    assert max(fetches(web, drawn_shards).values()) <= 2  # one was under way at a kill


def test_missing_shard_ends_the_run_with_an_error_that_names_it(web: webserver.WebServer, tmp_path: Path) -> None:
    del web.files["/shards/train-000001.tar"]
    text = run_through(settings(f"{web.url}/shards", tmp_path / "run", tmp_path / "cache"), code=1)
    assert f"{web.url}/shards/train-000001.tar: is missing, the manifest lists it" in text
    assert "Traceback" not in text


def test_stalled_read_ends_the_run_with_an_error_that_names_shard_and_sample(
    web: webserver.WebServer, tmp_path: Path
) -> None:
    web.files["/shards/train-000001.tar"].tricks = ["", *["stall:100"] * 99]
    arguments = settings(f"{web.url}/shards", tmp_path / "run", tmp_path / "cache")
    text = run_through([*arguments, "data.read_timeout_s=3"], code=1)
    assert "train-000001.tar: sample" in text
    assert "Traceback" not in text


def test_budget_and_lanes_that_do_not_do_are_refused_before_the_model_loads(
    web: webserver.WebServer, tmp_path: Path
) -> None:
    arguments = settings(f"{web.url}/shards", tmp_path / "run", tmp_path / "cache")
    assert "data.cache_gb=0.00" in run_through([*arguments, "data.cache_gb=0.00001"], code=2)
    assert "order.lanes may be 1, 2, 3, 4, 6, 12" in run_through([*arguments, "order.lanes=8"], code=2)


@pytest.fixture(scope="module")
def store() -> Iterator[objectstore.ObjectStore]:
    with objectstore.running() as running, pytest.MonkeyPatch.context() as patch:
        for name, value in {**objectstore.ENVIRONMENT, "AWS_ENDPOINT_URL": running.url}.items():
            patch.setenv(name, value)
        yield running


# Not ours: botocore and s3fs leave sessions to the garbage collector.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_training_from_an_s3_store_that_goes_away_for_a_moment_is_bit_identical(
    store: objectstore.ObjectStore, drawn_shards: Path, straight: Path, tmp_path: Path
) -> None:
    target = Remote(f"s3://{objectstore.BUCKET}/shards")
    for path in drawn_shards.iterdir():
        target.put(path.name, path)
    process = runs.launcher(settings(f"s3://{objectstore.BUCKET}/shards", tmp_path / "run", tmp_path / "cache"), 2)
    while not (tmp_path / "cache" / "fragments").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    store.pause()
    time.sleep(1.0)
    store.resume()
    runs.finish(process)
    same(tmp_path / "run", straight)
    assert "testing-secret" not in "".join(p.read_text() for p in (tmp_path / "run").glob("*.*"))
