"""tools/gpu/check.sh on a machine without a GPU: what it finds, and what of its figures is a
failure.

All of it, on tiny shapes: `tools/gpu/check.sh --device cpu --small`.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.requirements import requires

requires("torch", "megatron")

pytestmark = pytest.mark.run

GPU = Path(__file__).parents[2] / "tools/gpu"


@pytest.fixture
def gpu(monkeypatch):
    """Imports modules of tools/gpu as its scripts do."""
    monkeypatch.syspath_prepend(str(GPU))
    known = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(GPU)):
            del sys.modules[name]


def test_the_rows_are_those_of_the_page_and_each_can_be_measured(gpu) -> None:
    """What a job is asked for, on tiny shapes too, is what its program takes."""
    rows, page = gpu("rows"), (GPU.parents[1] / "docs/benchmarks/gpu.md").read_text()
    shown = re.findall(r"^\| (.+?) \|", page.partition("<!-- table gpu")[2], re.MULTILINE)
    assert shown[2:] == [row.what for row in rows.ROWS]
    assert {job for row in rows.ROWS for job in row.jobs} == set(rows.JOBS)
    for name, job in rows.JOBS.items():
        measure = gpu(job.program)
        measure = (
            getattr(measure, job.about["what"]) if job.program == "copies" else measure.measure
        )
        for about in (job.about, {**job.about, **job.small}):
            (
                inspect.signature(measure).bind(
                    device="cpu", **{key: about[key] for key in about if key != "what"}
                ),
                name,
            )


def test_only_what_fails_of_ours_is_a_failure(gpu, monkeypatch, capsys) -> None:
    table, rows = gpu("table"), gpu("rows")
    answers = {
        "step": {"error": "out of memory", "memory": True},
        "packing": {"error": "FAILED: a wrong name"},
    }
    monkeypatch.setattr(table, "ask", lambda program, *_: answers.get(program, {"of_raw": 0.5}))
    monkeypatch.setattr(
        sys, "argv", ["table.py", "--device", "cpu", "--small", "--only", "step", "copies"]
    )
    assert table.main() == 0
    told = capsys.readouterr().out
    assert (
        "8B, 8 x 16,384: offloaded | out of memory" in told
        and "of the raw pinned copy | 0.5 x | >= 0.95 x\n" in told
    )
    monkeypatch.setattr(
        sys, "argv", ["table.py", "--device", "cpu", "--small", "--only", "packing"]
    )
    assert (
        table.main() == 1
        and "FAILED to be measured: 0.6B, lognormal: plain" in capsys.readouterr().out
    )
    row = next(row for row in rows.ROWS if row.what.startswith("device to slab"))
    assert row.cells({"slab": {"of_raw": 0.96}}) == [row.what, "0.96 x", ">= 0.95 x: met"]


def test_a_measurement_is_a_process_with_a_deadline(gpu, tmp_path: Path, monkeypatch) -> None:
    child = gpu("child")
    assert child.ask(
        "rates", {"size": 32, "copied_bytes": 64, "rounds": 1}, "cpu", 60.0
    ).keys() >= {"copy", "to_host"}
    monkeypatch.setattr(child, "HERE", tmp_path)
    (tmp_path / "waits.py").write_text("import subprocess\nsubprocess.run(['sleep', '600'])\n")
    (tmp_path / "large.py").write_text("print('{}')\nraise MemoryError\n")
    assert child.ask("waits", {}, "cpu", 1.0) == {
        "error": "FAILED: not done in 1 s",
        "memory": False,
    }
    assert child.ask("large", {}, "cpu", 60.0)["error"] == "out of memory"


def test_it_says_what_is_missing_and_skips_what_lacks_a_package(tmp_path: Path) -> None:
    environment = os.environ | {"RELAX_PYTHON": sys.executable}
    command = [GPU / "check.sh", "--device", "cpu", "--small", "--only", "found"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert (
        "missing: transformer-engine: actor.kernels: te" in done.stdout
        and "a second GPU" in done.stdout
    )
    assert "found: Python 3." in done.stdout and done.stdout.endswith("check: no test failed\n")
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
    assert "needs package no_such_package" in done.stdout and "1 skipped, 1 error" in done.stdout, (
        done.stdout
    )
