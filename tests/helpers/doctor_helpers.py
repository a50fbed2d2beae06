"""What the doctor's tests share: good settings, changes to them, a Slurm that is made up, what is
found."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.config import Config, load
from relax_hpc.ops.doctor import host
from relax_hpc.ops.doctor.doctor import Finding
from tests.helpers.fake_slurm import PROGRAMS, FakeSlurm
from tests.helpers.run_helpers import QUICKSTART, merged

GOOD = {
    "layout": "het",
    "site": {
        "partition": "main",
        "gpu_request": "none",
        "mpi": {"launcher": "pmi2", "library": "wheel"},
    },
}


@pytest.fixture(name="fake")
def fake_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setattr(host, "filesystem", lambda path: "nfs4")
    slurm, run = FakeSlurm(tmp_path / "fake", monkeypatch), subprocess.run

    def quick(argv: list[str], **options: Any) -> subprocess.CompletedProcess:
        """Most of the time would go to starting programs; this very interpreter has all modules."""
        if argv[0] == sys.executable:
            return subprocess.CompletedProcess(argv, 0, "[]", "")
        return slurm.run(argv) if argv[0] in PROGRAMS else run(argv, **options)

    monkeypatch.setattr(subprocess, "run", quick)
    return slurm


def make(tmp_path: Path, changes: dict[str, Any]) -> Config:
    return load([QUICKSTART], merged({"run_dir": str(tmp_path / "run")} | GOOD, changes))


def bad(findings: list[Finding]) -> list[str]:
    for finding in findings:
        assert "\n" not in finding.text
    return [
        f"{finding.severity}: {finding.text}" for finding in findings if finding.severity != "ok"
    ]


def group(name: str, **resources: Any) -> dict[str, Any]:
    return {"groups": {name: {"resources": resources}}}


def site(**changes: Any) -> dict[str, Any]:
    return {"site": changes}


def expect(findings: list[Finding], expected: str) -> None:
    lines = bad(findings)
    assert any(re.match(expected, line) for line in lines), lines
