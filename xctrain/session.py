"""What the commands do once torch is loaded: train a rank, score a split, caption pictures, write a report."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shards.errors import UserError
from shards.places import require_file
from xctrain import bring, checkpoint, push, resume
from xctrain.basemodel import ensure_base_model, open_family
from xctrain.config import Config
from xctrain.data import held_out, open_data
from xctrain.errors import ConfigError, TrainError
from xctrain.log import JsonLines, require_whole_log
from xctrain.phase import enter
from xctrain.processes import EXIT_STOPPED, StopRequest
from xctrain.reading import begin_reading
from xctrain.runfolder import chosen_checkpoint, config_of, lock, require_one_folder
from xctrain.start import Plan, make_plan, open_model, start
from xctrain.state import TrainState
from xctrain.trackers import Trackers

if TYPE_CHECKING:
    from xctrain.models import Family
    from xctrain.ranks import Ranks

_PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")

OpenModel = Callable[[Config, "Ranks", Plan], "tuple[Family, str]"]


def train_rank(config: Config, open_model: OpenModel = open_model) -> int:
    """Train as one rank of the processes that the environment describes.

    Ends the process itself, with the exit code: after a success gloo may abort in its own clean-up at exit.
    """
    stop = StopRequest()
    from xctrain.loader import lost_worker
    from xctrain.loop import log_pushes, train
    from xctrain.progress import Progress
    from xctrain.ranks import join, lost_peer
    from xctrain.speed import Speedometer

    enter("meeting the other ranks")
    ranks = join(config)
    try:
        enter("reading shards and checkpoints")
        held = ranks.agree(lambda: lock(config) if ranks.is_main else None)
        plan = _plan_together(config, ranks)
        start_n = plan.state.samples_consumed
        reading = ranks.agree(lambda: begin_reading(config, ranks, plan.data, plan.stream, start_n))
        enter("loading the model")
        family, model_id = open_model(config, ranks, plan)
        with Progress(ranks.is_main) as progress, Trackers(config, shown=ranks.is_main) as trackers:
            run = start(
                config,
                ranks,
                plan,
                family,
                model_id,
                reading=reading,
                stop_asked=lambda: bool(stop),
                show=progress.show,
            )
            trackers.begin()
            progress.begin(run.num_steps, plan.state, Speedometer(run.loader.num_workers, ranks.local_world_size))
            state, stopped = train(run, plan.state)
            failed = trackers.end()
        ranks.barrier()
        ranks.close()
        unpushed = None
        if run.saver.pusher:
            enter("sending checkpoints")
            unpushed = run.saver.pusher.finish()
            log_pushes(run)
        if run.log:
            _log_end(run.log, state, failed, stopped=stopped)
            _say_end(config, state, stopped=stopped)
        del held
        if unpushed and not stopped:
            push.refuse_unpushed(config, unpushed)
    except TrainError as error:
        if error.on_every_rank and not ranks.is_main:
            _leave(error.exit_code)  # rank 0 prints it
        raise
    except RuntimeError as error:
        if how := lost_worker(error):
            raise TrainError(
                f"rank {ranks.rank}: {how}; the system does that where memory runs out, so lower data.workers or "
                "data.prefetch if it comes again; start again to go on from the newest checkpoint"
            ) from error
        if (how := lost_peer(error)) is None:
            raise
        raise TrainError(
            f"rank {ranks.rank}: lost another rank ({how}); what ended that one is said by itself or its launcher; "
            "start again to go on from the newest checkpoint"
        ) from error
    return _leave(EXIT_STOPPED if stopped else 0)


def _plan_together(config: Config, ranks: "Ranks") -> Plan:
    """Where the run goes on from, the same for every rank, once the folder is locked and a run at an address is here."""
    for note in ranks.agree(lambda: bring.fetch_run(config) if ranks.is_main else []):
        print(note, file=sys.stderr)
    ranks.agree(lambda: require_whole_log(config.run.dir) if ranks.is_main else None)
    ranks.agree(lambda: resume.checkpoints_of(config).finish_save() if ranks.is_main else None)
    plan = ranks.agree(lambda: make_plan(config, ranks.world_size))
    ranks.agree(lambda: push.claim(config) if ranks.is_main else None)
    require_one_folder(config, ranks, plan.state)
    return plan


def _log_end(log: JsonLines, state: TrainState, failed: Sequence[dict[str, Any]], *, stopped: bool) -> None:
    for found in failed:
        log.write(event="tracker", step=state.step, samples_consumed=state.samples_consumed, **found)
    reason = "stopped" if stopped else "done"
    log.write(event="stop", step=state.step, samples_consumed=state.samples_consumed, reason=reason)
    log.close()


def _say_end(config: Config, state: TrainState, *, stopped: bool) -> None:
    text = "stopped after saving step {}; start again to go on" if stopped else "done: step {}"
    if not state.step:
        text = "stopped at step {}, nothing was to be saved; start again to go on"
    masked = f", {len(state.masked)} of them masked" if state.masked else ""
    print(f"{text.format(state.step)}, {state.samples_consumed} samples{masked}, {config.run.dir}", file=sys.stderr)


def _leave(code: int) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def trained_family(config: Config, which: str) -> tuple["Family", Path | None]:
    """The model as a checkpoint has it: ``newest``, ``best``, ``base`` for the untrained one, or a checkpoint's path."""
    if which == "base":
        return open_family(config), None
    from xctrain import tensors

    # Weights before the model, which takes longer: a run that is training may remove them meanwhile.
    path, saved = checkpoint.read_chosen(
        lambda: chosen_checkpoint(config.run.dir, which, "eval.checkpoint"), tensors.read_saved
    )
    family = open_family(config)
    tensors.load_weights(path, family.module, every_trainable=False, saved=saved)
    return family, path


