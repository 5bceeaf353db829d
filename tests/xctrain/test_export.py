"""A trained run becomes a model folder that needs nothing of ours."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import drawn_sample
from safetensors.torch import load_file, save_file
from small import train_here

from xctrain import __main__ as main
from xctrain import export as exporting
from xctrain.errors import ConfigError, RunError
from xctrain.export import export
from xctrain.runfolder import config_of
from xctrain.session import open_model, trained_family

PROMPT = "Describe the image."
# What a user does with the folder, in a process that knows nothing of this project.
STOCK = """
import sys, torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
folder, picture, prompt = sys.argv[1:]
processor = AutoProcessor.from_pretrained(folder)
model = AutoModelForImageTextToText.from_pretrained(folder).eval()
content = [{"type": "image", "image": Image.open(picture).convert("RGB")}, {"type": "text", "text": prompt}]
inputs = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True,
                                       tokenize=True, return_dict=True, return_tensors="pt")
ids = model.generate(**inputs, do_sample=False, max_new_tokens=12)[0, inputs["input_ids"].shape[1]:]
print(type(model).__name__)
print(" ".join(processor.decode(ids, skip_special_tokens=True).split()))
"""
SETTINGS = {
    "train__num_steps": 8,
    "train__global_batch": 8,
    "train__save_every": 4,
    "optim__lr": 1e-2,
    "optim__warmup_steps": 0,
    "adapter__compute": "float32",
    "adapter__dropout": 0.2,
    "eval__max_new_tokens": 12,
    "eval__num_images": 2,
}
Run = Callable[[str], Path]


@pytest.fixture(scope="module")
def run_of(drawn_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of the tiny family by adapter.kind; trained on first use. Not to be changed."""

    @cache
    def run_with(adapter: str) -> Path:
        run = tmp_path_factory.mktemp("export") / adapter
        train_here(drawn_shards, run, open_model, adapter__kind=adapter, **SETTINGS)
        return run

    return run_with


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "picture.png"
    path.write_bytes(drawn_sample(7).image)
    return path


@pytest.mark.parametrize("adapter", ["none", "lora", "qlora"])
def test_export_loads_offline_with_stock_classes_and_captions_the_same(
    run_of: Run, tmp_path: Path, picture: Path, adapter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = run_of(adapter), tmp_path / "out"

    assert main.main(["export", str(run), str(out)]) == 0

    text = capsys.readouterr().out
    assert f"{out}: step-00000008 of {run}, {0 if adapter == 'none' else 14} adapters merged, float32" in text
    assert re.search(r"largest difference of a logit on \d{12}: \d", text)
    command = [sys.executable, "-c", STOCK, str(out), str(picture), PROMPT]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    kind, caption = found.stdout.splitlines()
    assert kind == "LlavaForConditionalGeneration"
    if adapter == "qlora":  # in 4 bits it may say something else: what counts is the unquantised base with the adapter
        config = exporting._config_to_merge(config_of(run), None)
        family, _ = trained_family(config, "newest")
        [expected] = family.generate([drawn_sample(7).open_image()], 12)
    else:
        assert main.main(["caption", str(run), str(picture), "--json"]) == 0
        expected = json.loads(capsys.readouterr().out)["caption"]
    assert caption == expected != ""


@pytest.mark.parametrize("adapter", ["none", "lora", "qlora"])
def test_export_has_the_tensors_of_the_base_under_its_names(run_of: Run, tmp_path: Path, adapter: str) -> None:
    run = run_of(adapter)

    result = export(run, tmp_path / "out")

    base, out = (load_file(folder / "model.safetensors") for folder in (run / "base-model", tmp_path / "out"))
    assert {name: (t.shape, t.dtype) for name, t in out.items()} == {n: (t.shape, t.dtype) for n, t in base.items()}
    changed = {name for name in base if not torch.equal(base[name], out[name])}
    assert changed
    if adapter != "none":
        assert all(re.search(r"language_model.*_proj\.weight$", name) for name in changed)
    assert result.renamed == ()
    assert result.largest_difference < 1e-4 * result.largest_logit
    about = json.loads((tmp_path / "out" / "export.json").read_text())
    assert about["checkpoint"] == "step-00000008"
    assert about["samples_consumed"] == 64
    assert about["base"] == result.base
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1
    assert not list(tmp_path.glob(".*"))


def test_an_earlier_checkpoint_another_picture_and_another_type(run_of: Run, tmp_path: Path, picture: Path) -> None:
    earlier = run_of("lora") / "checkpoints" / "step-00000004"
    options = ["--checkpoint", str(earlier), "--image", str(picture), "--dtype", "bfloat16", "--json"]

    assert main.main(["export", str(run_of("lora")), str(tmp_path / "out"), *options]) == 0

    about = json.loads((tmp_path / "out" / "export.json").read_text())
    assert (about["checkpoint"], about["compared_on"], about["dtype"]) == ("step-00000004", "picture.png", "bfloat16")
    assert 0 < about["largest_difference"] < 0.05 * about["largest_logit"]
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_base_that_was_moved_is_given_by_hand_and_another_one_is_refused(run_of: Run, tmp_path: Path) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    shutil.copytree(run_of("lora"), run)
    (run / "base-model").rename(moved)

    assert export(run, tmp_path / "out", base=moved).adapters_merged == 14

    weights = load_file(moved / "model.safetensors")
    save_file({n: t + 1 for n, t in weights.items()}, moved / "model.safetensors", metadata={"format": "pt"})
    message = r"moved: is \w+, the run began with the base model \w+; give the folder of that one with --base"
    with pytest.raises(RunError, match=message):
        export(run, tmp_path / "other", base=moved)


def test_files_of_the_base_that_are_no_weights_come_along(run_of: Run, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_of("lora"), run)
    for name in ("modeling_own.py", "LICENSE", "weights.pt", "README.md"):
        (run / "base-model" / name).write_text("text")

    export(run, tmp_path / "out")

    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"modeling_own.py", "LICENSE", "tokenizer.json", "chat_template.jinja", "processor_config.json"}
    assert not names & {"weights.pt", "README.md"}


