"""Scoring and captioning held-out pictures while a run trains."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xctrain.config import Config
from xctrain.data import Dataset, held_out
from xctrain.errors import ConfigError
from xctrain.log import METRICS, SAMPLES, JsonLines, read_lines
from xctrain.state import TrainState

if TYPE_CHECKING:
    from xctrain.best import Scores
    from xctrain.models import Family
    from xctrain.parallel import Engine
    from xctrain.ranks import Ranks


def datasets_to_score(config: Config) -> list[Dataset]:
    """What is captioned on the way; nothing unless the config asks for it.

    Raises:
        ConfigError: there is no such split.
    """
    if config.eval.every is None and config.watch.captions_every is None:
        return []
    try:
        return held_out(config.data, config.eval.split, config.eval.source)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; set eval.split to one of those, or eval.every=null and watch.captions_every=null to caption none"
        ) from None


def scored_at(config: Config, state: TrainState) -> "dict[str, Scores]":
    """What the log has of evaluations at a state, by dataset."""
    found = [e for e in read_lines(config.run.dir / METRICS) if e["event"] == "eval" and not e.get("blank")]
    about = ("event", "step", "samples_consumed", "time")
    return {
        e.get("source", ""): {name: value for name, value in e.items() if name not in about}
        for e in found
        if e["samples_consumed"] == state.samples_consumed
    }


@dataclass(frozen=True)
class HeldOut:
    """Held-out pictures, which the run captions on the way."""

    config: Config
    ranks: "Ranks"
    engine: "Engine"
    family: "Family"
    datasets: tuple[Dataset, ...]  # of several the first counts
    start_n: int  # samples consumed at the start
    log: JsonLines | None  # on rank 0
    stop_asked: Callable[[], bool]

    def score(self, state: TrainState) -> "Scores | None":
        """Caption and score the split; none if a signal asked to stop meanwhile."""
        from tqdm import tqdm

        from xctrain.evaluate import as_event, as_line, evaluate, record

        ranks = self.ranks
        known: dict[str, Scores] = {}
        if state.samples_consumed == self.start_n:  # an earlier start may have scored it, in part too
            known = ranks.from_main(scored_at(self.config, state) if ranks.is_main else None)
        left = [dataset for dataset in self.datasets if dataset.source.name not in known]
        with self.engine.whole() if left else nullcontext():
            for dataset in left:
                result = evaluate(self.family, dataset, self.config.eval, ranks, self.stop_asked)
                if result is None:
                    return None
                if self.log:
                    record(result, self.config.run.dir, state, self.log, first=dataset is self.datasets[0])
                    tqdm.write(as_line(result, state.step), file=sys.stderr)  # above the bar, if there is one
                known[dataset.source.name] = as_event(result)
        return known[self.datasets[0].source.name]

    def sample(self, state: TrainState) -> bool:
        """Caption a few pictures and draw them on a page; false if a signal asked to stop meanwhile."""
        from xctrain.evaluate import evaluate, write_captions
        from xctrain.gallery import write_samples

        folder, num_captions = self.config.run.dir, self.config.watch.num_captions
        path = folder / SAMPLES / f"step-{state.step:08d}.jsonl"
        if self.ranks.from_main(path.exists()):  # an earlier start did it
            return True
        few = self.config.eval.model_copy(update={"num_images": num_captions, "blank": False})
        with self.engine.whole():
            result = evaluate(self.family, self.datasets[0], few, self.ranks, self.stop_asked)
        if result is None:
            return False
        if self.log:
            write_captions(path, result.captions)
            write_samples(folder, self.datasets[0].pictures(num_captions))
            self.log.write(event="samples", step=state.step, samples_consumed=state.samples_consumed, path=path.name)
        return True
