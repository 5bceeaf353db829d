"""Compares a shard's .idx with the one that Megatron-Energon's preparation writes for the same tar, and reads the shard
folder with Energon by the .nv-meta of `python -m shards energon`.

    python tests/golden/compare_energon.py [TAR] [--keep FILE]

TAR is by default the golden shard. Needs `pip install megatron-energon` (it brings torch; better in an environment of
its own). tests/golden/energon.idx was kept by this script with megatron-energon 7.4.1.
"""

import argparse
import shutil
import subprocess
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


def energon_samples(folder: Path, split: str) -> dict[str, str]:
    """Key and first caption of each sample that Energon reads from a copy of ``folder``, prepared by us alone."""
    from megatron.energon import WorkerConfig, get_loader, get_train_dataset

    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(shutil.copytree(folder, Path(temporary) / "shards"))
        subprocess.run([sys.executable, "-m", "shards", "energon", copy], cwd=HERE.parents[1], check=True)
        dataset = get_train_dataset(
            copy,
            split_part=split,
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
            batch_size=None,
            shuffle_buffer_size=None,
            max_samples_per_sequence=None,
            repeat=False,
        )
        return {sample.__key__: " ".join(sample.caption.split()) for sample in get_loader(dataset)}


def our_samples(folder: Path, split: str) -> dict[str, str]:
    """The same by our own reader."""
    sys.path.insert(0, str(HERE.parents[1]))
    from shards.reader import SplitReader

    reader = SplitReader(folder, split)
    return {sample.key: sample.captions[0] for sample in map(reader.read, range(len(reader)))}


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
    folder = arguments.tar.parent
    read, expected = energon_samples(folder, "train"), our_samples(folder, "train")
    print(
        f"Energon read {len(read)} samples, {len(expected)} are there, {'equal' if read == expected else 'different'}"
    )
    sys.exit(theirs != ours or read != expected)