def test_a_folder_that_is_taken_is_refused(run_of: Run, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("text")

    with pytest.raises(ConfigError, match="out: is there already and not empty; give a new folder"):
        export(run_of("lora"), tmp_path / "out")

    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_an_empty_folder_is_taken(run_of: Run, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export(run_of("lora"), tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists()


def test_result_that_differs_from_what_was_trained_is_not_written(
    run_of: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(exporting.LIMITS, "bfloat16", 1e-9)

    message = (
        r"out: not written: a logit of \d+ differs by .* between the trained and the exported model, at most .* is"
    )
    with pytest.raises(RunError, match=message):
        export(run_of("lora"), tmp_path / "out", dtype="bfloat16")

    assert not list(tmp_path.iterdir())


def test_what_is_missing_is_named(run_of: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing: there is no such run folder; give"):
        export(tmp_path / "nothing", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"--checkpoint is .*none, there is no such folder"):
        export(run_of("lora"), tmp_path / "out", which=tmp_path / "none")
    with pytest.raises(ConfigError, match=r"--image .*none\.png: cannot be read as a picture"):
        export(run_of("lora"), tmp_path / "out", image=tmp_path / "none.png")
    assert not list(tmp_path.iterdir())


def test_without_the_runs_data_a_picture_will_do(drawn_shards: Path, tmp_path: Path, picture: Path) -> None:
    shutil.copytree(drawn_shards, tmp_path / "shards")
    train_here(tmp_path / "shards", tmp_path / "run", open_model, **{**SETTINGS, "train__num_steps": 1})
    shutil.rmtree(tmp_path / "shards")

    with pytest.raises(RunError, match=r"nothing to compare the export on: .*shards.*; or give a picture with --image"):
        export(tmp_path / "run", tmp_path / "out")

    assert export(tmp_path / "run", tmp_path / "out", image=picture).adapters_merged == 0


def test_evaluate_scores_an_adapter(run_of: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for adapter in ("lora", "qlora"):
        assert main.main(["evaluate", str(run_of(adapter) / "config.yaml"), "--json"]) == 0
        trained = json.loads(capsys.readouterr().out)
        assert main.main(["evaluate", str(run_of(adapter) / "config.yaml"), "eval.checkpoint=base", "--json"]) == 0
        base = json.loads(capsys.readouterr().out)
        assert trained["checkpoint"] == "step-00000008"
        assert trained["loss"] < 0.8 * base["loss"]
