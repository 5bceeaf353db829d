"""InternLM-XComposer2.5-7B, native: its published checkpoint, without its published code."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor, nn

from shards.errors import ConfigError
from xctrain.collate import Batch, Row
from xctrain.flops import Shape, Work
from xctrain.loss import IGNORED
from xctrain.models.adapter import adapt
from xctrain.models.hf import evaluating
from xctrain.models.lengths import RowLengths, require_all_fit, require_fit
from xctrain.models.parameters import freeze, matrices_of
from xctrain.models.xcomposer_config import read_config
from xctrain.models.xcomposer_generate import write_greedily
from xctrain.models.xcomposer_images import join_tiles
from xctrain.models.xcomposer_model import XComposer
from xctrain.models.xcomposer_prompt import LAYOUTS, Encoder, TokenRow, chat_text, pad_rows
from xctrain.models.xcomposer_tokenizer import Tokenizer
from xctrain.models.xcomposer_weights import (
    copy_rest,
    decoder_linears,
    empty_model,
    has_weights,
    load_model,
    matched_tensors,
    save_model,
)

if TYPE_CHECKING:
    from xctrain.modelconfig import AdapterConfig, ModelConfig

# Parts with a setting of their own in the config, and their parameters.
_PARTS = {"plora": "*_plora.*", "separators": "plora_*_GN"}


class CaptionModel(nn.Module):
    """``Batch`` to summed loss. ``model`` holds the parameters."""

    def __init__(self, model: XComposer) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        """Float32 scalar: cross-entropy summed over the batch's targets."""
        return self.model.summed_loss(self._hidden(batch), batch.labels)

    def last_logits(self, batch: Batch) -> Tensor:
        """Float32 logits [targets, vocabulary] of the positions that predict a target."""
        return self.model.logits(self._hidden(batch)[:, :-1][batch.labels[:, 1:] != IGNORED])

    def _hidden(self, batch: Batch) -> Tensor:
        # Padding stands on the right, where no target looks: causal attention needs no mask, and flash kernels take it.
        hidden: Tensor = self.model(self.model.embed(batch.inputs), batch.inputs["image_mask"])
        return hidden


@dataclass(frozen=True)
class Collator:
    """Rows to a Batch: pictures tiled, prompt and answer as ids, padded on the right."""

    encoder: Encoder
    instruction: str
    pad_id: int
    max_length: int | None
    patches_per_view: int  # of the tower, which sees tiles and one view of the whole

    def __call__(self, rows: Iterable[Row]) -> Batch:
        """The rows as one micro-batch.

        Raises:
            ConfigError: a sequence is longer than model.max_length, or a picture too thin to be tiled.
        """
        # by `map`, which lets go of each picture once it is tiled
        laid_out, positions, keys, masked = zip(*map(self._lay_out, rows), strict=True)
        lines = [line for lines in laid_out for line in lines]
        inputs, labels = pad_rows(lines, self.pad_id, self.encoder.side)
        return Batch(
            inputs=inputs,
            labels=labels,
            positions=positions,
            keys=keys,
            masked=masked,
            num_targets=int((labels != IGNORED).sum()),
            work=Work(
                tokens=sum(len(line.ids) for line in lines),
                image_tokens=int(inputs["image_mask"].sum()),
                patches=(len(inputs["tiles"]) + len(inputs["grids"])) * self.patches_per_view,
                token_pairs=sum(len(line.ids) ** 2 for line in lines),
            ),
        )

    def least_size(self, width: int, height: int) -> tuple[int, int]:
        """A picture's own size, since its tiles go by that."""
        return width, height

    def prompt(self, image: Image.Image | Tensor) -> TokenRow:
        """What stands before the answer."""
        return self.encoder.prompt(chat_text(self.instruction), [image])

    def _lay_out(self, row: Row) -> tuple[list[TokenRow], int, str, str | None]:
        return self._lines(row), row.n, row.key, row.masked

    def _lines(self, row: Row) -> list[TokenRow]:
        try:
            prompt = self.prompt(row.image)
        except ConfigError as error:
            raise ConfigError(f"{row.key}: {error}", key=row.key) from error
        # A masked row keeps one line, so that the shapes of a step do not depend on what turned out damaged.
        captions = (row.captions[:1] or ("",)) if row.masked else row.captions
        lines = [self.encoder.answer(prompt, caption) for caption in captions]
        for line in lines:
            require_fit(row.key, len(line.ids), self.max_length)
        return [replace(line, labels=[IGNORED] * len(line.ids)) for line in lines] if row.masked else lines

    def check_lengths(self, samples: Iterable[tuple[str, int, int, Sequence[str]]]) -> None:
        """Refuse a max_length that a sample does not fit in; samples are (key, width, height, captions).

        Raises:
            ConfigError: names the number of samples that do not fit, one of them, and the length that would do.
        """
        require_all_fit(samples, self.max_length, self.row_lengths())

    def row_lengths(self) -> RowLengths:
        """Counts the tokens of a sample."""
        blank = Image.new("RGB", (self.encoder.side, self.encoder.side))
        text_length = len(self.prompt(blank).ids) - self.encoder.image_tokens(*blank.size)
        nothing = TokenRow([], [])
        return RowLengths(
            prompt=lambda width, height: text_length + self.encoder.image_tokens(width, height),
            answer=lambda caption: len(self.encoder.answer(nothing, caption).ids),
            added=len(self.encoder.answer(nothing, "").ids),
        )


