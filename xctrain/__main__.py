"""Train, and look at runs: before, while and after they train."""

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias, get_args

from shards import cli

_Command: TypeAlias = Callable[[argparse.Namespace], int]
_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_EPILOG = "exit codes: 0 done, 1 failed, 2 wrong usage or config, 75 stopped by a signal after saving"


def main(argv: Sequence[str]) -> int:
    """Run one command; exit code."""
    arguments = cli.parse_with_settings(_parser(), argv)
    command: _Command = arguments.command
    return command(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m xctrain", description=__doc__, epilog=_EPILOG)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("--version", action=cli.ShowVersion)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_config_commands(commands)
    _add_run_commands(commands)
    _add_other_commands(commands)
    return parser


def _add(commands: _Commands, name: str, command: _Command, text: str) -> argparse.ArgumentParser:
    added = commands.add_parser(name, help=text, description=text, epilog=_EPILOG)
    added.set_defaults(command=command)
    return added


def _add_config(commands: _Commands, name: str, command: _Command, text: str) -> argparse.ArgumentParser:
    added = _add(commands, name, command, text)
    added.add_argument("config", type=Path, help="YAML file, see configs/")
    added.add_argument("overrides", nargs="*", metavar="section.field=value", help="settings on top of the file")
    return added


def _add_run(commands: _Commands, name: str, command: _Command, text: str) -> argparse.ArgumentParser:
    added = _add(commands, name, command, text)
    added.add_argument("run", type=Path, help="run folder")
    return added


def _add_shards(added: argparse.ArgumentParser) -> None:
    added.add_argument(
        "--shards",
        action="append",
        default=[],
        metavar="DIR",
        help="where the run's shards lie now, if moved; of a mix NAME=DIR, once for each",
    )


def _add_config_commands(commands: _Commands) -> None:
    _add_config(commands, "train", _train, "train one rank; starts under accelerate launch, torchrun and Slurm alike")
    launch = _add_config(commands, "launch", _launch, "train all ranks of this node, one process per GPU")
    launch.add_argument("--processes", type=int, required=True, help="number of processes on this node, one per GPU")
    launch.add_argument("--nodes", type=int, default=1, help="number of nodes, each with as many processes")
    launch.add_argument("--node-rank", type=int, default=0, metavar="N", help="which of the nodes this is, from 0")
    launch.add_argument("--master", metavar="HOST[:PORT]", help="name or address of node 0, where the others find it")
    launch.add_argument("--dry-run", action="store_true", help="check the config, and print the command of each node")
    plan = _add_config(
        commands, "plan", _plan, "say before anything is loaded what a run needs, and what it would refuse"
    )
    plan.add_argument(
        "--gpus", type=int, metavar="N", help="processes to plan for, one per GPU; those here if left out"
    )
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    scaling = _add_config(commands, "scaling", _scaling, "the same job on several numbers of GPUs, as one table")
    scaling.add_argument("--gpus", nargs="+", required=True, metavar="N", help="numbers of processes")
    scaling.add_argument("--modes", nargs="+", default=["ddp", "zero2"], metavar="MODE", help="values of parallel.mode")
    scaling.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of runs and table, run.dir-scaling unless given"
    )
    evaluate = _add_config(
        commands, "evaluate", _evaluate, "caption and score a split with the run's newest checkpoint"
    )
    evaluate.add_argument("--json", action="store_true", help="print the scores as JSON")
    evaluate.add_argument("--out", type=Path, help="write the captions there, one JSON line an image")


