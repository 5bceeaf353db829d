"""A rank of a real run whose saves, forwards or captions take time: ballast.py MILLIONS FORWARD_S CAPTION_S field=value ..."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tiny import TinyFamily, TinyModel
from torch import Tensor, nn

from shards import cli
from shards.settings import load_settings
from xctrain.collate import Batch
from xctrain.config import Config
from xctrain.ranks import Ranks
from xctrain.session import train_rank
from xctrain.start import Plan


class HeavyModel(TinyModel):
    """Its checkpoints are 12 MB a million of parameters that decide nothing."""

    def __init__(self, millions: float, forward_s: float, caption_s: float) -> None:
        super().__init__(dropout=0.2)
        self.ballast = nn.Parameter(torch.zeros(1 + round(millions * 1e6)))
        self.forward_s, self.caption_s = forward_s, caption_s

    def forward(self, batch: Batch) -> Tensor:
        time.sleep(self.forward_s)
        return super().forward(batch) + self.ballast[0]


class HeavyFamily(TinyFamily):
    def generate(self, images: Sequence, max_new_tokens: int) -> list[str]:
        time.sleep(self.module.caption_s)
        return super().generate(images, max_new_tokens)


def main(argv: Sequence[str]) -> int:
    """Train; exit code."""

    def open_model(config: Config, _ranks: Ranks, _plan: Plan) -> tuple[TinyFamily, str]:
        torch.manual_seed(config.train.seed)
        return HeavyFamily(HeavyModel(*map(float, argv[:3]))), "tiny"

    return train_rank(load_settings(Config, None, argv[3:]), open_model)


def command(arguments: list[str], millions: float = 0.0, forward_s: float = 0.0, caption_s: float = 0.0) -> list[str]:
    """The command of such a rank."""
    return [sys.executable, str(Path(__file__)), str(millions), str(forward_s), str(caption_s), *arguments]


if __name__ == "__main__":
    cli.run_and_exit(main)
