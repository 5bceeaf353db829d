"""Memory that is foretold without weights, against what real training steps hold."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small import config_of, data_of, never
from torch import nn
from xcomposers import build_xcomposer

from xctrain import basemodel
from xctrain.config import Config
from xctrain.largest import find_largest, rows_of
from xctrain.loop import train_step
from xctrain.memory import ACTIVATIONS, WEIGHTS, Tally, counting, foretell, held_by, is_out_of_memory
from xctrain.plan import make_plan
from xctrain.ranks import join
from xctrain.run import Consumed
from xctrain.start import make_plan as make_start_plan
from xctrain.start import open_model, start


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("xcomposer") / "base"
    return build_xcomposer(folder, num_hidden_layers=4, hidden_size=128, intermediate_size=256)


def config_with(base: Path, shards: Path, run: Path, **changes: Any) -> Config:
    values = {
        "model__family": "xcomposer",
        "model__path": base,
        "adapter__compute": "float32",
        "train__global_batch": 4,
        "train__micro_batch": 4,
        "train__log_keys": False,
        **changes,
    }
    return config_of(shards, run, **values)


def measured(config: Config) -> Tally:
    """What the second of two real steps on the largest samples holds; the first makes the optimizer's state."""
    ranks = join(config)
    plan = make_start_plan(config, 1)
    family, model_id = open_model(config, ranks, plan)
    run = start(config, ranks, plan, family, model_id, stop_asked=never, show=lambda *_: None)
    largest = find_largest(plan.data, family.row_lengths(), config)
    batch = family.collator(rows_of(largest, plan.reader, config))
    micro_batches = [batch] * (config.train.global_batch // config.train.micro_batch)
    consumed = Consumed(num_targets=batch.num_targets * len(micro_batches), digest=0, samples=0, masked=())
    tally = Tally()
    with counting(tally, run.engine.module, batch):
        for _ in range(2):
            tally.begin()
            train_step(run, plan.state, micro_batches, consumed)
    assert run.log is not None
    run.log.close()
    return tally


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["none", "lora", "qlora"])
def test_foretold_memory_is_that_of_a_real_step(
    drawn_shards: Path, tmp_path: Path, base: Path, kind: str, checkpointing: bool
) -> None:
    changes = {"adapter__kind": kind, "model__gradient_checkpointing": checkpointing}
    config = config_with(base, drawn_shards, tmp_path, **changes)

    foretold = make_plan(config, 0).total_gb * 1e9

    assert foretold == pytest.approx(sum(measured(config).peak.values()), rel=0.05)


def test_foretold_memory_knows_gradients_that_stay(drawn_shards: Path, tmp_path: Path, base: Path) -> None:
    config = config_with(base, drawn_shards, tmp_path, train__micro_batch=2)

    foretold = make_plan(config, 0).total_gb * 1e9

    assert foretold == pytest.approx(sum(measured(config).peak.values()), rel=0.05)


def test_kinds_of_memory_follow_the_mode(drawn_shards: Path, tmp_path: Path, base: Path) -> None:
    most = {
        kind: make_plan(config_with(base, drawn_shards, tmp_path, adapter__kind=kind), 0).most_gb
        for kind in ("none", "lora", "qlora")
    }

    assert most["none"]["adapter"] == 0 < most["lora"]["adapter"] == most["qlora"]["adapter"]
    assert most["none"]["optimizer"] == pytest.approx(2 * most["none"]["weights"], rel=0.01)
    assert most["lora"]["optimizer"] == pytest.approx(2 * most["lora"]["adapter"], rel=0.01)
    assert most["lora"]["gradients"] == most["lora"]["adapter"]
    assert most["qlora"]["weights"] < 0.5 * most["lora"]["weights"]
    assert all(values["logits"] > 0 for values in most.values())


def test_planning_reads_no_weights(drawn_shards: Path, tmp_path: Path, base: Path) -> None:
    for path in base.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())

    assert make_plan(config_with(tmp_path, drawn_shards, tmp_path / "run"), 0).total_gb > 0


def test_a_family_of_transformers_is_foretold(drawn_shards: Path, tmp_path: Path, kind: str, base_folders: Any) -> None:
    changes = {"model__family": "hf", "adapter__kind": "qlora", "model__gradient_checkpointing": True}
    config = config_with(base_folders(kind), drawn_shards, tmp_path, **changes)

    foretold = make_plan(config, 0).total_gb * 1e9

    assert foretold == pytest.approx(sum(measured(config).peak.values()), rel=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["none", "lora", "qlora"])
def test_foretold_memory_is_the_allocators(drawn_shards: Path, tmp_path: Path, base: Path, kind: str) -> None:
    folder = build_xcomposer(tmp_path / "base", num_hidden_layers=4, hidden_size=1024, intermediate_size=4096)
    config = config_with(folder, drawn_shards, tmp_path / "run", adapter__kind=kind)
    foretold = make_plan(config, 1).total_gb * 1e9

    torch.cuda.reset_peak_memory_stats()
    measured(config)

    assert foretold == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.15)


class TestTally:
    @pytest.fixture
    def tally(self) -> Iterator[Tally]:
        tally = Tally()
        with tally:
            yield tally

    def test_memory_counts_until_it_is_freed(self, tally: Tally) -> None:
        first = torch.zeros(1000)
        second = torch.ones(500, dtype=torch.float64)
        assert tally.live[ACTIVATIONS] == 8000

        del first
        assert tally.live[ACTIVATIONS] == 4000
        assert tally.peak == {ACTIVATIONS: 8000}
        assert len(second) == 500

    def test_a_view_and_an_update_in_place_take_nothing(self, tally: Tally) -> None:
        whole = torch.zeros(10, 100)
        part = whole[2:].t()
        part.add_(1)

        del whole
        assert tally.live[ACTIVATIONS] == 4000

    def test_what_autograd_keeps_counts(self, tally: Tally) -> None:
        x = torch.zeros(1000, requires_grad=True)
        y = x.exp().sum()
        assert tally.live[ACTIVATIONS] == 4000 + 4000 + 4

        y.backward()
        del y
        assert tally.live[ACTIVATIONS] == 4000 + 4000

    def test_what_was_there_before_counts_by_its_kind(self) -> None:
        layer, tally = nn.Linear(10, 10), Tally()
        for tensor, kind in held_by(layer):
            tally.add(tensor, kind)
        assert tally.live[WEIGHTS] == 440


def test_no_memory_left_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as found:
        torch.empty(2**50)

    assert is_out_of_memory(found.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not is_out_of_memory(RuntimeError("shapes differ"))


def test_parameters_without_gradient_take_no_state(drawn_shards: Path, tmp_path: Path, base: Path) -> None:
    config = config_with(base, drawn_shards, tmp_path)
    family = basemodel.open_family(config, empty=True)
    family.module.register_parameter("unused", nn.Parameter(torch.empty(1_000_000, device="meta")))
    data = data_of(drawn_shards)
    batch = family.collator(rows_of(find_largest(data, family.row_lengths(), config), data.reader, config))

    tally = foretell(family.module, batch, config.optim, precision="fp32", keeps_gradients=False)

    assert tally.peak["optimizer"] == pytest.approx(2 * (tally.peak["weights"] - 4_000_000), rel=0.01)