def _add_run_commands(commands: _Commands) -> None:
    audit = _add_run(commands, "audit", _audit, "prove that a run trained on each sample of its order exactly once")
    _add_shards(audit)
    audit.add_argument("--json", action="store_true", help="print the audit as JSON")
    batch = _add_run(commands, "batch", _batch, "show the samples of a step, past or future")
    _add_shards(batch)
    which = batch.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=int, help="step, counted from 1")
    which.add_argument("--position", type=int, metavar="N", help="a position of the batch, which may have been skipped")
    batch.add_argument("--json", action="store_true", help="print the samples as JSON")
    batch.add_argument("--out", type=Path, metavar="FILE.html", help="draw the samples with their captions on one page")
    caption = _add_run(commands, "caption", _caption, "caption your own pictures")
    caption.add_argument("images", nargs="+", type=Path, metavar="IMAGE", help="picture files or folders of them")
    caption.add_argument("--json", action="store_true", help="one JSON line a picture")
    caption.add_argument("--out", type=Path, help="write to this file instead of the screen")
    export = _add_run(
        commands, "export", _export, "write a checkpoint as a model folder, its adapter merged into the base"
    )
    export.add_argument("out", type=Path, metavar="OUT", help="new folder, which the Hugging Face Auto classes load")
    export.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="checkpoint or best, the run's newest unless given"
    )
    export.add_argument("--base", type=Path, metavar="DIR", help="where the base model lies now, if it was moved")
    export.add_argument("--image", type=Path, help="picture to compare on, the first sample of the run unless given")
    export.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="type of the weights; as model.dtype"
    )
    export.add_argument("--json", action="store_true", help="print what was done as JSON")


def _add_other_commands(commands: _Commands) -> None:
    report = _add(commands, "report", _report, "make a page of a run, or one that compares several")
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folder")
    _add_shards(report)
    report.add_argument(
        "--out", type=Path, help="file to write; RUN/report.html unless given, of several runs comparison.html here"
    )
    doctor = _add(commands, "doctor", _doctor, "test this machine, with one next step for each finding")
    doctor.add_argument(
        "folder", type=Path, nargs="?", default=Path(), metavar="DIR", help="where runs will lie, here unless given"
    )
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")


def _train(arguments: argparse.Namespace) -> int:
    from shards.settings import load_settings
    from xctrain.config import Config

    config = load_settings(Config, arguments.config, arguments.overrides)
    from xctrain.session import train_rank

    return train_rank(config)


def _launch(arguments: argparse.Namespace) -> int:
    from shards.settings import load_settings
    from xctrain import bring, push
    from xctrain.config import Config
    from xctrain.errors import ConfigError
    from xctrain.launch import LOGS, STALL_MARGIN_S, Nodes, launch, num_gpus
    from xctrain.runfolder import lock, make_run_folder
    from xctrain.start import is_complete, make_plan

    if arguments.processes < 1:
        raise ConfigError(f"--processes is {arguments.processes}, expected 1 or more")
    nodes = Nodes.of(arguments.nodes, arguments.node_rank, arguments.master)
    world_size = arguments.processes * nodes.count
    config = load_settings(Config, arguments.config, arguments.overrides)
    # Refused here, once, rather than by every rank; a run that is at an address is brought here by the first of them.
    plan = make_plan(config, world_size) if bring.source(config) is None else None
    if plan and is_complete(config, plan):
        length = "train.epochs" if config.train.num_steps is None else "train.num_steps"
        print(
            f"{config.run.dir}: is complete: step {plan.state.step}, {plan.state.samples_consumed} samples; to train "
            f"longer, raise {length} and accept that with train.resume_with={length}",
            file=sys.stderr,
        )
        if config.checkpoint.push:
            with lock(config):
                push.push_rest(config)
        return 0
    what = [str(arguments.config), *arguments.overrides]
    if arguments.dry_run:
        for rank in range(nodes.count):
            options = ["--processes", str(arguments.processes), *nodes.arguments(rank)]
            print(shlex.join(["python", "-m", "xctrain", "launch", *what, *options]))
        return 0
    gpus = num_gpus()
    if gpus == 0:
        print(f"no GPU found: {arguments.processes} CPU processes", file=sys.stderr)
    elif gpus < arguments.processes:
        raise ConfigError(f"--processes is {arguments.processes}, this machine has {gpus} GPUs; ask for at most {gpus}")
    make_run_folder(config.run.dir)
    return launch(
        [sys.executable, "-m", "xctrain", "train", *what, f"train.processes={world_size}"],
        arguments.processes,
        nodes,
        logs=config.run.dir / LOGS,
        stall_s=config.train.timeout_s + STALL_MARGIN_S,
    )


def _plan(arguments: argparse.Namespace) -> int:
    from shards.settings import load_settings
    from xctrain.config import Config
    from xctrain.errors import ConfigError

    if arguments.gpus is not None and arguments.gpus < 1:
        raise ConfigError(f"--gpus is {arguments.gpus}, expected 1 or more")
    config = load_settings(Config, arguments.config, arguments.overrides)
    from xctrain.launch import num_gpus
    from xctrain.plan import as_text, make_plan

    plan = make_plan(config, num_gpus() if arguments.gpus is None else arguments.gpus)
    print(json.dumps(plan.to_json(), indent=1) if arguments.json else as_text(plan))
    return 2 if plan.refused else 0


