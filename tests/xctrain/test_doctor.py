"""The doctor names what is wrong, with one next step each."""

import pytest

from xctrain import doctor
from xctrain.doctor import Finding


def test_whatever_breaks_in_a_check_is_its_finding() -> None:
    def _check_some_thing() -> Finding:
        raise OSError("no such device")

    assert doctor._guarded(_check_some_thing) == Finding(
        "some thing", False, "OSError: no such device", "run `make install` again, then the doctor"
    )


def test_every_finding_that_is_not_fine_has_a_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_SHM_BYTES", 2**60)
    monkeypatch.setattr(doctor, "_DISK_BYTES", 2**60)
    findings = [doctor._check_shared_memory(), doctor._check_disk()]
    assert [f.ok for f in findings] == [False, False]
    text = doctor.as_text(findings)
    assert "FAIL /dev/shm" in text
    assert "-> start the container with --shm-size=8g, or train with data.workers=0" in text
    assert "-> make room, or set run.dir to a larger disk" in text


def test_findings_that_are_fine_have_none() -> None:
    findings = [doctor._check_python(), doctor._check_cpus(), doctor._check_port(), *doctor._package_findings()]
    assert all(f.ok and not f.next_step for f in findings)
    assert findings[0].to_json() == {"name": "python", "ok": True, "found": findings[0].found, "next_step": ""}


def test_two_processes_add_up_a_number() -> None:
    assert doctor._check_all_reduce() == Finding("all-reduce", True, "2 processes")
