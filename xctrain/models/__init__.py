"""Model families: how each one is loaded, collates, computes its loss and writes captions."""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor, nn

    from xctrain.collate import Batch, Row
    from xctrain.flops import Shape
    from xctrain.modelconfig import AdapterConfig, ModelConfig
    from xctrain.models.lengths import RowLengths

# Where DeepSpeed is installed, saving a model imports it, and it talks on stdout, where programs read.
logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)


class Collator(Protocol):
    """Makes a Batch on the CPU. Can be pickled, so that loader workers may run it."""

    def __call__(self, rows: "Iterable[Row]") -> "Batch":
        """The rows as one micro-batch."""

    def least_size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height that a picture of this size is resized to; with fewer pixels than that, detail is lost."""


class Family(Protocol):
    """A model and all that differs between one family and another."""

    @property
    def module(self) -> "nn.Module":
        """Maps a Batch to its loss: a float32 scalar, summed over the target tokens, 0 and attached where none."""

    @property
    def collator(self) -> "Collator":
        """Makes batches."""

    def generate(self, images: "Sequence[Image | Tensor]", max_new_tokens: int) -> list[str]:
        """One greedy caption an image, without prompt and special tokens."""

    def check_lengths(self, samples: "Iterable[tuple[str, int, int, Sequence[str]]]") -> None:
        """Refuse a `model.max_length` that some of the (key, width, height, captions) do not fit in."""

    def row_lengths(self) -> "RowLengths":
        """Counts the tokens of a sample."""

    def tokens(self, batch: "Batch") -> list[list[str]]:
        """Text of each token of each row, without padding; a position that a picture takes is called image."""

    def pictures(self, batch: "Batch") -> "list[list[Image]]":
        """The pictures of each row as the model sees them; none at all where its inputs cannot be drawn."""

    def shape(self) -> "Shape":
        """What the model multiplies with, for the share of its GPUs that a run uses."""

    def save_pretrained(self, folder: Path) -> None:
        """Write a folder like the one the model came from, which loads without a network."""


def open_family(
    config: "ModelConfig",
    base: Path | str,
    adapter: "AdapterConfig | None" = None,
    seed: int = 0,
    *,
    empty: bool = False,
) -> Family:
    """The family that `model.family` names, with the weights in ``base``: a local folder, or a hub name.

    With ``empty`` no weights are read: the model has names, shapes and types alone.

    Raises:
        ConfigError: it cannot be loaded, or not as the config wants it.
    """
    if config.family == "xcomposer":
        from xctrain.models.xcomposer import XComposerFamily

        return XComposerFamily.open(config, base, adapter, seed, empty=empty)
    from xctrain.models.hf import HfFamily  # late: transformers takes seconds

    return HfFamily.open(
        config, base, adapter, seed, empty=empty
    )  # family tiny differs only in where its folder comes from
