"""A checkpoint as a model folder of its own: adapter merged, compared with what was trained, under the base's names.

    OUT/config.json, model.safetensors, tokenizer and processor files   as the base has them: the stock Auto classes load it
    OUT/export.json    where it came from, and how far its logits are from those of the trained model

The base is read from its own files again, never from 4 bits: adding to rounded weights, and rounding again, loses what was
learned.
"""

import gc
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from shards.atomic import aside, publish, sync_folder
from shards.errors import UserError
from shards.places import require_folder
from shards.settings import load_settings
from shards.stream import Slot
from xctrain import basemodel, checkpoint
from xctrain.collate import Row
from xctrain.config import Config
from xctrain.data import open_data
from xctrain.errors import ConfigError, RunError
from xctrain.runfolder import chosen_checkpoint

if TYPE_CHECKING:
    from torch import Tensor

    from xctrain.collate import Batch
    from xctrain.models import Family
    from xctrain.state import TrainState

    Saved = dict[str, Tensor]  # weights by name

# Largest difference of a logit, as a share of the largest logit: rounding of weights in that type, with room for depth.
LIMITS = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}
ABOUT = "export.json"
# Of a base folder, what an export does not take over: weights in any format, their lists, and the card of another model.
_LEFT = re.compile(r"\.(safetensors|bin|pt|pth|h5|msgpack|gguf|onnx)$|\.index\.json$|^README|^\.|^export\.json$")


@dataclass(frozen=True)
class Exported:
    """What was written, and how near it is to what was trained."""

    run: str
    checkpoint: str
    step: int
    samples_consumed: int
    base: str  # what names the base model
    revision: str | None
    adapters_merged: int
    dtype: str
    compared_on: str
    largest_difference: float  # of a logit
    largest_logit: float
    renamed: tuple[str, ...]  # tensors that the base's files do not name so


class _Compared(Protocol):
    """A family's module that can be compared with another."""

    def last_logits(self, batch: "Batch") -> "Tensor": ...