def evaluate_rank(config: Config, *, as_json: bool, out: Path | None) -> int:
    """Score ``eval.split`` as one rank of the processes that the environment describes; exit code."""
    from xctrain.evaluate import as_event, evaluate, write_captions
    from xctrain.ranks import join

    datasets = held_out(config.data, config.eval.split, config.eval.source)
    if config.eval.checkpoint == "newest" and not config.run.dir.is_dir():
        raise ConfigError(f"run.dir is {config.run.dir}, there is no such folder; train first, or give another run.dir")
    ranks = join(config)
    ranks.agree(lambda: require_file(out, "--out", parents=True) if out and ranks.is_main else None)
    ranks.agree(lambda: ensure_base_model(config, open_data(config.data)) if ranks.is_main else None)
    which = config.eval.checkpoint
    if ranks.world_size > 1 and which in ("newest", "best"):  # the same on every rank, though a run may be saving
        which = str(
            ranks.from_main(
                ranks.agree(
                    lambda: chosen_checkpoint(config.run.dir, which, "eval.checkpoint") if ranks.is_main else None
                )
            )
        )
    family, path = ranks.agree(lambda: trained_family(config, which))
    family.module.to(ranks.accelerator.device)
    for number, dataset in enumerate(datasets):
        result = evaluate(family, dataset, config.eval, ranks)
        assert result, "nothing here asks it to stop"
        if ranks.is_main:
            about = {"checkpoint": path.name if path else "base", "blank": config.eval.blank}
            event: dict[str, Any] = {**about, **as_event(result)}
            if out:
                named = out.with_name(f"{result.source}-{out.name}") if number else out
                write_captions(named, result.captions)
            _print_scores(event, as_json=as_json)
    ranks.close()
    return 0


def _print_scores(event: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(event))
        return
    warnings = event.pop("warnings")
    event["pictures"] = "gray, for comparison" if event.pop("blank") else "as they are"
    for name, value in event.items():
        print(f"{name:>13}  {f'{value:.4f}' if isinstance(value, float) else value}")
    for warning in warnings:
        print(f"warning: {warning}")


