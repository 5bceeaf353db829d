"""Test this machine for training, with one next step for each finding.

Each check runs in a process of its own for a limited time: what hangs, a driver or a file system, is a finding too.
"""

import importlib
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from shards.parent import die_with_parent

_LIMIT_S = 120.0  # for one check; importing torch from a cold disk takes a minute
_LOCK = Path(__file__).parents[1] / "requirements.lock"
_NVIDIA = "0x10de"  # vendor on the PCI bus
_FOUR_BIT_ERROR = 0.2  # of the whole product; nf4 is 8 to 10 % off on random numbers
_SHM_BYTES = 512 * 2**20  # for NCCL, and batches beyond BatchMemory's; Docker gives 64 MB unless told otherwise
_DISK_BYTES = 20e9  # a few checkpoints of adapters, and a cache of shards
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


def examine(folder: Path = Path()) -> list[Finding]:
    """Every finding, in the order in which a broken one is best mended; ``folder``: where runs will lie."""
    checks = [partial(check, folder) if check is _check_disk else check for check in _CHECKS]
    return [finding for check in checks for finding in run_limited(check, _LIMIT_S)]


def run_limited(check: "Check", limit_s: float) -> list[Finding]:
    """What a check finds, in a process of its own that is ended with all it started when its time is up."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(check, os.getpid(), theirs), daemon=False)
    process.start()
    theirs.close()
    name = _name_of(check)
    try:
        if not ours.poll(limit_s):
            _kill(process)
            return [
                Finding(name, False, f"no answer in {limit_s:g} s", _HANGS.get(name, "look at `dmesg`, then restart"))
            ]
        found: list[Finding] = ours.recv()
        return found
    except (KeyboardInterrupt, SystemExit):
        _kill(process)
        raise
    except EOFError:
        process.join()
        return [Finding(name, False, f"its process ended with code {process.exitcode}", "run `make install` again")]
    finally:
        process.join()


def _kill(process: BaseProcess) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid or 0, signal.SIGKILL)  # as a rule it leads a group of its own by now
    process.kill()


def _answer(check: "Check", parent: int, answers: Connection) -> None:
    os.setpgid(0, 0)
    die_with_parent(parent)
    answers.send(_guarded(check))


def _name_of(check: "Check") -> str:
    return getattr(check, "func", check).__name__.removeprefix("_check_").replace("_", " ")


def as_text(findings: list[Finding]) -> str:
    """One line a finding, its next step below it."""
    lines = []
    for finding in findings:
        lines.append(f"{'ok  ' if finding.ok else 'FAIL'} {finding.name:<14} {finding.found}")
        if finding.next_step:
            lines.append(f"     {'':<14} -> {finding.next_step}")
    return "\n".join(lines)


def _guarded(check: "Check") -> list[Finding]:
    try:
        found = check()
        return [found] if isinstance(found, Finding) else list(found)
    except Exception as error:  # noqa: BLE001 - whatever breaks here is the finding
        step = "run `make install` again, then the doctor"
        return [Finding(_name_of(check), False, f"{type(error).__name__}: {error}", step)]


def _check_python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info >= (3, 11)
    return Finding("python", ok, found, "" if ok else "install Python 3.11 or newer and run `make install`")


def _check_workers() -> Finding:
    from xctrain.loader import num_workers

    cpus = len(os.sched_getaffinity(0))
    processes = max(1, _num_gpus())
    return Finding(
        "workers", True, f"{num_workers('auto', processes)} for each of {processes} processes, on {cpus} CPUs"
    )


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _check_driver() -> Finding:
    return driver_finding(Path("/"))


def driver_finding(root: Path) -> Finding:
    """Whether what stands on the bus has a driver, and what has one is handed to this machine or container."""
    devices = [d for d in (root / "sys/bus/pci/devices").glob("*") if _read(d / "vendor") == _NVIDIA]
    gpus = [d for d in devices if _read(d / "class").startswith("0x03")]
    loaded = _read(root / "proc/driver/nvidia/version")
    handed = [p for p in (root / "dev").glob("nvidia[0-9]*") if p.name.removeprefix("nvidia").isdigit()]
    if not gpus and not loaded:
        return Finding("driver", True, "none, there is no NVIDIA GPU")
    if not loaded:
        return Finding(
            "driver", False, f"{len(gpus)} NVIDIA GPUs, no driver", "install the NVIDIA driver, then restart"
        )
    number = next((word for word in loaded.split() if word[0].isdigit() and "." in word), loaded)
    if not handed:
        step = "start the container with --gpus all; outside of one, load the driver with `nvidia-modprobe -u -c=0`"
        return Finding("driver", False, f"{number}, but no /dev/nvidia0", step)
    return Finding("driver", True, f"{number}, {len(handed)} GPUs")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _check_gpu() -> Finding:
    import torch

    from xctrain.launch import num_gpus

    if not torch.cuda.is_available():
        if not num_gpus():
            return Finding("gpu", True, "none, training runs on the CPU")
        if torch.version.cuda is None:
            return Finding("gpu", False, "this torch is built for CPUs", "install torch with CUDA: run `make install`")
        try:
            torch.cuda.init()
        except RuntimeError as error:
            step = f"install a driver that knows CUDA {torch.version.cuda}, or a torch for the driver's CUDA"
            return Finding("gpu", False, " ".join(str(error).split()), step)
    for i in range(_num_gpus()):
        ones = torch.ones(256, 256, device=f"cuda:{i}")
        assert (ones @ ones).sum().item() == 256**3, f"GPU {i} multiplies wrong"
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
    layer = Linear4bit(256, 256, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    whole, rows = layer.weight.detach().clone(), torch.randn(8, 256)
    product = layer.to(device)(rows.to(device)).cpu()
    wanted = rows @ whole.T
    error = float((product - wanted).norm() / wanted.norm())
    ok = error < _FOUR_BIT_ERROR
    step = "" if ok else "reinstall bitsandbytes, in the version of requirements.lock; until then no adapter.kind=qlora"
    return Finding("4-bit product", ok, f"on {device}, within {error:.1%}; 4 bits give 8 to 10 %", step)


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
    step = "" if ok else "start the container with --shm-size=1g: NCCL needs it, and micro-batches beyond 268 MB"
    return Finding("/dev/shm", ok, f"{total / 1e6:.0f} MB", step)


def _check_disk(folder: Path) -> Finding:
    folder = folder.resolve()
    free = shutil.disk_usage(next(f for f in (folder, *folder.parents) if f.is_dir())).free
    ok = free >= _DISK_BYTES
    step = (
        f"make room for {_DISK_BYTES / 1e9:.0f} GB, or name a folder on a larger disk: doctor DIR, and run.dir below it"
    )
    return Finding("disk", ok, f"{free / 1e9:.1f} GB free in {folder}", "" if ok else step)


def _check_port() -> Finding:
    from xctrain.launch import free_port

    return Finding("free port", True, str(free_port()))


def _check_packages() -> Iterator[Finding]:
    """What is installed, against the ranges this project names and the versions it was tested with."""
    from packaging.requirements import Requirement

    tested = dict(line.strip().split("==") for line in _read(_LOCK).splitlines() if "==" in line)
    for text in requires("xctrain") or ():
        wanted = Requirement(text)
        if wanted.marker is None:
            yield package_finding(wanted.name, str(wanted.specifier), tested.get(wanted.name))


def package_finding(name: str, wanted: str, tested: str | None) -> Finding:
    """One package: that it is there, in a version of the range ``wanted``; another than ``tested`` is said."""
    from packaging.specifiers import SpecifierSet

    try:
        found = version(name)
        importlib.import_module(_IMPORTED.get(name, name)) if name in _COMPILED else None
    except PackageNotFoundError:
        return Finding(name, False, f"not installed, expected {wanted}", "run `make install`")
    except ImportError as error:
        return Finding(name, False, f"cannot be imported: {error}", "run `make install`")
    if not SpecifierSet(wanted).contains(found, prereleases=True):
        return Finding(name, False, f"{found}, expected {wanted}", f"pip install '{name}{wanted}', or `make install`")
    other = "" if tested in (None, found.partition("+")[0], found) else f", tested with {tested}"
    return Finding(name, True, f"{found}{other}")


Check = Callable[..., Finding | Iterator[Finding]]
_COMPILED = ("simplejpeg", "zlib-ng", "sentencepiece")  # small wheels that are there and yet may not load
_IMPORTED = {"zlib-ng": "zlib_ng"}
_CHECKS: tuple[Check, ...] = (
    _check_python,
    _check_packages,
    _check_driver,
    _check_gpu,
    _check_workers,
    _check_four_bit,
    _check_all_reduce,
    _check_shared_memory,
    _check_disk,
    _check_port,
)
_HANGS = {  # next steps where no answer came
    "gpu": "look at `nvidia-smi` and `dmesg`; a GPU that hangs wants the machine restarted",
    "four bit": "look at `nvidia-smi` and `dmesg`; a GPU that hangs wants the machine restarted",
    "disk": "a file system does not answer: look at `mount` and `dmesg`, or work in a folder on a local disk",
}
