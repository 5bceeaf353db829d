"""What `plan` says and refuses, and the dry step on the largest samples."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from small import config_of, train_here
from tiny import TinyFamily, TinyModel
from torch import Tensor
from xcomposers import build_xcomposer

from shards.reader import SplitReader
from xctrain import basemodel
from xctrain.__main__ import main
from xctrain.collate import Batch, Row
from xctrain.config import Config
from xctrain.errors import TrainError
from xctrain.largest import CACHE, all_lengths, find_largest, largest
from xctrain.plan import histogram, make_plan
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
        changes = {"model__max_length": 20}
        code = main(["plan", os.devnull, *settings(base, drawn_shards, tmp_path, **changes), "--gpus", "5"])

        text = capsys.readouterr().out
        assert code == 2
        assert "refused: train.global_batch is 12, which is not processes (5) x train.micro_batch (2)" in text
        assert "1, 2, 3, 6 processes are possible" in text
        assert "refused: model.max_length is 20: 100 of 100 samples would lose their target, 000000000000 needs" in text

    def test_builds_the_tiny_model(self, drawn_shards: Path, tmp_path: Path) -> None:
        plan = make_plan(config_of(drawn_shards, tmp_path), 0)

        assert plan.total_gb > 0
        assert (tmp_path / "base-model" / "config.json").is_file()


def test_tokens_are_those_of_the_rows(drawn_shards: Path, tmp_path: Path, base: Path) -> None:
    config = config_of(drawn_shards, tmp_path, model__family="xcomposer", model__path=base)
    reader = SplitReader(drawn_shards, "train")
    family = basemodel.open_family(config, empty=True)

    for length in list(all_lengths(reader, family.row_lengths()))[::25]:
        sample = reader.read(length.index)
        rows = [Row(0, 0, sample.key, sample.open_image(), (caption,)) for caption in sample.captions]
        assert length.tokens == family.collator(rows).labels.shape[1]
    assert largest(all_lengths(reader, family.row_lengths()), 3) == find_largest(reader, family.row_lengths(), 3)


def test_histogram_covers_every_sample_once() -> None:
    assert histogram([5]) == [(5, 5, 1)]
    assert histogram([1, 1, 2, 3]) == [(1, 1, 2), (2, 2, 1), (3, 3, 1)]
    bars = histogram(list(range(7, 1000)))
    assert len(bars) == 10
    assert sum(count for _, _, count in bars) == 993
    assert bars[0][0] == 7
    assert bars[-1][1] >= 999


@pytest.mark.slow
def test_the_7b_model_is_planned_without_its_weights(drawn_shards: Path, tmp_path: Path) -> None:
    folder = build_xcomposer(tmp_path / "base")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    published = {**json.loads((folder / "config.json").read_text()), **SEVEN_B}
    (folder / "config.json").write_text(json.dumps(published))
    changes = {"model__dtype": "bfloat16", "adapter__kind": "qlora", "model__gradient_checkpointing": True}
    config = config_of(drawn_shards, tmp_path, model__family="xcomposer", model__path=folder, **changes)

    plan = make_plan(config, 1)

    assert plan.memory_gb["weights"] == pytest.approx(7.0, rel=0.02)
    assert plan.memory_gb["adapter"] == pytest.approx(150_994_944 * 4 / 1e9)
    assert 8 < plan.total_gb < 24


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

        assert first[:3] == second[:3] == [expected] * 3

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
