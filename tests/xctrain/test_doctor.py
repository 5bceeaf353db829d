"""The doctor names what is wrong, with one next step each, and does not wait for what hangs."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from xctrain import doctor
from xctrain.doctor import Finding

VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19\nGCC version: gcc version 12.2.0"


def _check_some_thing() -> Finding:
    raise OSError("no such device")


def _check_sleeper() -> Finding:
    child = subprocess.Popen(["sleep", "600"])
    Path(os.environ["XCTRAIN_TEST_PID"]).write_text(str(child.pid))
    time.sleep(600)
    raise AssertionError


def _check_crash() -> Iterator[Finding]:
    os._exit(3)


def test_whatever_breaks_in_a_check_is_its_finding() -> None:
    assert doctor.run_limited(_check_some_thing, 60) == [
        Finding("some thing", False, "OSError: no such device", "run `make install` again, then the doctor")
    ]
    assert doctor.run_limited(_check_crash, 60) == [
        Finding("crash", False, "its process ended with code 3", "run `make install` again")
    ]


def test_check_that_hangs_is_a_finding_and_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XCTRAIN_TEST_PID", str(tmp_path / "pid"))
    [finding] = doctor.run_limited(_check_sleeper, 5)
    assert (finding.ok, finding.found) == (False, "no answer in 5 s")
    assert finding.next_step == "look at `dmesg`, then restart"
    child = (tmp_path / "pid").read_text()
    until = time.monotonic() + 60
    while command_line(child):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_disk_is_that_of_the_folder_where_runs_will_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_CHECKS", (doctor._check_disk,))
    [finding] = doctor.examine(Path("/dev/shm/not/there"))
    assert re.fullmatch(r"\d+\.\d GB free in /dev/shm/not/there", finding.found)
    assert float(finding.found.split()[0]) == pytest.approx(shutil.disk_usage("/dev/shm").free / 1e9, abs=0.5)
    assert finding.ok == (shutil.disk_usage("/dev/shm").free >= doctor._DISK_BYTES)


DOCTOR_OF_A_LONG_CHECK = """
import sys
from shards import cli
from test_doctor import _check_long
from xctrain import __main__, doctor
doctor._CHECKS = [_check_long]
sys.exit(cli.run(__main__.main, ["doctor"]))
"""


def _check_long() -> Finding:
    time.sleep(600)
    raise AssertionError


def command_line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_doctor_that_a_signal_ends_leaves_nothing_running(signum: int, code: int) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    program = [sys.executable, "-c", DOCTOR_OF_A_LONG_CHECK]
    process = subprocess.Popen(program, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until = time.monotonic() + 60
    while not (checks := [c for c in children.read_text().split() if b"spawn_main" in command_line(c)]):
        assert time.monotonic() < until
        time.sleep(0.05)
    while os.getpgid(int(checks[0])) == os.getpgid(process.pid):
        assert time.monotonic() < until
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    while any(command_line(check) for check in checks):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_every_finding_that_is_not_fine_has_a_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_SHM_BYTES", 2**60)
    monkeypatch.setattr(doctor, "_DISK_BYTES", 2**60)
    findings = [doctor._check_shared_memory(), doctor._check_disk(Path("runs"))]
    assert [f.ok for f in findings] == [False, False]
    text = doctor.as_text(findings)
    assert "FAIL /dev/shm" in text
    assert "-> start the container with --shm-size=1g" in text
    assert "-> make room for 1152921505 GB, or name a folder on a larger disk: doctor DIR" in text


def test_findings_that_are_fine_have_none() -> None:
    findings = [doctor._check_python(), doctor._check_workers(), doctor._check_port(), *doctor._check_packages()]
    assert all(f.ok and not f.next_step for f in findings)
    assert findings[0].to_json() == {"name": "python", "ok": True, "found": findings[0].found, "next_step": ""}


def test_four_bit_product_is_near_the_whole_one() -> None:
    finding = doctor._check_four_bit()
    assert finding.ok
    assert re.fullmatch(r"on cpu, within \d+\.\d%; 4 bits give 8 to 10 %", finding.found)


def test_two_processes_add_up_a_number() -> None:
    assert doctor._check_all_reduce() == Finding("all-reduce", True, "2 processes")


@pytest.mark.parametrize(
    ("name", "wanted", "tested", "found"),
    [
        ("numpy", ">=99", None, r"expected >=99 -> pip install 'numpy>=99', or `make install`"),
        ("no-such-package", ">=1", None, "not installed, expected >=1 -> run `make install`"),
        ("numpy", ">=1", "0.1", ", tested with 0.1"),
    ],
)
def test_versions_are_compared_with_what_is_wanted_and_tested(
    name: str, wanted: str, tested: str | None, found: str
) -> None:
    finding = doctor.package_finding(name, wanted, tested)
    assert finding.ok == (tested is not None)
    assert f"{finding.found} -> {finding.next_step}".removesuffix(" -> ").endswith(found)


@pytest.mark.parametrize(
    ("loaded", "devices", "found", "next_step"),
    [
        (None, 0, "2 NVIDIA GPUs, no driver", "install the NVIDIA driver"),
        (VERSION, 0, "535.129.03, but no /dev/nvidia0", "start the container with --gpus all"),
        (VERSION, 2, "535.129.03, 2 GPUs", ""),
    ],
)
def test_driver_is_looked_for_where_there_are_gpus(
    tmp_path: Path, loaded: str | None, devices: int, found: str, next_step: str
) -> None:
    assert doctor.driver_finding(tmp_path).found == "none, there is no NVIDIA GPU"
    for number in range(2):
        device = tmp_path / f"sys/bus/pci/devices/0000:0{number}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x030200\n")
    (tmp_path / "dev").mkdir()
    for number in range(devices):
        (tmp_path / f"dev/nvidia{number}").touch()
    if loaded:
        (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
        (tmp_path / "proc/driver/nvidia/version").write_text(loaded)
    finding = doctor.driver_finding(tmp_path)
    assert (finding.found, finding.ok) == (found, not next_step)
    assert finding.next_step.startswith(next_step)


@pytest.mark.slow
def test_command_prints_json_and_its_exit_code_says_whether_all_is_fine() -> None:
    done = subprocess.run([sys.executable, "-m", "xctrain", "doctor", "--json"], capture_output=True, text=True)
    findings = json.loads(done.stdout)
    assert {f["name"] for f in findings} >= {
        "torch",
        "driver",
        "gpu",
        "4-bit product",
        "all-reduce",
        "disk",
        "free port",
    }
    assert done.returncode == (0 if all(f["ok"] for f in findings) else 1)
