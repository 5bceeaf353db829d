"""Test this machine for training, with one next step for each finding."""

import importlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("torch", "torchvision", "accelerate", "transformers", "peft", "bitsandbytes", "webdataset", "prefect")
_SHM_BYTES = 512 * 2**20  # batches of a few workers; Docker gives 64 MB unless told otherwise
_DISK_BYTES = 20 * 2**30
_ALL_REDUCE_TIMEOUT_S = 60


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; ``next_step`` is empty where it is fine."""

    name: str
    ok: bool
    found: str
    next_step: str = ""

    def to_json(self) -> dict[str, object]:
        """As ``doctor --json`` prints it."""
        return asdict(self)


def examine() -> list[Finding]:
    """Every finding, in the order in which a broken one is best mended."""
    return [_guarded(check) for check in _CHECKS] + list(_package_findings())


def as_text(findings: list[Finding]) -> str:
    """One line a finding, its next step below it."""
    lines = []
    for finding in findings:
        lines.append(f"{'ok  ' if finding.ok else 'FAIL'} {finding.name:<14} {finding.found}")
        if finding.next_step:
            lines.append(f"     {'':<14} -> {finding.next_step}")
    return "\n".join(lines)


def _guarded(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - whatever breaks here is the finding
        name = check.__name__.removeprefix("_check_").replace("_", " ")
        return Finding(name, False, f"{type(error).__name__}: {error}", "run `make install` again, then the doctor")


def _check_python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info >= (3, 11)
    return Finding("python", ok, found, "" if ok else "install Python 3.11 or newer and run `make install`")


def _check_cpus() -> Finding:
    from xctrain.loader import num_workers

    cpus = len(os.sched_getaffinity(0))
    processes = max(1, _num_gpus())
    return Finding(
        "workers", True, f"{cpus} CPUs, {processes} processes: {num_workers('auto', processes)} workers each"
    )


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _check_gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("gpu", True, "none, training runs on the CPU")
    names = ", ".join(
        f"{torch.cuda.get_device_name(i)} ({torch.cuda.get_device_properties(i).total_memory / 1e9:.0f} GB)"
        for i in range(_num_gpus())
    )
    return Finding("gpu", True, f"{names}, CUDA {torch.version.cuda}, bf16 {torch.cuda.is_bf16_supported()}")


def _check_four_bit() -> Finding:
    """A 4-bit product; a wrong CUDA library for bitsandbytes shows here and not an hour into a run."""
    import torch

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it tells of a faster kernel that is not needed
    from bitsandbytes.nn import Linear4bit

    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4").to(device)
    product = layer(torch.randn(2, 64, device=device))
    ok = bool(torch.isfinite(product).all())
    return Finding("4-bit product", ok, f"on {device}", "" if ok else "reinstall bitsandbytes for this CUDA version")


def _check_all_reduce() -> Finding:
    """Two processes add up a number; shows a blocked loopback or peer-to-peer transfers that hang."""
    code = (
        "import os, sys, torch, torch.distributed as dist\n"
        "rank = int(sys.argv[1])\n"
        "gpus = torch.cuda.device_count() >= 2\n"
        "dist.init_process_group('nccl' if gpus else 'gloo', init_method='file://' + sys.argv[2], rank=rank, world_size=2)\n"
        "t = torch.ones(1, device=f'cuda:{rank}' if gpus else 'cpu')\n"
        "dist.all_reduce(t)\n"
        "assert t.item() == 2\n"
        "dist.destroy_process_group()\n"
        "os._exit(0)\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = [sys.executable, "-c", code]
        ranks = [subprocess.Popen([*arguments, str(r), f"{folder}/store"], stderr=subprocess.PIPE) for r in range(2)]
        try:
            errors = [rank.communicate(timeout=_ALL_REDUCE_TIMEOUT_S)[1].decode() for rank in ranks]
        except subprocess.TimeoutExpired:
            step = "on consumer GPUs set NCCL_P2P_DISABLE=1; else look at the firewall of the loopback device"
            return Finding("all-reduce", False, f"no answer in {_ALL_REDUCE_TIMEOUT_S} s", step)
        finally:
            for rank in ranks:
                with suppress(ProcessLookupError):
                    rank.kill()
    if any(rank.returncode for rank in ranks):
        last = next(e for e in errors if e).strip().splitlines()[-1]
        return Finding("all-reduce", False, last, "set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME to a device that is up")
    return Finding("all-reduce", True, "2 processes")


def _check_shared_memory() -> Finding:
    total = shutil.disk_usage("/dev/shm").total
    ok = total >= _SHM_BYTES
    step = "" if ok else "start the container with --shm-size=8g, or train with data.workers=0"
    return Finding("/dev/shm", ok, f"{total / 1e6:.0f} MB", step)


def _check_disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    ok = free >= _DISK_BYTES
    return Finding(
        "disk", ok, f"{free / 1e9:.0f} GB free here", "" if ok else "make room, or set run.dir to a larger disk"
    )


def _check_port() -> Finding:
    from xctrain.launch import free_port

    return Finding("free port", True, str(free_port()))


def _package_findings() -> Iterator[Finding]:
    for name in _PACKAGES:
        try:
            yield Finding(name, True, version(name))
        except PackageNotFoundError:
            yield Finding(name, False, "not installed", "run `make install`")
    try:
        importlib.import_module("simplejpeg")
    except ImportError as error:
        yield Finding("simplejpeg", False, str(error), "run `make install`")


_CHECKS = (
    _check_python,
    _check_gpu,
    _check_cpus,
    _check_four_bit,
    _check_all_reduce,
    _check_shared_memory,
    _check_disk,
    _check_port,
)
