"""Memory of this machine that a process may still take, by the kernel and by the limit of its container."""

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Bytes that can be had without ending another process: what is free, and the page cache.

    Source: proc(5) on MemAvailable; the kernel's cgroup-v2 page on memory.max, memory.current and memory.stat.
    """
    found = [line.split() for line in Path("/proc/meminfo").read_text().splitlines()]
    machine = next(int(words[1]) * 1024 for words in found if words[0] == "MemAvailable:")
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit == "max":
            return machine
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(0, min(machine, int(limit) - used + int(stat.get("inactive_file", 0))))
    except (OSError, ValueError):  # no container, or one of another kind
        return machine
