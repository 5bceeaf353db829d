"""Caption a split in a fixed order and score it. Sliced by sample over the ranks; each image counts once."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shards.atomic import write_file
from shards.errors import counted
from shards.joined import SampleReader
from shards.stream import Slot
from xctrain.data import Dataset
from xctrain.errors import RunError
from xctrain.loader import DAMAGED, SlotRows
from xctrain.log import JsonLines
from xctrain.phase import enter
from xctrain.scores import Scores, score_captions
from xctrain.state import TrainState

if TYPE_CHECKING:
    from xctrain.collate import Row
    from xctrain.evalconfig import EvalConfig
    from xctrain.models import Family
    from xctrain.ranks import Ranks


@dataclass(frozen=True)
class Caption:
    """What a model says of one image, beside what people said."""

    key: str
    caption: str
    references: tuple[str, ...]


@dataclass(frozen=True)
class Evaluation:
    """A split, captioned and scored; ``loss`` is the token mean over the first caption of each image."""

    split: str
    loss: float
    scores: Scores
    captions: tuple[Caption, ...]
    source: str = ""  # name of the dataset in a mix


def evaluate(
    family: "Family",
    dataset: Dataset,
    config: "EvalConfig",
    ranks: "Ranks",
    stop_asked: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Caption and score the first ``num_images`` of a dataset's split; every rank takes part and gets the result.

    None if any rank was asked to stop meanwhile.

    Dropout is off and the generators end as they were, so an evaluation does not move the training around it.

    Raises:
        RunError: an image is damaged, or not every image was scored exactly once.
    """
    import torch
    from tqdm import tqdm

    reader, left_out = dataset.reader, set(dataset.source.left_out)
    kept = [index for index in range(len(reader)) if index not in left_out][: config.num_images]
    num_images = len(kept)
    own = kept[ranks.rank :: ranks.world_size]
    rows = SlotRows(reader, "first", seed=0, blank=config.blank)
    chunks = [own[i : i + config.micro_batch] for i in range(0, len(own), config.micro_batch)]
    loss, num_targets, stopped = 0.0, 0, False
    captions: list[Caption] = []
    training = family.module.training
    devices = [ranks.accelerator.device] if ranks.accelerator.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        family.module.eval()
        for chunk in tqdm(
            chunks,
            desc=f"captioning {config.split}",
            unit="batch",
            leave=False,
            disable=not ranks.is_main or not sys.stderr.isatty(),
        ):
            if stopped := stop_asked():
                break
            enter(f"captioning {config.split}, image {chunk[0]}")
            batch_rows = [_row(rows, index) for index in chunk]
            batch = family.collator(batch_rows).to(ranks.accelerator.device)
            with ranks.accelerator.autocast():
                loss += float(family.module(batch))
            num_targets += batch.num_targets
            captions += _captions(family, reader, chunk, batch_rows, config)
        family.module.train(training)
    loss, stops = ranks.sum_floats([loss, stopped])
    if stops:
        return None
    [num_targets] = ranks.sum_ints([num_targets])
    captions = sorted(ranks.gather(captions), key=lambda c: c.key)
    if len({c.key for c in captions}) != num_images:
        raise RunError(
            f"{config.split}: {len({c.key for c in captions})} images were captioned, expected {num_images}",
            on_every_rank=True,
        )
    scores = score_captions({c.key: c.caption for c in captions}, {c.key: list(c.references) for c in captions})
    return Evaluation(config.split, loss / max(1, num_targets), scores, tuple(captions), dataset.source.name)


def _row(rows: SlotRows, index: int) -> "Row":
    row = rows[Slot(n=index, epoch=0, index=index)]
    if row.masked and row.masked.startswith(DAMAGED):
        raise RunError(f"{row.key}: cannot be scored: {row.masked}; build the split again", key=row.key)
    return row


def _captions(
    family: "Family", reader: SampleReader, chunk: Sequence[int], rows: Sequence["Row"], config: "EvalConfig"
) -> list[Caption]:
    texts = family.generate([row.image for row in rows], config.max_new_tokens)
    return [
        Caption(row.key, text, tuple(reader.read_json(index)["captions"]))
        for row, text, index in zip(rows, texts, chunk, strict=True)
    ]


def as_event(result: Evaluation) -> dict[str, object]:
    """The figures of an evaluation as a log line has them."""
    source = {"source": result.source} if result.source else {}
    return {"split": result.split, **source, "loss": result.loss, **asdict(result.scores)}


def as_line(result: Evaluation, step: int) -> str:
    """The figures that are looked at first, for the screen."""
    source = f"{result.source}/" if result.source else ""
    scores = {"bleu4": result.scores.bleu4, "cider": result.scores.cider, "rouge_l": result.scores.rouge_l}
    figures = ", ".join(f"{name} {value:.3f}" for name, value in scores.items() if value is not None)
    images = counted(result.scores.num_images, "image")
    return f"step {step}: {images} of {source}{result.split}, loss {result.loss:.3f}, {figures}"


def captions_path(run_dir: Path, step: int, source: str = "") -> Path:
    """Where the captions written after ``step`` lie; those of a mix's second dataset and on are named after it."""
    return run_dir / "captions" / f"{f'{source}-' if source else ''}step-{step:08d}.jsonl"


def write_captions(path: Path, captions: Sequence[Caption]) -> None:
    """One JSON line an image."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(c), ensure_ascii=False) + "\n" for c in captions]
    write_file(path, "".join(lines).encode())


def record(result: Evaluation, run_dir: Path, state: TrainState, log: JsonLines, *, first: bool = True) -> None:
    """Log an evaluation during a run and keep its captions; ``first``: of the first dataset that is scored."""
    write_captions(captions_path(run_dir, state.step, "" if first else result.source), result.captions)
    about = {"step": state.step, "samples_consumed": state.samples_consumed, "time": time.time()}
    log.write(event="eval", **about, **as_event(result))
