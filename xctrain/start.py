"""From a config to the parts of a run: data, model, optimizer, and the state to go on from."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shards.hashing import mix64
from shards.joined import SampleReader
from shards.stream import Stream, accumulation
from xctrain import resume
from xctrain.config import Config
from xctrain.data import Data, Dataset, open_data
from xctrain.errors import RunError
from xctrain.heldout import HeldOut, datasets_to_score, scored_at
from xctrain.largest import Length, checked_largest
from xctrain.reading import Reading
from xctrain.runfolder import require_run_folder
from xctrain.spikes import SpikeWatch
from xctrain.startlog import keys_from, losses_before, open_logs
from xctrain.state import TrainState
from xctrain.trackers import require_trackers
from xctrain.world import describe_world, say_differences

if TYPE_CHECKING:
    from xctrain.loader import Loader
    from xctrain.models import Family
    from xctrain.parallel import Engine
    from xctrain.ranks import Ranks
    from xctrain.run import Run, StepMetrics
    from xctrain.saver import Saver
    from xctrain.speed import Speed


@dataclass(frozen=True)
class Plan:
    """What is known before anything heavy is loaded. The same on every rank."""

    data: Data
    held_out: tuple[Dataset, ...]  # what is scored on the way
    stream: Stream
    num_steps: int
    state: TrainState
    point: resume.ResumePoint | None
    notes: tuple[str, ...]

    @property
    def reader(self) -> SampleReader:
        """The samples of all datasets."""
        return self.data.reader


def make_plan(config: Config, world_size: int) -> Plan:
    """Check data, batch and resume against the config, in the first second.

    Raises:
        ConfigError: no dataset, no such split, a global batch that the processes cannot share.
        FormatError: a shard is not what the manifest says.
        ResumeError: the config forbids this resume.
    """
    require_run_folder(config.run.dir)
    require_trackers(config)
    data = open_data(config.data)
    scored = datasets_to_score(config)
    accumulation(config.train.global_batch, world_size, config.train.micro_batch)
    point, notes = resume.find(config, data)
    require_whole([*data.datasets, *scored], full=config.data.verify == "full")
    state = point.state if point else TrainState()
    segments = resume.next_segments(config, state, data)
    notes += resume.describe_data(state, segments) if point else []
    order = data.order(segments)
    num_steps, end = resume.run_length(config, segments, order)
    begun = [s for s in state.segments if not data.missing(s)]  # one that lay ahead may be of data that are no more
    if begun and config.train.num_steps is None and segments[-1].parts != state.segments[-1].parts:
        before, _ = resume.run_length(config, tuple(begun), data.order(begun))
        notes.append(f"{num_steps} steps in all instead of {before}; the learning rate follows")
    stream = Stream(order, config.train.global_batch, end)
    state = replace(state, segments=segments, keys_from=keys_from(config, state, point))
    return Plan(data, tuple(scored), stream, num_steps, state, point, tuple(notes))


def require_whole(datasets: list[Dataset], *, full: bool) -> None:
    """Compare every shard with the manifest before a model is loaded: sizes and counts, or every byte.

    What a quarantine list leaves out may be damaged.
    """
    for dataset in datasets:
        dataset.reader.require_whole()
    if not full:
        return
    from shards.mirror import RemoteShards
    from shards.verify import verify

    for dataset in {d.reader.folder: d for d in datasets}.values():
        cache, place = dataset.reader.cache, dataset.place
        found = verify(dataset.reader.folder) if cache is None else RemoteShards(cache.location).verify()
        if findings := dataset.quarantine.unexpected(found):
            raise RunError(
                f"{place}: {len(findings)} findings, first: {findings[0]}; see `python -m shards verify {place}` and build "
                "again",
                path=dataset.reader.folder,
            )


def is_complete(config: Config, plan: Plan) -> bool:
    """Whether nothing is left to train, or to score."""
    if plan.state.samples_consumed != plan.stream.end:
        return False
    scored = scored_at(config, plan.state) if config.eval.every is not None else None
    return scored is None or all(dataset.source.name in scored for dataset in plan.held_out)


def open_model(config: Config, ranks: "Ranks", plan: Plan) -> "tuple[Family, str]":
    """The base model in its family, built first if it is the tiny one, and what names it."""
    from xctrain import basemodel

    ranks.agree(lambda: basemodel.ensure_base_model(config, plan.data) if ranks.is_main else None)

    def identified() -> str:
        identity = basemodel.model_id(config)
        if plan.point:
            resume.require_model(config, plan.point, identity)
        return identity

    identity = ranks.agree(identified)
    return ranks.agree(lambda: basemodel.open_family(config)), identity


def start(
    config: Config,
    ranks: "Ranks",
    plan: Plan,
    family: "Family",
    model_id: str,
    *,
    reading: Reading | None = None,
    stop_asked: Callable[[], bool],
    show: "Callable[[TrainState, StepMetrics, Speed], None]",
) -> "Run":
    """Build every part of the run and bring it to the state it goes on from.

    Order matters: the dry passes move gradients and generators, so what a checkpoint holds comes after them, and the
    generators come last of all.
    """
    import torch

    from xctrain.drystep import dry_step, first_caption
    from xctrain.firstbatch import write_first_batch
    from xctrain.loader import worker_notes
    from xctrain.optim import warmup_notes
    from xctrain.run import Run
    from xctrain.speed import utilisation

    if config.train.deterministic:  # not called with False: it imports torch's compiler, which takes a second
        torch.use_deterministic_algorithms(True)
    found = ranks.agree(lambda: checked_largest(config, plan.data, family, model_id) if ranks.is_main else None)
    largest: list[Length] = ranks.from_main(found)
    loader = make_loader(config, ranks, plan, family, reading or Reading(plan.reader))
    if ranks.is_main and (first := loader.first_batch(plan.state.samples_consumed)):
        write_first_batch(config.run.dir, family, first)
    engine = dry_step(config, ranks, family, largest, plan.reader)
    if ranks.is_main:
        say_model(config, family)
    if plan.point:
        load_checkpoint(plan.point.path, ranks, engine)
    world = describe_world(config, ranks)
    if ranks.is_main and plan.point:
        say_differences(plan.point, world)
    if not (config.eval.every and plan.state.samples_consumed == 0):  # which is about to write all captions
        first_caption(config, ranks, engine, family, largest[0], plan.reader)
    busy = worker_notes(config.data.workers, ranks.local_world_size)
    notes = (*plan.notes, *busy, *warmup_notes(plan.num_steps, config.optim))
    log, keys = open_logs(config, ranks, plan.state, plan.point, notes, world)
    saver = make_saver(config, ranks, plan, family)
    restore_generators(config, ranks, plan)
    held_out = HeldOut(config, ranks, engine, family, plan.held_out, plan.state.samples_consumed, log, stop_asked)
    assert plan.stream.end is not None
    return Run(
        config=config,
        ranks=ranks,
        engine=engine,
        loader=loader,
        num_steps=plan.num_steps,
        end=plan.stream.end,
        known_damage=plan.data.known_damage,
        saver=saver,
        log=log,
        keys=keys,
        spikes=SpikeWatch(losses_before(config) if log else ()),
        world=world,
        model_id=model_id,
        stop_asked=stop_asked,
        evaluate=held_out.score if config.eval.every is not None else None,
        sample=held_out.sample if config.watch.captions_every is not None else None,
        utilisation=utilisation(config, family.shape(), ranks.world_size),
        show=show,
    )


def make_loader(config: Config, ranks: "Ranks", plan: Plan, family: "Family", reading: Reading) -> "Loader":
    """The loader of this rank."""
    from xctrain.decode import Decoder
    from xctrain.loader import Loader, SlotRows, num_workers

    decoder = Decoder(config.model.decode, family.collator.least_size if config.model.decode == "scaled" else None)
    return Loader(
        rows=SlotRows(reading.reader, config.data.captions, config.train.seed, decoder=decoder),
        collator=family.collator,
        stream=plan.stream,
        rank=ranks.rank,
        world_size=ranks.world_size,
        micro_batch=config.train.micro_batch,
        num_workers=num_workers(config.data.workers, ranks.local_world_size),
        prefetch=config.data.prefetch,
        # Where fragments are fetched, a wait for them has its own limit, which starts again with each that comes.
        timeout_s=config.train.timeout_s if reading.cache else config.data.read_timeout_s,
        delivered=reading.delivered if reading.cache else None,
    )


def say_model(config: Config, family: "Family") -> None:
    """Say what trains, in which types, and how it is computed."""
    from xctrain.models.parameters import parameter_table, types_and_attention

    print(parameter_table(family.module), file=sys.stderr)
    how = f"computed in {config.train.precision}, shared by {config.parallel.mode}"
    print(f"{types_and_attention(family.module)}, {how}", file=sys.stderr)


def load_checkpoint(path: Path, ranks: "Ranks", engine: "Engine") -> None:
    """Weights, optimizer and loss scale as they were at the checkpoint; the generators come later."""
    from xctrain import checkpoint

    engine.load(path)
    if ranks.accelerator.scaler:
        ranks.accelerator.scaler.load_state_dict(checkpoint.read_json(path, "scaler.json"))


def make_saver(config: Config, ranks: "Ranks", plan: Plan, family: "Family") -> "Saver":
    """What writes the checkpoints and sends them; begins with what an earlier start could not send."""
    from xctrain import push, tensors
    from xctrain.saver import Saver

    checkpoints = resume.checkpoints_of(config)
    saver = Saver(
        checkpoints,
        asynchronous=config.checkpoint.asynchronous,
        every_s=config.train.save_every_minutes and 60 * config.train.save_every_minutes,
        pusher=push.make_pusher(config, checkpoints) if ranks.is_main else None,
    )
    if saver.pusher and plan.point:
        state = plan.state
        saver.pusher.offer(state.step, state.samples_consumed, push.logs_of(config.run.dir), saved=False)
    if ranks.is_main:
        means = ("exp_avg", "exp_avg_sq") if config.optim.name.endswith("adamw") else ()
        saver.prepare(tensors.shapes(family.module, means))
    return saver


def restore_generators(config: Config, ranks: "Ranks", plan: Plan) -> None:
    """Generators as they were at the checkpoint; on another number of ranks, new ones from (seed, position, rank)."""
    from xctrain import checkpoint, rng

    saved = checkpoint.read_json(plan.point.path, "rng.json")["ranks"] if plan.point else []
    if len(saved) == ranks.world_size:
        rng.restore(saved[ranks.rank])
    else:
        rng.seed_all(mix64(config.train.seed, plan.state.samples_consumed, ranks.rank))
