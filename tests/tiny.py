"""A captioner of the family contract that steps in milliseconds and needs no transformers. Dropout is on.

With a folder of a small XComposer in XCTRAIN_TEST_XCOMPOSER that model takes its place, so that every test of resume
can be run on it.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from shards.settings import load_settings
from xctrain.collate import Batch, Row
from xctrain.config import Config
from xctrain.loss import IGNORED, summed_cross_entropy
from xctrain.models import Family
from xctrain.models.lengths import RowLengths
from xctrain.ranks import Ranks
from xctrain.start import Plan

WIDTH = 24
END = 256


class TinyModel(nn.Module):
    """Bytes of the caption, each predicted from those before it and a 4 x 4 thumbnail."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(END + 1, WIDTH)
        self.picture = nn.Linear(48, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, END + 1)
        self.unused = nn.Parameter(torch.zeros(3))  # as real models have: it never gets a gradient
        self.dropout = nn.Dropout(dropout)

    def logits(self, ids: Tensor, pixels: Tensor) -> Tensor:
        hidden = self.embedding(ids) + self.picture(pixels)[:, None]
        before = torch.ones(ids.shape[1], ids.shape[1], device=ids.device).tril()
        means = before / before.sum(1, keepdim=True) @ self.dropout(hidden)
        return self.head(self.norm(hidden + self.mix(means)))

    def forward(self, batch: Batch) -> Tensor:
        return summed_cross_entropy(self.logits(batch.inputs["input_ids"], batch.inputs["pixels"]), batch.labels)


def thumbnails(rows: Sequence[Row]) -> Tensor:
    return torch.tensor([list(row.image.resize((4, 4)).tobytes()) for row in rows], dtype=torch.float32) / 255


def collate(rows: Iterable[Row]) -> Batch:
    rows = list(rows)
    texts = [[END, *row.captions[0].encode(), END] for row in rows]
    ids = torch.full((len(rows), max(map(len, texts))), END)
    labels = torch.full_like(ids, IGNORED)
    for i, (row, text) in enumerate(zip(rows, texts, strict=True)):
        ids[i, : len(text)] = torch.tensor(text)
        if not row.masked:
            labels[i, 1 : len(text)] = ids[i, 1 : len(text)]
    return Batch(
        inputs={"input_ids": ids, "pixels": thumbnails(rows)},
        labels=labels,
        positions=tuple(row.n for row in rows),
        keys=tuple(row.key for row in rows),
        masked=tuple(row.masked for row in rows),
        num_targets=int((labels != IGNORED).sum()),
    )


@dataclass(frozen=True)
class TinyFamily:
    module: TinyModel

    collator = staticmethod(collate)

    def generate(self, images: Sequence, max_new_tokens: int) -> list[str]:
        with torch.no_grad():
            device = self.module.head.weight.device
            pixels = thumbnails([Row(0, 0, "", image, ("",)) for image in images]).to(device)
            ids = torch.full((len(images), 1), END, device=device)
            for _ in range(max_new_tokens):
                ids = torch.cat([ids, self.module.logits(ids, pixels)[:, -1:].argmax(-1)], dim=1)
        return [bytes(b for b in row if b < END).decode(errors="replace") or "nothing" for row in ids.tolist()]

    def check_lengths(self, samples: object) -> None:
        pass

    def row_lengths(self) -> RowLengths:
        return RowLengths(prompt=lambda _width, _height: 1, answer=lambda text: len(text.encode()) + 1, added=1)

    def tokens(self, batch: Batch) -> list[list[str]]:
        return [[chr(b) if b < END else "<end>" for b in ids] for ids in batch.inputs["input_ids"].tolist()]

    def pictures(self, batch: Batch) -> list:
        return []

    def shape(self) -> None:
        return None

    def save_pretrained(self, folder: Path) -> None:
        pass


def open_tiny(config: Config, ranks: Ranks, plan: Plan) -> tuple[Family, str]:
    """In the place of ``xctrain.start.open_model``."""
    torch.manual_seed(config.train.seed)
    dropout = 0.0 if config.model.prompt == "no dropout" else 0.2
    if base := os.environ.get("XCTRAIN_TEST_XCOMPOSER"):
        from xctrain.models.xcomposer import XComposerFamily

        family = XComposerFamily.open(config.model, base)
        for part in family.module.modules():
            if isinstance(part, nn.Dropout):
                part.p = dropout
        return family, "tiny"
    return TinyFamily(TinyModel(dropout)), "tiny"


if __name__ == "__main__":
    from shards import cli
    from xctrain.session import train_rank

    cli.run_and_exit(lambda argv: train_rank(load_settings(Config, Path(argv[0]), argv[1:]), open_tiny))
