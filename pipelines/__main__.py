"""Command line of the build: ``build``, ``preview``, ``add``, ``download``, ``sample`` and ``serve``."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from shards import cli

EPILOG = "exit codes: 0 done, 1 failed, 2 wrong usage or config, 75 stopped by a signal (run it again to go on)"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipelines", description=__doc__, epilog=EPILOG)
    parser.add_argument("--version", action=cli.ShowVersion)
    commands = parser.add_subparsers(dest="command", required=True)

    build = commands.add_parser("build", help="images with captions to a shard folder", epilog=EPILOG)
    build.add_argument("config", type=Path, metavar="CONFIG.yaml", help="see configs/build.yaml")
    build.add_argument("overrides", nargs="*", metavar="section.field=value", help="on top of the file")
    build.add_argument("--plain", action="store_true", help="run without any Prefect API")
    build.add_argument("--json", action="store_true", help="print the result as JSON")
    build.set_defaults(run=_build)

    preview = commands.add_parser("preview", help="what the filters do to some records; writes nothing", epilog=EPILOG)
    preview.add_argument("config", type=Path, metavar="CONFIG.yaml", help="of a build; its out is not touched")
    preview.add_argument("overrides", nargs="*", metavar="section.field=value", help="on top of the file")
    preview.add_argument("--records", type=int, default=200, metavar="N", help="records to try (default %(default)s)")
    preview.add_argument("--page", type=Path, metavar="FILE", help="write the HTML report of these records there")
    preview.add_argument("--json", action="store_true", help="print the result as JSON")
    preview.set_defaults(run=_preview)

    add = commands.add_parser("add", help="new records to a shard folder, as new shards", epilog=EPILOG)
    add.add_argument("folder", metavar="DIR", help="shard folder or address; its shards stay as they are")
    add.add_argument("config", type=Path, metavar="CONFIG.yaml", help="of a build; its out is not used")
    add.add_argument("overrides", nargs="*", metavar="section.field=value", help="on top of the file")
    add.add_argument("--plain", action="store_true", help="run without any Prefect API")
    add.add_argument("--json", action="store_true", help="print the result as JSON")
    add.set_defaults(run=_build)

    download = commands.add_parser("download", help="fetch the COCO files, or a list of URLs", epilog=EPILOG)
    download.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="see configs/download.yaml; or --out alone")
    download.add_argument("overrides", nargs="*", metavar="field=value", help="on top of the file")
    download.add_argument("--out", metavar="DIR", help="folder for the files; goes on with what is there")
    download.add_argument(
        "--split", choices=("train", "val"), help="pictures of this one only, with all captions (default both)"
    )
    download.add_argument("--year", choices=("2014", "2017"), help="COCO of that year (default 2017)")
    download.add_argument("--json", action="store_true", help="print the result as JSON")
    download.set_defaults(run=_download)

    sample = commands.add_parser("sample", help="draw the sample dataset, in the official COCO layout", epilog=EPILOG)
    sample.add_argument("--out", type=Path, required=True, metavar="DIR", help="new or empty folder")
    sample.add_argument("--images", type=int, default=1500, help="pictures to train on (default %(default)s)")
    sample.add_argument("--seed", type=int, default=0, help="another seed draws other scenes (default %(default)s)")
    sample.set_defaults(run=_sample)

    serve = commands.add_parser("serve", help="Prefect server, worker and deployment until Ctrl-C", epilog=EPILOG)
    serve.add_argument("--port", type=int, default=4200, help="port of the server (default %(default)s)")
    serve.set_defaults(run=_serve)

    for command in (parser, build, preview, add, download, sample, serve):
        command.add_argument("--debug", action="store_true", help="show tracebacks")  # shards.cli.run takes it
    arguments = cli.parse_with_settings(parser, argv)
    return int(arguments.run(arguments))


def _build(arguments: argparse.Namespace) -> int:
    from pipelines.config import BuildConfig
    from pipelines.signals import ended_by_signals
    from shards.settings import load_settings

    adding = arguments.command == "add"
    overrides = [*arguments.overrides, *([f"out={arguments.folder}"] if adding else [])]
    config = load_settings(BuildConfig, arguments.config, overrides)
    if config.build.note:
        print(f"note: {config.build.note}", file=sys.stderr)
    stopped = f"{config.out}: the build was stopped; finished shards are kept, the same command goes on from there"
    with ended_by_signals(stopped):
        from pipelines.addition import Addition
        from pipelines.build import Build
        from pipelines.run import run_plain, run_with_prefect

        kind = Addition if adding else Build
        summary = run_plain(config, kind) if arguments.plain else run_with_prefect(config, kind)
    if arguments.json:
        print(json.dumps(summary.to_json()))
    else:
        print(summary)
    return 0


def _preview(arguments: argparse.Namespace) -> int:
    from pipelines.config import BuildConfig
    from pipelines.preview import preview
    from pipelines.signals import ended_by_signals
    from shards.atomic import write_file
    from shards.errors import ConfigError
    from shards.places import require_file
    from shards.settings import load_settings

    if arguments.records < 1:
        raise ConfigError(f"--records is {arguments.records}, expected 1 or more")
    page: Path | None = arguments.page
    if page:
        require_file(page, "--page")
    with ended_by_signals("the preview was stopped; nothing was written"):
        found = preview(load_settings(BuildConfig, arguments.config, arguments.overrides), arguments.records)
    if page:
        write_file(page, found.page.encode("utf-8", "surrogateescape"))
    print(json.dumps(found.to_json()) if arguments.json else found)
    return 0


def _download(arguments: argparse.Namespace) -> int:
    from pipelines.download import run_download
    from pipelines.download_config import DownloadConfig
    from pipelines.signals import ended_by_signals
    from shards.settings import load_settings

    overrides = list(arguments.overrides)
    if arguments.config and "=" in arguments.config:  # the first setting, with --out and no file
        overrides.insert(0, arguments.config)
        arguments.config = None
    if arguments.out:
        overrides.append(f"out={arguments.out}")
    if arguments.year:
        overrides.append(f"dataset=coco{arguments.year}")
    if arguments.split:
        overrides.append(f"parts=[{arguments.split}, annotations]")
    config = load_settings(DownloadConfig, Path(arguments.config) if arguments.config else None, overrides)
    with ended_by_signals(
        f"{config.out}: the download was stopped; the same command goes on from the bytes that are there"
    ):
        result = run_download(config)
    print(json.dumps(result.to_json()) if arguments.json else result)
    return 0


def _sample(arguments: argparse.Namespace) -> int:
    from pipelines.sample import draw_dataset
    from shards.errors import ConfigError

    if arguments.images < 1:
        raise ConfigError(f"--images is {arguments.images}, expected 1 or more")
    counts = draw_dataset(arguments.out, arguments.images, arguments.seed)
    print(f"{arguments.out}: {', '.join(f'{count} {split}' for split, count in counts.items())} pictures")
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    from pipelines.serve import serve

    return serve(arguments.port)


if __name__ == "__main__":
    cli.run_and_exit(main)
