"""What the commands do on a run folder."""

import json
import re
import shutil
from pathlib import Path

import pytest
import runs
from conftest import drawn_sample
from small import audit_of, config_of, data_of, train_here

from xctrain import __main__ as main
from xctrain import progress
from xctrain.basemodel import ensure_base_model
from xctrain.errors import ConfigError, RunError
from xctrain.flops import Work
from xctrain.progress import Progress
from xctrain.run import StepMetrics
from xctrain.runfolder import config_of as stored_config
from xctrain.session import open_model, trained_family
from xctrain.speed import Speed, Speedometer
from xctrain.state import TrainState

SHORT = {"train__num_steps": 1, "eval__max_new_tokens": 2, "train__global_batch": 2, "train__micro_batch": 2}


@pytest.fixture(scope="module")
def run(drawn_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step of the real tiny family."""
    folder = tmp_path_factory.mktemp("session") / "run"
    train_here(drawn_shards, folder, open_model, **SHORT)
    return folder


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(2):
        (folder / f"{number}.PNG").write_bytes(drawn_sample(number).image)
    return folder


def test_a_damaged_log_is_found_before_the_model_is_loaded_and_mended_as_it_says(
    drawn_shards: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    small = {"train__save_every": 2, "train__micro_batch": 4, "data__workers": 0}
    train_here(drawn_shards, run, **small)
    log = run / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    [number] = [n for n, line in enumerate(lines) if '"event":"step","step":9,' in line]
    log.write_text("".join([*lines[:number], '{"event":\n', *lines[number + 1 :]]))
    said = runs.train(drawn_shards, run, code=1, train__num_steps=12, train__resume_with="train.num_steps", **small)
    assert re.search(rf"metrics.jsonl: line {number + 1} is not JSON; .*train.resume=RUN/checkpoints/step-N", said)
    assert "weights in" not in said, "the model was loaded"
    log.write_text("".join([*lines[:number], *lines[number + 1 :]]))
    assert not audit_of(run).ok
    train_here(drawn_shards, run, **small, train__resume=str(run / "checkpoints/step-00000008"))
    assert audit_of(run).ok


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = StepMetrics(loss=1.5, grad_norm=1.0, lr=1e-3, num_targets=7, stop=False)
    speed = Speed(2.0, 0.1, 4, 7, Work(80, 60), 1.5, None)
    with Progress(shown=True) as shown:
        shown.begin(10, TrainState(), Speedometer(1, 1))
        shown.show(TrainState(step=1), metrics, speed)
        assert capsys.readouterr().err == ""
        monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.0)
        shown.show(TrainState(step=2), metrics, speed)
    figures = "2 samples/s, 10 text and 30 image tokens/s, 2 s a step, 5% waiting for data, 1.5 GB, 16 s left"
    assert capsys.readouterr().err == f"step 2 of 10, loss 1.500, lr 1.0e-03, {figures}\n"


def test_captions_of_ones_own_pictures(run: Path, pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["caption", str(run), str(pictures), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["file"] for line in lines] == [str(pictures / "0.PNG"), str(pictures / "1.PNG")]
    assert all(isinstance(line["caption"], str) for line in lines)


def test_a_folder_of_folders_is_captioned_whole(run: Path, pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inner = pictures / "more" / "of.png"  # a folder, whatever its name says
    inner.mkdir(parents=True)
    shutil.copy(pictures / "0.PNG", inner / "deep.png")
    assert main.main(["caption", str(run), str(pictures), "--json"]) == 0
    files = [json.loads(line)["file"] for line in capsys.readouterr().out.splitlines()]
    assert files == [str(pictures / "0.PNG"), str(pictures / "1.PNG"), str(inner / "deep.png")]


def test_picture_that_cannot_be_read_is_named_and_the_others_go_on(
    run: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = pictures / "0.PNG"
    broken.write_bytes(broken.read_bytes()[:100])
    out = tmp_path / "captions.txt"
    assert main.main(["caption", str(run), str(pictures), "--out", str(out)]) == 1
    assert f"error: {broken}: cannot be read as a picture: " in capsys.readouterr().err
    assert out.read_text().startswith(f"{pictures / '1.PNG'}: ")
    assert main.main(["caption", str(run), str(broken)]) == 1
    assert "the others" not in capsys.readouterr().err


def test_place_for_captions_is_checked_before_the_model_is_loaded(run: Path, pictures: Path, tmp_path: Path) -> None:
    for out, text in (
        (tmp_path / "no" / "x.txt", f"there is no folder {tmp_path / 'no'}"),
        (tmp_path, "that is a folder"),
    ):
        with pytest.raises(ConfigError, match=f"--out is {out}, {text}; give a file in a folder that is there"):
            main.main(["caption", str(run), str(pictures), "--out", str(out)])


@pytest.mark.parametrize(("name", "text"), [("nothing", "there is no such file or folder"), ("", "holds no picture")])
def test_pictures_that_are_not_there_are_refused(run: Path, tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        main.main(["caption", str(run), str(tmp_path / name)])


def test_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config.yaml, so it is not a run folder; give the run.dir of a run"):
        main.main(["caption", str(tmp_path), "x.png"])


@pytest.mark.parametrize("command", ["caption", "report", "export"])
def test_damaged_config_of_a_run_says_where_a_copy_is(run: Path, tmp_path: Path, command: str) -> None:
    copied = Path(shutil.copytree(run, tmp_path / "run"))
    (copied / "config.yaml").write_bytes(b"train: [")
    more = {"caption": ["x.png"], "report": [], "export": [str(tmp_path / "out"), "--checkpoint", "best"]}[command]
    with pytest.raises(
        RunError, match=r"config.yaml: is not valid YAML: .*put a copy back, such as checkpoints/step-N"
    ):
        main.main([command, str(copied), *more])


def test_moved_run_is_read_where_it_lies(run: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(run, tmp_path / "moved"))
    assert stored_config(moved).run.dir == moved


def test_checkpoint_to_score_may_be_named(run: Path, drawn_shards: Path, tmp_path: Path) -> None:
    config = config_of(drawn_shards, run, **SHORT)
    newest, path = trained_family(config, "newest")
    named, same = trained_family(config, str(path))
    base, none = trained_family(config, "base")
    assert (path, none) == (run / "checkpoints" / "step-00000001", None)
    assert same == path
    weights = [dict(family.module.named_parameters()) for family in (newest, named, base)]
    name = next(n for n, p in weights[0].items() if p.requires_grad and not p.equal(weights[2][n]))
    assert weights[0][name].equal(weights[1][name])
    with pytest.raises(ConfigError, match=r"eval.checkpoint is nothing, there is no such folder; give a checkpoint"):
        trained_family(config, "nothing")
    fresh = config_of(drawn_shards, tmp_path / "fresh", **SHORT)
    ensure_base_model(fresh, data_of(drawn_shards))
    with pytest.raises(ConfigError, match=r"fresh: has no config.yaml, so it is not a run folder; give"):
        trained_family(fresh, "newest")


def test_split_is_scored_from_the_command_line(
    run: Path, drawn_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "captions.jsonl"
    settings = ["eval.num_images=3", f"run.dir={run}", f"data.shards={drawn_shards}"]
    assert main.main(["evaluate", str(run / "config.yaml"), "--json", "--out", str(out), *settings]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["checkpoint"], values["split"], values["num_images"]) == ("step-00000001", "val", 3)
    assert len(out.read_text().splitlines()) == 3
    assert main.main(["evaluate", str(run / "config.yaml"), *settings]) == 0
    text = capsys.readouterr().out
    assert re.search(r"\n +bleu4  \d\.\d{4}\n", text)
    assert all(f"warning: {warning}\n" in text for warning in values["warnings"])
    assert "()" not in text


def test_score_of_a_run_that_is_not_there_is_wrong_usage_and_leaves_nothing(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "typo"
    with pytest.raises(
        ConfigError, match=rf"run.dir is {folder}, there is no such folder; train first, or give another"
    ):
        main.main(["evaluate", str(run / "config.yaml"), f"run.dir={folder}"])
    assert not folder.exists()


def test_older_checkpoint_is_taken_with_a_word(
    run: Path, drawn_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = Path(shutil.copytree(run, tmp_path / "run"))
    newer = Path(shutil.copytree(copied / "checkpoints/step-00000001", copied / "checkpoints/step-00000002"))
    (newer / "rng.json").unlink()
    _, path = trained_family(config_of(drawn_shards, copied, **SHORT), "newest")
    assert path == copied / "checkpoints" / "step-00000001"
    assert f"passed over {newer}: rng.json is missing\n" in capsys.readouterr().err
