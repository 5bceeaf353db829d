"""From a config to the parts of a run: data, model, optimizer, and the state to go on from."""

import errno
import fcntl
import json
import os
import platform
import socket
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shards.atomic import write_file
from shards.hashing import mix64
from shards.joined import SampleReader
from shards.manifest import NAME as MANIFEST
from shards.remote import is_remote
from shards.stream import Stream, accumulation
from xctrain import resume
from xctrain.config import Config
from xctrain.data import Data, Dataset, held_out, open_data
from xctrain.errors import ConfigError, RunError, TrainError
from xctrain.largest import Length, checked_largest
from xctrain.log import CAPTIONS, METRICS, SAMPLES, JsonLines, cut_back, keys_name, read_lines
from xctrain.reading import Reading
from xctrain.spikes import WINDOW, SpikeWatch
from xctrain.state import TrainState
from xctrain.trackers import require_trackers

if TYPE_CHECKING:
    from xctrain.best import Scores
    from xctrain.loader import Loader
    from xctrain.models import Family
    from xctrain.parallel import Engine
    from xctrain.ranks import Ranks
    from xctrain.run import Run, StepMetrics
    from xctrain.speed import Speed

_LOCK = ".lock"


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


def require_run_folder(folder: Path) -> None:
    """Refuse a run.dir that is a file, or holds a dataset, whose report the run's would replace.

    Raises:
        ConfigError: it is one of them; nothing was written.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run.dir is {folder}, which is no folder; choose another", path=folder)
    if (folder / MANIFEST).exists():
        raise ConfigError(
            f"run.dir is {folder}, which is a shard folder (it holds {MANIFEST}); choose another", path=folder
        )


def make_run_folder(folder: Path) -> None:
    """Make it if it is not there.

    Raises:
        ConfigError: it cannot be made, or not written to; a full disk stays an OSError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _LOCK).open("a").close()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        raise ConfigError(
            f"run.dir is {folder}, which cannot be written to: {error.strerror}; choose another, or mend its permissions",
            path=folder,
        ) from None


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


def keys_from(config: Config, state: TrainState, point: resume.ResumePoint | None) -> int | None:
    """Position from which every trained key is in this run's logs; None if they are not logged."""
    if not config.train.log_keys:
        return None
    own = point is None or resume.is_own(config, point.path)  # another run's checkpoint comes without its logs
    return state.keys_from if own and state.keys_from is not None else state.samples_consumed


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


def lock(config: Config) -> Any:
    """Hold the run folder for this process; the kernel lets go of it when the process ends, however that happens.

    Raises:
        RunError: another process trains in it.
    """
    make_run_folder(config.run.dir)
    file = (config.run.dir / _LOCK).open("a+")
    for left in reversed(range(50)):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not left:
                file.seek(0)
                raise RunError(
                    f"{config.run.dir}: process {file.read().strip() or 'unknown'} is training in it; wait for it, end it, "
                    "or choose another run.dir",
                    path=config.run.dir,
                ) from None
            time.sleep(0.1)  # a run that was just killed may still be going away
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    os.fsync(file.fileno())
    return file


def require_one_folder(config: Config, ranks: "Ranks", plan: Plan) -> None:
    """Refuse ranks that do not look at one run folder, as on nodes that have a disk each.

    Raises:
        TrainError: on every rank; names two nodes and what they see.
    """
    path = config.run.dir / _LOCK
    held = (path.read_text().strip() if path.exists() else "") or "none"
    data = plan.state.segments[-1]
    dataset = f"{data.manifest_id[:16]}{f' without list {data.quarantine_id[:16]}' if data.quarantine_id else ''}"
    sights = ranks.gather([(socket.gethostname(), held, plan.state.step, dataset)])
    for rank, sight in enumerate(sights):
        if sight[1:] != sights[0][1:]:
            seen = [f"rank {r} on {h} sees lock {k}, step {s}, dataset {d}" for r, (h, k, s, d) in enumerate(sights)]
            raise TrainError(
                f"{config.run.dir}: is not the same folder for all: {seen[0]}; {seen[rank]}; give a run.dir and data.shards on "
                "a file system that the nodes share",
                on_every_rank=True,
            )


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

    from xctrain import checkpoint, push, tensors
    from xctrain.drystep import dry_step, first_caption
    from xctrain.firstbatch import write_first_batch
    from xctrain.models.parameters import parameter_table, types_and_attention
    from xctrain.run import Run
    from xctrain.saver import Saver
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
        print(parameter_table(family.module), file=sys.stderr)
        how = f"computed in {config.train.precision}, shared by {config.parallel.mode}"
        print(f"{types_and_attention(family.module)}, {how}", file=sys.stderr)
    if plan.point:
        engine.load(plan.point.path)
        if ranks.accelerator.scaler:
            ranks.accelerator.scaler.load_state_dict(checkpoint.read_json(plan.point.path, "scaler.json"))
    world = describe_world(config, ranks)
    if ranks.is_main and plan.point:
        say_differences(plan.point, world)
    if not (config.eval.every and plan.state.samples_consumed == 0):  # which is about to write all captions
        first_caption(config, ranks, engine, family, largest[0], plan.reader)
    log, keys = open_logs(config, ranks, plan, world)
    checkpoints = resume.checkpoints_of(config)
    saver = Saver(
        checkpoints,
        asynchronous=config.checkpoint.asynchronous,
        every_s=config.train.save_every_minutes and 60 * config.train.save_every_minutes,
        pusher=push.make_pusher(config, checkpoints) if ranks.is_main else None,
    )
    if saver.pusher and plan.point:  # what an earlier start could not send
        state = plan.state
        saver.pusher.offer(state.step, state.samples_consumed, push.logs_of(config.run.dir), saved=False)
    if ranks.is_main:
        means = ("exp_avg", "exp_avg_sq") if config.optim.name.endswith("adamw") else ()
        saver.prepare(tensors.shapes(family.module, means))
    restore_generators(config, ranks, plan)
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
        evaluate=evaluator(config, ranks, engine, family, plan, log, stop_asked),
        sample=sampler(config, ranks, engine, family, plan, log, stop_asked),
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


