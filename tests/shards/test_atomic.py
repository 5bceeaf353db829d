"""What is written where no plain file stands."""

import os
import subprocess
import sys
from pathlib import Path

from shards.atomic import write_file


def test_what_a_link_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"before")
    (tmp_path / "link").symlink_to("real")
    write_file(tmp_path / "link", b"after")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"after"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"]


def test_device_or_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen([sys.executable, "-c", f"print(open({str(pipe)!r}).read())"], stdout=subprocess.PIPE)
    write_file(pipe, b"through")
    assert reader.communicate()[0] == b"through\n"
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]
