"""What several tests of builds do with folders."""

import shutil
from pathlib import Path


def snapshot(out: Path) -> dict[Path, tuple[int, int]]:
    """Every file below a folder with what changes when it is written: time and inode."""
    return {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in out.rglob("*") if p.is_file()}


def copied(photos: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A source that a test may change, and where to build it."""
    return Path(shutil.copytree(photos, tmp_path / "source", copy_function=shutil.copy2)), tmp_path / "out"
