"""The parts of a run on one rank, and what passes between them in a step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from xctrain.best import Scores
from xctrain.config import Config
from xctrain.flops import Work
from xctrain.loader import Loader
from xctrain.log import JsonLines
from xctrain.parallel import Engine
from xctrain.ranks import Ranks
from xctrain.saver import Saver
from xctrain.speed import Speed
from xctrain.spikes import SpikeWatch
from xctrain.state import Masked, TrainState


@dataclass(frozen=True)
class Run:
    """The parts of a run on one rank, without methods."""

    config: Config
    ranks: Ranks
    engine: Engine  # the model, its optimizer and its gradients, as shared over the ranks
    loader: Loader
    num_steps: int
    end: int  # positions in the whole run
    known_damage: frozenset[str]  # keys that a quarantine list names, which come until its epoch begins
    saver: Saver
    log: JsonLines | None  # on rank 0
    keys: JsonLines | None  # on every rank, with train.log_keys
    spikes: SpikeWatch
    world: dict[str, Any]
    model_id: str
    stop_asked: Callable[[], bool]
    evaluate: Callable[[TrainState], Scores | None] | None  # none if a signal asked to stop meanwhile
    sample: Callable[[TrainState], bool] | None  # captions a few pictures; false if a signal asked to stop meanwhile
    utilisation: Callable[[Work, int, float], float | None]  # see speed.utilisation
    show: Callable[[TrainState, "StepMetrics", Speed], None]


@dataclass(frozen=True)
class StepMetrics:
    """What one step gave. The same on every rank."""

    loss: float  # mean over the target tokens of the global batch
    grad_norm: float
    lr: float
    num_targets: int
    overflows: int = 0  # times the batch ran again at a lower fp16 scale
    stop: bool = False  # some rank was asked to stop
    save: bool = False  # so much time has passed that a checkpoint is due
    saved: bool = False  # the save that was under way has ended


@dataclass(frozen=True)
class Consumed:
    """What a global batch held, over all ranks."""

    num_targets: int
    digest: int  # sum of slot_digest over the slots with loss
    samples: int  # slots without the surplus ones
    masked: tuple[Masked, ...]
    masked_on: tuple[int, ...] = ()  # the rank of each masked slot
    work: Work = field(default_factory=Work)
    data_wait_s: float = 0.0  # mean over the ranks


@dataclass(frozen=True)
class OutOfMemory:
    """A rank had no memory for a micro-batch, and which sample of it is the largest. The same on every rank."""

    rank: int
    key: str
    tokens: int
