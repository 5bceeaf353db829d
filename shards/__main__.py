"""python -m shards: look at, check and describe a shard folder."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shards import cli
from shards.commands import check, interop, look, plan
from shards.commands.folder import location


def main(argv: Sequence[str]) -> int:
    """Parse, run the command, return its exit code: 0 done, 1 findings or failure, 2 wrong usage."""
    arguments = _parser().parse_args(argv)
    return int(arguments.command(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m shards", description="Look at, check and describe a shard folder.")
    parser.add_argument("--version", action=cli.ShowVersion)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, function: Any, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("folder", type=location, metavar="DIR", help="folder of shards")
        command.add_argument("--json", action="store_true", help="print JSON for a program")
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.set_defaults(command=function)
        return command

    add("ls", look.list_shards, "List the shards.")
    show = add("show", look.show_sample, "Print one sample's JSON, and write its picture with --out.")
    show.add_argument("key", metavar="KEY", help="or the image id in the source, or the name of the file")
    show.add_argument("--out", type=Path, metavar="FILE", help="write the picture there (or into this folder)")
    preview = add(
        "preview", look.write_preview, "Write a contact sheet: one HTML file with pictures and their captions."
    )
    preview.add_argument("--split", help="default: each split")
    preview.add_argument("--num", type=int, default=48, metavar="N", help="samples of a split, spread over its shards")
    preview.add_argument("--out", type=Path, default=Path("preview.html"), metavar="FILE", help="default: %(default)s")
    verify = add(
        "verify", check.verify_folder, "Recheck every byte against the manifest; exit code 1 if anything differs."
    )
    verify.add_argument(
        "--quarantine", type=Path, metavar="FILE", help="list there the samples to leave out of training"
    )
    add("stats", look.print_stats, "Sizes of pictures, captions, flags, and balance of the shards.")
    index = add("index", interop.index_tars, "Make tars that another tool wrote readable here; they keep their bytes.")
    index.add_argument(
        "--split", action="append", metavar="NAME=PATTERN", help="which tars are which split (default train=*.tar)"
    )
    index.add_argument(
        "--captions", choices=("txt", "caption", "json"), help="member with the captions (default: the first there is)"
    )
    add(
        "energon",
        interop.write_nv_meta,
        "Write .nv-meta, with which Megatron-Energon reads the folder without preparing it.",
    )
    planned = add(
        "plan", plan.print_plan, "Say what a run over a split would do, and what it would refuse (exit code 2)."
    )
    _add_plan_options(planned)
    return parser


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--split", help="default: each split")
    parser.add_argument("--global-batch", type=int, default=64, metavar="B", help="samples per step (default 64)")
    parser.add_argument("--micro-batch", type=int, default=1, metavar="M", help="samples per forward (default 1)")
    parser.add_argument("--gpus", type=int, default=1, metavar="R", help="processes (default 1)")
    parser.add_argument(
        "--nodes", type=int, default=1, metavar="N", help="machines that share the processes (default 1)"
    )
    parser.add_argument("--cache-gb", type=float, metavar="GB", help="data.cache_gb of each, for shards at an address")
    parser.add_argument("--workers", type=int, default=1, metavar="W", help="loader workers per process (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fragment", type=int, default=16, help="neighbouring samples kept together (default 16)")
    parser.add_argument("--window", type=int, default=16384, help="samples scattered among each other (default 16384)")
    parser.add_argument("--lanes", type=int, default=8, help="parts read side by side (default 8)")


if __name__ == "__main__":
    cli.run_and_exit(main)