def export(
    run_dir: Path,
    out: Path,
    *,
    which: Path | None = None,
    base: Path | None = None,
    image: Path | None = None,
    dtype: str | None = None,
) -> Exported:
    """Write a run's newest whole checkpoint, or ``which`` (``best``, or a folder), as a model folder ``out``, or nothing.

    ``base`` is where the base model lies now, ``image`` a picture to compare on in the place of the run's first sample,
    ``dtype`` the type to write, the config's unless given.

    Raises:
        ConfigError: ``out`` is taken.
        RunError: no whole checkpoint, another base model, nothing to compare on, or a result that differs too much.
    """
    _require_free(out)
    path, (state, position, config, saved) = checkpoint.read_chosen(
        lambda: chosen_checkpoint(run_dir, str(which or "newest"), "--checkpoint"), _read
    )
    config = _config_to_merge(config.moved_to(run_dir), base)
    _require_base(config, position)
    row = _row_of_picture(image) if image else _first_row(config)
    dtype = dtype or config.model.dtype

    temporary = aside(out)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        before, merged = _write_model(config, path, saved, row, dtype, temporary)
        gc.collect()  # else the trained model may still be in memory while the exported one is opened
        after = _logits_of(_reopen(config, dtype, temporary), row)
        result = Exported(
            run=str(run_dir),
            checkpoint=checkpoint.label(path),
            step=state.step,
            samples_consumed=state.samples_consumed,
            base=str(position.get("model_id")),
            revision=config.model.revision,
            adapters_merged=merged,
            dtype=dtype,
            compared_on=row.key,
            largest_difference=float((after - before).abs().max()),
            largest_logit=float(before.abs().max()),
            renamed=tuple(_new_names(Path(basemodel.base_model(config)), temporary)),
        )
        _require_near(result, out)
        text = json.dumps(asdict(result), indent=1, ensure_ascii=False)
        (temporary / ABOUT).write_text(text, encoding="utf-8")
        _publish(temporary, out)
    except OSError as error:
        raise RunError(
            f"{out}: cannot be written: {error.strerror or error}; make room, then export again", path=out
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return result


def _require_free(out: Path) -> None:
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ConfigError(f"{out}: is there already and not empty; give a new folder, nothing is overwritten", path=out)
    require_folder(out, "OUT")


def _config_to_merge(config: Config, base: Path | None) -> Config:
    """The run's config with its base in full precision, from ``base`` if given."""
    model, adapter = config.model, config.adapter
    if base:
        model = model.model_copy(update={"source": "folder", "path": str(base)})
    if adapter.kind == "qlora":
        adapter = adapter.model_copy(update={"kind": "lora"})
    return config.model_copy(update={"model": model, "adapter": adapter})


def _require_base(config: Config, position: Any) -> None:
    """Require the base model that the run began with; a copy of a hub model cannot be told from its name."""
    saved, found = str(position.get("model_id")), basemodel.model_id(config)
    if saved != found and ("@" in saved) == ("@" in found):
        where = basemodel.base_model(config)
        raise RunError(
            f"{where}: is {found}, the run began with the base model {saved}; give the folder of that one with --base",
            path=where,
        )


def _first_row(config: Config) -> Row:
    from xctrain.loader import SlotRows

    try:
        data = open_data(config.data)
        row = SlotRows(data.reader, "first", seed=0)[Slot(n=0, epoch=0, index=data.kept[0])]
        if row.masked:
            raise RunError(row.masked)
        return row
    except UserError as error:
        raise RunError(
            f"nothing to compare the export on: {error}; or give a picture with --image", path=config.run.dir
        ) from error


def _row_of_picture(path: Path) -> Row:
    from PIL import Image

    try:
        with Image.open(path) as image:
            return Row(n=0, epoch=0, key=path.name, image=image.convert("RGB"), captions=("a picture",), masked=None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--image {path}: cannot be read as a picture: {error}", path=path) from error


def _read(path: Path) -> "tuple[TrainState, dict[str, Any], Config, Saved]":
    from xctrain import tensors

    return *checkpoint.read_position(path), load_settings(Config, path / checkpoint.CONFIG), tensors.read_saved(path)


def _write_model(
    config: Config, path: Path, saved: "Saved", row: Row, dtype: str, folder: Path
) -> "tuple[Tensor, int]":
    """Write the trained model; its logits before anything was merged or rounded, and the number of merged adapters."""
    import torch

    from xctrain import tensors
    from xctrain.models.adapter import merge

    wide = config.model.model_copy(update={"dtype": "float32"}) if dtype == "float32" else config.model
    family = basemodel.open_family(config.model_copy(update={"model": wide}))
    tensors.load_weights(path, family.module, every_trainable=False, saved=saved)
    logits = _logits_of(family, row)
    merged = merge(family.module)
    if dtype != wide.dtype:
        family.module.to(getattr(torch, dtype))
    family.save_pretrained(folder)
    base = Path(basemodel.base_model(config))
    for file in sorted(base.iterdir()) if base.is_dir() else ():
        if file.is_file() and not _LEFT.search(file.name) and not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)
    return logits, merged


def _reopen(config: Config, dtype: str, folder: Path) -> "Family":
    from xctrain import models

    family = "hf" if config.model.family == "tiny" else config.model.family
    update = {"family": family, "source": "folder", "path": str(folder), "revision": None, "freeze": (), "dtype": dtype}
    return models.open_family(config.model.model_copy(update=update), folder)


def _logits_of(family: "Family", row: Row) -> "Tensor":
    """Float32 logits of the positions that predict the row's caption, on the best device, without dropout."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    family.module.to(device).eval()
    with torch.no_grad():
        batch = family.collator([row]).to(device)
        return cast(_Compared, family.module).last_logits(batch).float().cpu()


def _require_near(result: Exported, out: Path) -> None:
    limit = LIMITS[result.dtype] * result.largest_logit
    if not result.largest_difference <= limit:  # not a number is not near
        raise RunError(
            f"{out}: not written: a logit of {result.compared_on} differs by {result.largest_difference:.2g} between the "
            f"trained and the exported model, at most {limit:.2g} is rounding in {result.dtype}; try --dtype float32",
            path=out,
        )


def _new_names(base: Path, folder: Path) -> Iterator[str]:
    """Tensors of the export that the base's safetensors files have under no such name."""
    from xctrain.tensors import names_in

    known = {name for path in base.glob("*.safetensors") for name in names_in(path)} if base.is_dir() else set()
    for path in sorted(folder.glob("*.safetensors")) if known else ():
        yield from sorted(set(names_in(path)) - known)


def _publish(temporary: Path, out: Path) -> None:
    mode = (temporary / ABOUT).stat().st_mode
    for path in temporary.rglob("*"):
        if path.is_file():
            path.chmod(mode)  # safetensors files begin as their owner's alone, whatever the umask
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(temporary)
    publish(temporary, out)


def as_text(result: Exported, out: Path) -> str:
    """What was done, for people."""
    lines = [f"{out}: {result.checkpoint} of {result.run}, {result.adapters_merged} adapters merged, {result.dtype}"]
    lines.append(
        f"largest difference of a logit on {result.compared_on}: {result.largest_difference:.2g}, "
        f"of logits up to {result.largest_logit:.3g}"
    )
    if result.renamed:
        lines.append(f"{len(result.renamed)} tensors have names that the base's files do not: {result.renamed[0]} ...")
    return "\n".join(lines)
