"""Training in this process: one rank, real parts, milliseconds a step."""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import runs
import torch
from tiny import TinyFamily, TinyModel, open_tiny
from torch import Tensor

from shards.settings import load_settings
from xctrain import audit, trained
from xctrain.bring import fetch_run
from xctrain.collate import Batch
from xctrain.config import Config
from xctrain.data import Data, open_data
from xctrain.dataconfig import DataConfig
from xctrain.errors import TrainError
from xctrain.loop import log_pushes, train
from xctrain.push import claim
from xctrain.ranks import Ranks, join
from xctrain.runfolder import lock
from xctrain.session import OpenModel
from xctrain.start import Plan, make_plan, start
from xctrain.state import TrainState


def config_of(shards: Path, run: Path, **changes: Any) -> Config:
    """The config of a small run; changes are written ``train__seed=3``."""
    values = {"data__workers": 0, "train__num_steps": 10, "train__micro_batch": 4, **changes}
    return load_settings(Config, None, runs.settings(shards, run, **values))


def data_of(shards: Path, split: str = "train") -> Data:
    """The datasets of a run on one folder."""
    return open_data(DataConfig(shards=shards, split=split))


def never() -> bool:
    return False


def train_here(
    shards: Path,
    run: Path,
    open_model: OpenModel = open_tiny,
    stop_asked: Callable[[], bool] = never,
    join: Callable[[Config], Ranks] = join,
    **changes: Any,
) -> TrainState:
    """Train until the end, or until the error that the caller expects; the last state."""
    config = config_of(shards, run, **changes)
    ranks = join(config)
    with lock(config):
        fetch_run(config)
        plan = make_plan(config, world_size=1)
        claim(config)
        family, model_id = open_model(config, ranks, plan)
        parts = start(config, ranks, plan, family, model_id, stop_asked=stop_asked, show=lambda *_: None)
        try:
            state, _ = train(parts, plan.state)
        finally:
            with suppress(TrainError):  # the end of a process would wait for it
                parts.saver.finish()
            if parts.saver.pusher:
                parts.saver.pusher.finish()
                log_pushes(parts)
            for log in filter(None, (parts.log, parts.keys)):
                log.close()
    return state


def audit_of(run: Path) -> audit.Audit:
    return audit.audit(trained.open_run(run))


class PoisonedModel(TinyModel):
    """Its loss is not a number where a micro-batch holds a poisoned position."""

    poison: Collection[int] = ()

    def forward(self, batch: Batch) -> Tensor:
        loss = super().forward(batch)
        return loss * torch.nan if set(batch.positions) & set(self.poison) else loss


def open_poisoned(*positions: int) -> OpenModel:
    """In the place of ``open_tiny``: a model that some positions are poison to."""

    def open_model(config: Config, _ranks: Ranks, _plan: Plan) -> tuple[TinyFamily, str]:
        torch.manual_seed(config.train.seed)
        model = PoisonedModel(dropout=0.2)
        model.poison = positions
        return TinyFamily(model), "tiny"

    return open_model


class HungryModel(TinyModel):
    """Has no memory for a micro-batch that holds the position, unless it is a small one."""

    def __init__(self, position: int, most: int) -> None:
        super().__init__(dropout=0.0)
        self.position, self.most = position, most

    def forward(self, batch: Batch) -> Tensor:
        loss = super().forward(batch)
        if self.position in batch.positions and len(batch.positions) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return loss


def open_hungry(position: int, most: int) -> OpenModel:
    """In the place of ``open_tiny``: a model for which some rank runs out of memory at one position."""

    def open_model(config: Config, _ranks: Ranks, _plan: Plan) -> tuple[TinyFamily, str]:
        torch.manual_seed(config.train.seed)
        return TinyFamily(HungryModel(position, most)), "tiny"

    return open_model


if __name__ == "__main__":
    # One rank of a real run: small.py POSITION,POSITION section.field=value ..., or small.py POSITION/SIZE ...
    from shards import cli
    from xctrain.session import train_rank

    def main(argv: Sequence[str]) -> int:
        if "/" in argv[0]:
            model = open_hungry(*map(int, argv[0].split("/")))
        else:
            model = open_poisoned(*map(int, argv[0].split(",")))
        return train_rank(load_settings(Config, None, argv[1:]), model)

    cli.run_and_exit(main)
