"""tools/gpu/check.sh on a machine without a GPU: what it finds, and what of its figures is a failure.

All of it, on tiny shapes: `tools/gpu/check.sh --device cpu --small`.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.requirements import requires

requires("torch", "megatron")

pytestmark = pytest.mark.run

GPU = Path(__file__).parents[1] / "tools/gpu"


@pytest.fixture
def step(monkeypatch):
    """tools/gpu/step.py, imported as its script does."""
    monkeypatch.syspath_prepend(str(GPU))
    yield importlib.import_module("step")
    for name in ("step", "shapes", "found"):
        sys.modules.pop(name, None)


def test_only_what_fails_of_ours_is_a_failure(step, monkeypatch) -> None:
    answers = {
        "relax_hpc": {"both": 0.5, "host": 0.25, "optimizer": 0.5, "memory": 0.0},
        "relax_hpc, recomputed": {"error": "out of memory", "memory": True},
        "transformers": {"error": "FAILED: no such model", "memory": False},
    }
    asked = iter([answers["relax_hpc"], answers["relax_hpc, recomputed"], *[answers["transformers"]] * 2])
    monkeypatch.setattr(step, "in_a_process", lambda about, device: next(asked))
    rows = list(step.table((("tiny", 2, 64, 64),), "cpu", 1e12))
    assert [(row[3], failed) for row, failed in rows] == [(who, False) for who in step.WHO]
    assert rows[0][0][4:9] == ["500.0", "250.0", "500.0", "128", "not known"]
    assert all(len(row) == len(step.COLUMNS) for row, _ in rows) and rows[-1][0][4].startswith("not measured")
    monkeypatch.setattr(step, "in_a_process", lambda about, device: {"error": "FAILED: it", "memory": False})
    assert [failed for _, failed in step.table((("tiny", 2, 64, 64),), "cpu", 1e12)] == [True, True, *[False] * 6]


def test_it_says_what_is_missing_and_skips_what_lacks_a_package(tmp_path: Path) -> None:
    environment = os.environ | {"RELAX_PYTHON": sys.executable}
    command = [GPU / "check.sh", "--device", "cpu", "--small", "--only", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert "found: Python 3." in done.stdout and done.stdout.endswith("check: no failure\n")
    (tmp_path / "test_lacks.py").write_text("import no_such_package\n")
    (tmp_path / "test_broken.py").write_text("import relax_hpc.no_such_module\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "tools.gpu.missing",
        "-q",
        "-rs",
        tmp_path,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=GPU.parents[1])
    assert "needs package no_such_package" in done.stdout and "1 skipped, 1 error" in done.stdout, done.stdout