def losses_before(config: Config) -> list[float]:
    """Losses of the last steps in the log."""
    events = deque((e for e in read_lines(config.run.dir / METRICS) if e["event"] == "step"), maxlen=WINDOW)
    return [event["loss"] for event in events]


def restore_generators(config: Config, ranks: "Ranks", plan: Plan) -> None:
    """Generators as they were at the checkpoint; on another number of ranks, new ones from (seed, position, rank)."""
    from xctrain import checkpoint, rng

    saved = checkpoint.read_json(plan.point.path, "rng.json")["ranks"] if plan.point else []
    if len(saved) == ranks.world_size:
        rng.restore(saved[ranks.rank])
    else:
        rng.seed_all(mix64(config.train.seed, plan.state.samples_consumed, ranks.rank))


def describe_world(config: Config, ranks: "Ranks") -> dict[str, Any]:
    """Where the run runs; goes into every checkpoint."""
    import torch

    return {
        "world_size": ranks.world_size,
        "threads": torch.get_num_threads(),
        "micro_batch": config.train.micro_batch,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "precision": config.train.precision,
        "versions": versions(),
    }


def say_differences(point: resume.ResumePoint, world: dict[str, Any]) -> None:
    """Say what may change the last bits of the numbers, though not the samples."""
    saved = point.position["world"]
    for name in ("world_size", "threads", "micro_batch", "device", "versions"):
        if saved[name] != world[name]:
            print(f"{point.path.name}: saved with {name} {saved[name]}, this start has {world[name]}", file=sys.stderr)