def caption_images(run_dir: Path, paths: Sequence[Path], *, as_json: bool, out: Path | None) -> int:
    """Caption pictures of the user's own with the newest checkpoint; exit code 1 if one could not be read."""
    config = config_of(run_dir)
    files = list(_picture_files(paths))
    if out is not None:
        require_file(out, "--out")
    family, _ = trained_family(config, "newest")
    _to_best_device(family)
    lines, failed = [], 0
    for path, image, error in _opened(files):
        if image is None:
            failed += 1
            others = "; the others go on" if len(files) > 1 else ""
            print(f"error: {path}: cannot be read as a picture: {error}{others}", file=sys.stderr)
            continue
        [text] = family.generate([image], config.eval.max_new_tokens)
        line = json.dumps({"file": str(path), "caption": text}, ensure_ascii=False) if as_json else f"{path}: {text}"
        lines.append(line)
        if out is None:
            print(line, flush=True)
    if out is not None:
        from shards.atomic import write_file

        write_file(out, "".join(f"{line}\n" for line in lines).encode())
    return 1 if failed else 0


def _picture_files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix.lower() in _PICTURES and p.is_file())
            if not found:
                raise ConfigError(f"{path}: holds no picture ({', '.join(_PICTURES)})", path=path)
            yield from found
        elif path.is_file():
            yield path
        else:
            raise ConfigError(f"{path}: there is no such file or folder; give pictures or folders of them", path=path)


def _opened(files: Sequence[Path]) -> Iterator[tuple[Path, Any, Exception | None]]:
    from PIL import Image, ImageOps

    for path in files:
        try:
            with Image.open(path) as image:
                yield path, ImageOps.exif_transpose(image).convert("RGB"), None
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            yield path, None, error


def _to_best_device(family: "Family") -> None:
    import torch

    if torch.cuda.is_available():
        family.module.to("cuda")


def report_runs(run_dirs: Sequence[Path], out: Path | None, shards: Sequence[str] = ()) -> Path:
    """Write the HTML page of a run, or of several that it compares, with audits and pictures where the data are there.

    Raises:
        ConfigError: one is no run folder, or ``out`` cannot be written.
    """
    from xctrain.compare import write_comparison
    from xctrain.history import History
    from xctrain.report import write_report

    configs = [config_of(run_dir) for run_dir in run_dirs]
    default = run_dirs[0] / "report.html" if len(run_dirs) == 1 else Path("comparison.html")
    out = out or default
    require_file(out, "--out")
    if len({run_dir.resolve() for run_dir in run_dirs}) < len(run_dirs):
        raise ConfigError(f"{run_dirs[0]}: the same run twice; give each run once")
    for doubt in (doubt for run_dir in run_dirs for doubt in History.read(run_dir).doubts()):
        print(doubt, file=sys.stderr)
    audits = [_audited(run_dir, shards) for run_dir in run_dirs]
    images = _gallery(configs[0], shards)
    if len(run_dirs) == 1:
        return write_report(run_dirs[0], out, audit=audits[0], images=images)
    return write_comparison(run_dirs, out, audits, images)


def _audited(run_dir: Path, shards: Sequence[str]) -> dict[str, Any] | None:
    from xctrain import audit, trained

    try:
        result: dict[str, Any] = dict(audit.audit(trained.open_run(run_dir, shards)).to_json())
    except UserError as error:
        print(f"no audit in the report: {error}", file=sys.stderr)
        return None
    for finding in result["findings"]:
        print(f"audit: {finding}", file=sys.stderr)
    return result


def _gallery(config: Config, shards: Sequence[str]) -> dict[str, bytes]:
    from xctrain.gallery import NUM_PICTURES
    from xctrain.trained import where_shards_lie

    try:
        found = held_out(where_shards_lie(config, shards).data, config.eval.split, config.eval.source)
    except UserError as error:
        print(f"no pictures in the report: {error}", file=sys.stderr)
        return {}
    return found[0].pictures(NUM_PICTURES)