def _scaling(arguments: argparse.Namespace) -> int:
    from shards.settings import load_settings
    from xctrain.config import Config
    from xctrain.errors import ConfigError
    from xctrain.trainconfig import ParallelConfig

    # Settings may stand behind an option that takes several values, too.
    given = [(name, text) for name in ("gpus", "modes") for text in getattr(arguments, name)]
    arguments.overrides += [text for _, text in given if "=" in text]
    counts = [text for name, text in given if name == "gpus" and "=" not in text]
    modes = [text for name, text in given if name == "modes" and "=" not in text]
    known = get_args(ParallelConfig.model_fields["mode"].annotation)
    if wrong := [text for text in counts if not text.isdecimal() or int(text) < 1]:
        raise ConfigError(f"--gpus is {wrong[0]}, expected whole numbers from 1 on")
    if wrong := [text for text in modes if text not in known]:
        raise ConfigError(f"--modes is {wrong[0]}, expected some of {', '.join(known)}")
    config = load_settings(Config, arguments.config, arguments.overrides)
    from xctrain.scaling import measure

    out = arguments.out or config.run.dir.with_name(f"{config.run.dir.name}-scaling")
    what = [str(arguments.config), *arguments.overrides]
    return measure(config, what, [int(text) for text in counts], modes, out)


def _evaluate(arguments: argparse.Namespace) -> int:
    from shards.settings import load_settings
    from xctrain.config import Config

    config = load_settings(Config, arguments.config, arguments.overrides)
    from xctrain.session import evaluate_rank

    return evaluate_rank(config, as_json=arguments.json, out=arguments.out)


def _audit(arguments: argparse.Namespace) -> int:
    from xctrain import audit, trained

    result = audit.audit(trained.open_run(arguments.run, arguments.shards))
    print(json.dumps(result.to_json(), indent=1) if arguments.json else audit.as_text(result))
    return 0 if result.ok else 1


def _batch(arguments: argparse.Namespace) -> int:
    from xctrain import audit, trained

    run = trained.open_run(arguments.run, arguments.shards, begun=True)
    if arguments.position is None:
        rows = audit.batch_of_step(run, arguments.step)
    else:
        rows = audit.batch_at(run, arguments.position, f"position {arguments.position}")
    if arguments.out:
        from shards.places import require_file
        from xctrain.sheet import write_sheet

        title = f"position {arguments.position}" if arguments.step is None else f"step {arguments.step}"
        require_file(arguments.out, "--out")
        write_sheet(run, rows, title, arguments.out)
        print(arguments.out)
    elif arguments.json:
        print(json.dumps({"step": arguments.step, "samples": rows}, indent=1, ensure_ascii=False))
    else:
        for row in rows:
            texts = [f"*{text}*" if text in row["chosen"] else text for text in row["captions"]]
            source = f"{row['source']} " if "source" in row else ""
            print(f"{row['n']:>10}  {source}epoch {row['epoch']:<4} {row['key']}  {' | '.join(texts)}")
        print("*...*: the caption that is trained on at that position")
    return 0


def _caption(arguments: argparse.Namespace) -> int:
    from xctrain.session import caption_images

    return caption_images(arguments.run, arguments.images, as_json=arguments.json, out=arguments.out)


def _export(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from xctrain import export

    result = export.export(
        arguments.run,
        arguments.out,
        which=arguments.checkpoint,
        base=arguments.base,
        image=arguments.image,
        dtype=arguments.dtype,
    )
    print(json.dumps(asdict(result), indent=1) if arguments.json else export.as_text(result, arguments.out))
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from xctrain.session import report_runs

    print(report_runs(arguments.runs, arguments.out, arguments.shards))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from xctrain import doctor

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that its checks are ended with it
    findings = doctor.examine(arguments.folder)
    print(json.dumps([f.to_json() for f in findings], indent=1) if arguments.json else doctor.as_text(findings))
    return 0 if all(f.ok for f in findings) else 1


if __name__ == "__main__":
    cli.run_and_exit(main)
