"""What `plan` says and refuses, and the dry step on the largest samples."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from conftest import drawn_sample
from small import config_of, data_of, train_here
from tiny import TinyFamily, TinyModel
from torch import Tensor
from xcomposers import build_xcomposer

from shards.manifest import Manifest
from shards.reader import SplitReader
from shards.settings import load_settings
from shards.writer import ShardWriter
from xctrain import basemodel
from xctrain.__main__ import main
from xctrain.collate import Batch, Row
from xctrain.config import Config
from xctrain.errors import ConfigError, TrainError
from xctrain.largest import CACHE, all_lengths, find_largest, largest
from xctrain.memory import NeedsNumbersError
from xctrain.plan import as_text, count_memory, histogram, make_plan
from xctrain.ranks import Ranks
from xctrain.start import Plan

SEVEN_B: dict[str, Any] = {
    "vocab_size": 92544,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "plora_r": 256,
    "plora_alpha": 256,
    "vision_config": {},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_xcomposer(tmp_path_factory.mktemp("xcomposer") / "base")


def settings(base: Path, shards: Path, run: Path, **changes: Any) -> list[str]:
    return runs.settings(shards, run, model__family="xcomposer", model__path=base, **changes)


class TestCommand:
    def test_answers_as_json(
        self, drawn_shards: Path, tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code = main(["plan", os.devnull, *settings(base, drawn_shards, tmp_path), "--gpus", "2", "--json"])

        plan = json.loads(capsys.readouterr().out)
        assert code == 0
        assert (plan["samples"], plan["shards"], plan["steps"], plan["epochs"]) == (100, 3, 40, 4.8)
        assert (plan["gpus"], plan["micro_batches"], plan["possible_gpus"]) == (2, 3, [1, 2, 3, 6])
        assert plan["mode"] == "full"
        assert sum(count for _, _, count in plan["histogram"]) == 100
        assert sum(plan["memory_gb"].values()) == pytest.approx(plan["total_gb"])
        assert plan["refused"] == []

    def test_says_it_in_words(
        self, drawn_shards: Path, tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        changes = {"adapter__kind": "lora", "train__num_steps": None, "train__epochs": 2}
        code = main(["plan", os.devnull, *settings(base, drawn_shards, tmp_path, **changes), "--gpus", "1"])

        text = capsys.readouterr().out
        assert code == 0
        for part in (
            "100 samples in 3 shards",
            "17 steps, 2 epochs",
            "6 micro-batches a step",
            "memory of lora",
            "####",
        ):
            assert part in text

    def test_refuses_what_the_run_would_refuse(
        self, drawn_shards: Path, tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        changes = {"model__max_length": 20, "eval__every": 5, "eval__split": "test"}
        code = main(["plan", os.devnull, *settings(base, drawn_shards, tmp_path, **changes), "--gpus", "5"])

        text = capsys.readouterr().out
        assert code == 2
        assert "refused: train.global_batch is 12, which is not processes (5) x train.micro_batch (2)" in text
        assert "1, 2, 3, 6 processes are possible" in text
        assert (
            "refused: " in text.partition("set eval.split to one of those, or eval.every=null")[0].rpartition("\n")[2]
        )
        assert "refused: model.max_length is 20: 100 of 100 samples would lose their target, 000000000000 needs" in text

    def test_builds_the_tiny_model(self, drawn_shards: Path, tmp_path: Path) -> None:
        plan = make_plan(config_of(drawn_shards, tmp_path), 0)

        assert plan.total_gb > 0
        assert (tmp_path / "base-model" / "config.json").is_file()


def test_tokens_are_those_of_the_rows(drawn_shards: Path, tmp_path: Path, base: Path) -> None:
    config = config_of(drawn_shards, tmp_path, model__family="xcomposer", model__path=base)
    data = data_of(drawn_shards)
    family = basemodel.open_family(config, empty=True)

    for length in list(all_lengths(data, family.row_lengths(), config))[::25]:
        sample = data.reader.read(length.index)
        rows = [Row(0, 0, sample.key, sample.open_image(), (caption,)) for caption in sample.captions]
        assert length.tokens == family.collator(rows).labels.shape[1]
    assert largest(all_lengths(data, family.row_lengths(), config), 4) == find_largest(
        data, family.row_lengths(), config
    )


def test_histogram_covers_every_sample_once() -> None:
    assert histogram([5]) == [(5, 5, 1)]
    assert histogram([1, 1, 2, 3]) == [(1, 1, 2), (2, 2, 1), (3, 3, 1)]
    bars = histogram(list(range(7, 1000)))
    assert len(bars) == 10
    assert sum(count for _, _, count in bars) == 993
    assert bars[0][0] == 7
    assert bars[-1][1] >= 999


@pytest.mark.parametrize(
    ("name", "weights_gb", "optimizer_gb", "gpu_gb"),
    [
        ("qlora", 7.00, 150_994_944 * 8 / 1e9, 24),
        ("lora", 17.36, 150_994_944 * 8 / 1e9, 80),
        ("full", 6.88, 8_375_259_136 / 1e9, 80),  # an eighth of 8 bytes for each of 8.4 G weights
    ],
)
def test_shipped_configs_are_planned_for_the_7b_model_and_fit_their_gpus(
    drawn_shards: Path, tmp_path: Path, name: str, weights_gb: float, optimizer_gb: float, gpu_gb: float
) -> None:
    folder = build_xcomposer(tmp_path / "base")
    (folder / "model.safetensors").unlink()
    published = {**json.loads((folder / "config.json").read_text()), **SEVEN_B}
    (folder / "config.json").write_text(json.dumps(published))
    config = load_settings(
        Config,
        runs.TESTS.parent / "configs" / f"xcomposer-{name}.yaml",
        [f"model.path={folder}", f"data.shards={drawn_shards}", f"run.dir={tmp_path / 'run'}"],
    )

    plan = make_plan(config, 8)

    assert plan.memory_gb["weights"] == pytest.approx(weights_gb, rel=0.01)
    assert plan.memory_gb["optimizer"] == pytest.approx(optimizer_gb, rel=0.001)
    assert plan.total_gb is not None
    assert weights_gb + optimizer_gb < plan.total_gb < gpu_gb - 2
    assert plan.refused == []


def test_checkpoint_that_would_not_load_is_refused_before_anything_is_loaded(
    drawn_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = build_xcomposer(tmp_path / "base")
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "intermediate_size": 128}))

    with pytest.raises(ConfigError, match=r"w1.Plora_B.weight is \(96, 4\), config.json makes it \(128, 4\)"):
        main(["plan", os.devnull, *settings(folder, drawn_shards, tmp_path)])


def test_where_a_slot_trains_on_all_captions_the_sample_with_most_in_all_is_the_largest(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ShardWriter(tmp_path, "train-000000", "train") as writer:
        for number, captions in enumerate([["a red disc"], ["a box " * 9], ["a disc", "a box", "a red box"]]):
            drawn = drawn_sample(number)
            writer.write(replace(drawn, meta={**drawn.meta, "captions": captions}))
    Manifest((writer.entry,)).save(tmp_path)
    for captions, longest, largest_key in (("random", 1, 1), ("all", 1, 2)):
        config = config_of(
            tmp_path, tmp_path / "run", model__family="xcomposer", model__path=base, data__captions=captions
        )
        plan = make_plan(config, 0)
        assert (int(plan.longest.key), int(plan.largest.key)) == (longest, largest_key)
        lengths = basemodel.open_family(config, empty=True).row_lengths()
        assert find_largest(data_of(tmp_path), lengths, config)[0] == plan.largest
    assert "largest sample: 000000000002, 3 captions a slot, rows of up to" in as_text(plan)


def test_shared_model_is_foretold_by_what_each_gpu_has_of_it(
    drawn_shards: Path, tmp_path: Path, base_folders: Callable[[str], Path]
) -> None:
    def plan_of(mode: str, **changes: Any) -> dict[str, float]:
        settings = {"model__family": "hf", "model__path": base_folders("llava"), "parallel__mode": mode, **changes}
        plan = make_plan(config_of(drawn_shards, tmp_path, **settings), gpus=3)
        assert plan.parallel == mode
        return plan.memory_gb

    ddp, fsdp, zero2 = plan_of("ddp"), plan_of("fsdp"), plan_of("zero2")
    small = 1e-6  # a remainder of a division, and a step count a weight
    assert fsdp["optimizer"] == pytest.approx(ddp["optimizer"] / 3, abs=1e3 * small)
    assert ddp["weights"] / 3 < fsdp["weights"] < ddp["weights"]
    assert ddp["gradients"] / 3 < fsdp["gradients"]
    assert zero2["weights"] == ddp["weights"]
    assert zero2["optimizer"] == pytest.approx(ddp["optimizer"] / 2, abs=1e3 * small)
    assert fsdp["activations"] >= ddp["activations"] - small

    eight = plan_of("ddp", optim__name="adamw8bit")
    assert 0.2 < eight["optimizer"] / ddp["optimizer"] < 0.5


class Picky(TinyModel):
    """Its shapes depend on what its weights make of a picture."""

    def forward(self, batch: Batch) -> Tensor:
        """The loss, of those only that it likes."""
        return super().forward(batch) * len(self.picture(batch.inputs["pixels"]).sum(1).nonzero())


def test_memory_that_depends_on_weights_cannot_be_foretold(drawn_shards: Path, tmp_path: Path) -> None:
    config = config_of(drawn_shards, tmp_path)
    data = data_of(drawn_shards)
    with torch.device("meta"):
        family = TinyFamily(Picky(0.1))
    lengths = list(all_lengths(data, family.row_lengths(), config))

    with pytest.raises(NeedsNumbersError, match=r"the code of Picky asks for numbers .* \(aten.nonzero.default\)"):
        count_memory(config, family, data.reader, lengths, 1, keeps_gradients=False)


class Watched(TinyModel):
    """Remembers the keys of every batch it saw."""

    seen: list[tuple[str, ...]]

    def forward(self, batch: Batch) -> Tensor:
        self.seen.append(batch.keys)
        return super().forward(batch)


class Greedy(TinyModel):
    """Needs more memory than there is."""

    def forward(self, batch: Batch) -> Tensor:
        return super().forward(batch) + torch.empty(2**50).sum()


class TestDryStep:
    def start(self, shards: Path, run: Path, model: type[TinyModel], **changes: Any) -> TinyModel:
        module = model(dropout=0.2)
        module.seen = []  # type: ignore[assignment]

        def open_model(_config: Config, _ranks: Ranks, _plan: Plan) -> tuple[TinyFamily, str]:
            return TinyFamily(module), "tiny"

        train_here(shards, run, open_model, **changes)
        return module

    def test_it_runs_on_the_largest_samples_at_every_start(self, drawn_shards: Path, tmp_path: Path) -> None:
        reader = SplitReader(drawn_shards, "train")
        captions = {reader.key(i): max(reader.read_json(i)["captions"], key=len) for i in range(len(reader))}
        expected = tuple(sorted(captions, key=lambda key: (-len(captions[key]), key))[:4])

        first = self.start(drawn_shards, tmp_path, Watched, train__num_steps=3).seen
        second = self.start(
            drawn_shards, tmp_path, Watched, train__num_steps=5, train__resume_with="train.num_steps"
        ).seen

        assert first[:2] == second[:2] == [expected] * 2

    def test_the_largest_samples_are_remembered(self, drawn_shards: Path, tmp_path: Path) -> None:
        self.start(drawn_shards, tmp_path, Watched, train__num_steps=3)
        cache = tmp_path / CACHE
        known = json.loads(cache.read_text())
        known["samples"] = [[0, "000000000000", 9]]
        cache.write_text(json.dumps(known))

        changes = {"train__num_steps": 5, "train__resume_with": "train.num_steps"}
        assert set(self.start(drawn_shards, tmp_path, Watched, **changes).seen[0]) == {"000000000000"}

        cache.write_text(json.dumps({**known, "of": "another dataset or model"}))
        changes["train__num_steps"] = 7
        assert "000000000000" not in self.start(drawn_shards, tmp_path, Watched, **changes).seen[0]

    def test_no_memory_is_said_with_the_largest_sample(self, drawn_shards: Path, tmp_path: Path) -> None:
        with pytest.raises(
            TrainError,
            match=r"0000000000\d\d: out of memory in a dry step on the largest samples, this one has \d+ tokens; lower "
            r"train\.micro_batch \(4\), or set model\.gradient_checkpointing=true; a model\.max_length below",
        ):
            self.start(drawn_shards, tmp_path, Greedy)
