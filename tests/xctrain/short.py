"""A rank of a real run whose batches end early on rank 1: short.py POSITION section.field=value ..."""

from collections.abc import Sequence

from tiny import TinyFamily, open_tiny

from shards import cli
from shards.settings import load_settings
from xctrain.config import Config
from xctrain.ranks import Ranks
from xctrain.session import train_rank
from xctrain.start import Plan


def main(argv: Sequence[str]) -> int:
    """Train; exit code."""

    def open_model(config: Config, ranks: Ranks, plan: Plan) -> tuple[TinyFamily, str]:
        if ranks.rank == 1:
            plan.stream.end = int(argv[0])
        return open_tiny(config, ranks, plan)

    return train_rank(load_settings(Config, None, argv[1:]), open_model)


if __name__ == "__main__":
    cli.run_and_exit(main)
