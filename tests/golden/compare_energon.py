"""Compares a shard's .idx with the one that Megatron-Energon's preparation writes for the same tar.

    python tests/golden/compare_energon.py [TAR] [--keep FILE]

TAR is by default the golden shard. Needs `pip install megatron-energon` (it brings torch; better in an environment of
its own). tests/golden/energon.idx was kept by this script with megatron-energon 7.4.1.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def energon_index(tar: Path) -> bytes:
    """The bytes of the index that Energon writes beside a copy of ``tar``."""
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(tar, folder)
        WebdatasetPreparator.prepare_dataset(Path(folder), [tar.name], workers=1, tar_index_only=True)
        return (Path(folder) / f"{tar.name}.idx").read_bytes()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tar", nargs="?", type=Path, default=HERE / "shards" / "train-000000.tar")
    parser.add_argument("--keep", type=Path, help="write Energon's index to this file")
    arguments = parser.parse_args()
    theirs = energon_index(arguments.tar)
    ours = arguments.tar.with_name(arguments.tar.name + ".idx").read_bytes()
    if arguments.keep:
        arguments.keep.write_bytes(theirs)
    print(
        "equal" if theirs == ours else f"differ: Energon wrote {theirs.hex(' ', 8)}, the shard has {ours.hex(' ', 8)}"
    )
    sys.exit(theirs != ours)