def versions() -> dict[str, str]:
    """Versions of what decides the numbers."""
    names = (
        "torch",
        "accelerate",
        "transformers",
        "peft",
        "bitsandbytes",
        "sentencepiece",
        "numpy",
        "Pillow",
        "xctrain",
    )
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def gpu_name() -> str | None:
    """The kind of GPU that this rank has, None without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def open_logs(
    config: Config, ranks: "Ranks", plan: Plan, world: dict[str, Any]
) -> tuple[JsonLines | None, JsonLines | None]:
    """Cut every log back to the state, note this start, and open the logs of this rank."""
    folder, state = config.run.dir, plan.state
    log = None
    if ranks.is_main:
        previous = previous_end(folder, state)
        # Checkpoints first: a kill in between must not leave one that the logs do not reach.
        gone = resume.checkpoints_of(config).go_back(state.step if plan.point else -1)
        notes = [*plan.notes, *gone]
        asked_for = config.train.resume not in ("auto", "never") and not is_remote(config.train.resume)
        run_id = None if gone and asked_for else logged_run_id(folder)
        cut_back(folder, state.samples_consumed if plan.point else -1)
        for path in [p for name in (CAPTIONS, SAMPLES) for p in (folder / name).glob("*step-*.jsonl")]:
            if int(path.stem.rpartition("step-")[2]) > state.step:
                path.unlink()
        write_file(folder / "config.yaml", config.to_yaml().encode())
        about = {"platform": platform.platform(), "cores": os.cpu_count(), "gpu": gpu_name()}
        environment = {**world, **about, "command": sys.argv, "started_in": str(Path.cwd())}
        write_file(folder / "environment.json", json.dumps(environment, indent=1).encode())
        log = JsonLines(folder / METRICS)
        log.write(
            event="start",
            step=state.step,
            samples_consumed=state.samples_consumed,
            time=time.time(),
            world_size=ranks.world_size,
            resumed_from=state.step if plan.point else None,
            source=str(plan.point.path.resolve()) if plan.point else None,
            **previous,
            run_id=run_id or uuid.uuid4().hex[:12],
            notes=notes,
        )
        for note in notes:
            print(note, file=sys.stderr)
    ranks.barrier()
    keys = JsonLines(folder / keys_name(ranks.rank)) if config.train.log_keys else None
    return log, keys


def logged_run_id(folder: Path) -> str | None:
    """What trackers know the run by: in the log, which goes wherever the run goes."""
    found = [
        line["run_id"] for line in read_lines(folder / METRICS) if line.get("event") == "start" and "run_id" in line
    ]
    return str(found[-1]) if found else None


def previous_end(folder: Path, state: TrainState) -> dict[str, Any]:
    """How the last start ended, and how many steps go back to the checkpoint with it; empty for a first start."""
    last: dict[str, Any] = {}
    last_step = 0
    for line in read_lines(folder / METRICS):
        last = line
        last_step = max(last_step, line.get("step", 0)) if line.get("event") != "start" else line.get("step", 0)
    if not last:
        return {"previous_end": None, "lost_steps": 0}
    end = last.get("reason", "stopped") if last.get("event") == "stop" else "killed"
    return {"previous_end": end, "lost_steps": max(0, last_step - state.step)}


def evaluator(
    config: Config,
    ranks: "Ranks",
    engine: "Engine",
    family: "Family",
    plan: Plan,
    log: JsonLines | None,
    stop_asked: Callable[[], bool],
) -> "Callable[[TrainState], Scores | None] | None":
    """What scores the held-out split during the run, if the config asks for it; of several datasets the first counts."""
    if config.eval.every is None:
        return None
    from xctrain.evaluate import as_event, evaluate, record

    def score(state: TrainState) -> "Scores | None":
        known: dict[str, Scores] = {}
        if state.samples_consumed == plan.state.samples_consumed:  # an earlier start may have scored it, in part too
            known = ranks.from_main(scored_at(config, state) if ranks.is_main else None)
        left = [dataset for dataset in plan.held_out if dataset.source.name not in known]
        with engine.whole() if left else nullcontext():
            for dataset in left:
                result = evaluate(family, dataset, config.eval, ranks, stop_asked)
                if result is None:
                    return None
                if log:
                    record(result, config.run.dir, state, log, first=dataset is plan.held_out[0])
                known[dataset.source.name] = as_event(result)
        return known[plan.held_out[0].source.name]

    return score


def scored_at(config: Config, state: TrainState) -> "dict[str, Scores]":
    """What the log has of evaluations at a state, by dataset."""
    found = [e for e in read_lines(config.run.dir / METRICS) if e["event"] == "eval" and not e.get("blank")]
    about = ("event", "step", "samples_consumed", "time")
    return {
        e.get("source", ""): {name: value for name, value in e.items() if name not in about}
        for e in found
        if e["samples_consumed"] == state.samples_consumed
    }


def is_complete(config: Config, plan: Plan) -> bool:
    """Whether nothing is left to train, or to score."""
    if plan.state.samples_consumed != plan.stream.end:
        return False
    scored = scored_at(config, plan.state) if config.eval.every is not None else None
    return scored is None or all(dataset.source.name in scored for dataset in plan.held_out)


def sampler(
    config: Config,
    ranks: "Ranks",
    engine: "Engine",
    family: "Family",
    plan: Plan,
    log: JsonLines | None,
    stop_asked: Callable[[], bool],
) -> Callable[[TrainState], bool] | None:
    """What captions a few held-out pictures during the run, if the config asks for it, and draws them on a page."""
    if config.watch.captions_every is None:
        return None
    from xctrain.evaluate import evaluate, write_captions
    from xctrain.gallery import write_samples

    dataset = plan.held_out[0]
    few = config.eval.model_copy(update={"num_images": config.watch.num_captions, "blank": False})

    def sample(state: TrainState) -> bool:
        path = config.run.dir / SAMPLES / f"step-{state.step:08d}.jsonl"
        if ranks.from_main(path.exists()):  # an earlier start did it
            return True
        with engine.whole():
            result = evaluate(family, dataset, few, ranks, stop_asked)
        if result is None:
            return False
        if log:
            write_captions(path, result.captions)
            write_samples(config.run.dir, dataset.pictures(config.watch.num_captions))
            log.write(event="samples", step=state.step, samples_consumed=state.samples_consumed, path=path.name)
        return True

    return sample