@dataclass(frozen=True)
class XComposerFamily:
    """The loaded model with its collator and its way to write captions."""

    module: CaptionModel
    collator: Collator
    base: Path  # the folder it came from

    @classmethod
    def open(
        cls,
        config: "ModelConfig",
        base: Path | str,
        adapter: "AdapterConfig | None" = None,
        seed: int = 0,
        *,
        empty: bool = False,
    ) -> "XComposerFamily":
        """The model in the folder ``base``. Nothing is downloaded, and no code that lies there is run.

        With ``empty`` no weights are read: the model has names, shapes and types alone. Those in the folder, if there
        are any, are checked against it.

        Raises:
            ConfigError: it is not a whole checkpoint of XComposer2.5, or a pattern of what trains fits nothing.
        """
        if config.decode == "scaled":
            raise ConfigError(
                "model.decode is scaled, but XComposer's tiles go by a picture's own size; use model.decode=fast"
            )
        folder = Path(base)
        architecture = read_config(folder)
        encoder = Encoder(
            tokenizer=Tokenizer(folder),
            layout=LAYOUTS[config.layout],
            side=architecture.vision_config.image_size,
            cells=architecture.vision_config.cells,
            hd_num=config.hd_num,
        )
        patches = architecture.vision_config.patches**2
        collator = Collator(encoder, config.prompt, architecture.pad_token_id, config.max_length, patches)
        compute = getattr(torch, adapter.compute) if adapter and adapter.kind == "qlora" else None
        dtype = getattr(torch, config.dtype)
        model = empty_model(architecture).to(dtype) if empty else load_model(architecture, folder, dtype, compute)
        if empty and has_weights(folder):
            deque(matched_tensors(model, folder), maxlen=0)
        model.checkpoint_gradients(config.gradient_checkpointing)
        model.views_at_once = config.views_at_once
        if adapter is None or adapter.kind == "none":
            freeze(model, (*config.freeze, *_parts_that_are(config, "frozen")))
        else:
            also = (*adapter.train_also, *_parts_that_are(config, "training"))
            adapt(model, adapter.model_copy(update={"train_also": also}), decoder_linears(model), seed)
        return cls(CaptionModel(model), collator, folder)

    def check_lengths(self, samples: Iterable[tuple[str, int, int, Sequence[str]]]) -> None:
        """Refuse a `model.max_length` that some of the (key, width, height, captions) do not fit in."""
        self.collator.check_lengths(samples)

    def row_lengths(self) -> RowLengths:
        """Counts the tokens of a sample."""
        return self.collator.row_lengths()

    def generate(self, images: Sequence[Image.Image | Tensor], max_new_tokens: int) -> list[str]:
        """One greedy caption an image, without prompt and special tokens. Draws no random number."""
        model, encoder = self.module.model, self.collator.encoder
        prompts = [self.collator.prompt(image) for image in images]
        inputs, _ = pad_rows(prompts, self.collator.pad_id, encoder.side, left=True)
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        with evaluating(model):
            answers = write_greedily(model, inputs, max_new_tokens=max_new_tokens, end_ids=encoder.tokenizer.end_ids)
        return [" ".join(encoder.tokenizer.answer(ids).split()) for ids in answers]

    def tokens(self, batch: Batch) -> list[list[str]]:
        """Text of each token of each row, without padding; a position that a picture takes is called image."""
        inputs, tokenizer = batch.inputs, self.collator.encoder.tokenizer
        rows = zip(inputs["input_ids"], inputs["image_mask"], inputs["attention_mask"].bool(), strict=True)
        return [
            [
                "image" if is_image else tokenizer.piece(int(token))
                for token, is_image in zip(ids[real], at[real], strict=True)
            ]
            for ids, at, real in rows
        ]

    def pictures(self, batch: Batch) -> list[list[Image.Image]]:
        """The picture of each row, resized and padded to whole tiles. The view of the whole that goes with it is its copy."""
        tiles = iter(batch.inputs["tiles"])
        return [
            [join_tiles([next(tiles) for _ in range(down * across)], across)]
            for down, across in batch.inputs["grids"].tolist()
        ]

    def shape(self) -> Shape:
        """What the model multiplies with."""
        model = self.module.model
        return Shape(
            pictures=matrices_of(model, without=(model.model, model.output)),
            decoder=matrices_of(model.model),
            head=matrices_of(model.output),
            layers=model.config.num_hidden_layers,
            width=model.config.hidden_size,
        )

    def save_pretrained(self, folder: Path) -> None:
        """Write a folder in the layout of the published checkpoint, under its names; it opens without a network."""
        save_model(self.module.model, folder)
        copy_rest(self.base, folder)


def _parts_that_are(config: "ModelConfig", setting: str) -> list[str]:
    """Patterns of the parts that the config gives this setting."""
    return [pattern for part, pattern in _PARTS.items() if getattr(config, part) == setting]
