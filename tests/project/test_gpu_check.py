"""tools/gpu/check.sh on a machine without a GPU: its report of the machine, and its failures.

`tools/gpu/check.sh --device cpu --small` runs all parts with tiny shapes.
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
    modules_before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - modules_before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(GPU)):
            del sys.modules[name]


def test_rows_are_those_of_the_page_and_arguments_fit_their_programs(gpu) -> None:
    """Arguments of each job, also those for tiny shapes, fit the signature of its program."""
    rows, jobs = gpu("rows"), gpu("jobs").JOBS
    page = (GPU.parents[1] / "docs/benchmarks/gpu.md").read_text()
    shown = re.findall(r"^\| (.+?) \|", page.partition("<!-- table gpu")[2], re.MULTILINE)
    assert shown[2:] == [row.label for row in rows.ROWS]
    assert set().union(*(row.jobs for row in rows.ROWS)) == set(jobs)
    for name, job in jobs.items():
        program = gpu(job.program)
        for arguments in (dict(job.arguments), {**job.arguments, **job.small}):
            measure = getattr(program, arguments.pop("what", "measure"))
            assert inspect.signature(measure).bind(device="cpu", **arguments), name


def torch_version() -> str:
    import torch

    return torch.__version__


@pytest.fixture
def measure(gpu, monkeypatch):
    """tools/gpu/measure.py. `measure.answers`: figures by program; others have `of_raw`."""
    module = gpu("measure")
    module.answers, module.asked = {}, []

    def ask(program, *_):
        module.asked.append(program)
        return module.answers.get(program, {"of_raw": 0.5})

    monkeypatch.setattr(module, "ask", ask)
    return module


def test_only_a_failure_of_ours_is_a_failure(gpu, measure, capsys) -> None:
    measure.answers["step"] = {"error": "out of memory", "memory": True}
    options = ["--device", "cpu", "--small", "--only"]
    assert measure.main([*options, "step", "copies"]) == 0
    output = capsys.readouterr().out
    assert "8B, 8 x 16,384: offloaded | 0 s | out of memory\n" in output
    assert "of the raw pinned copy | 0.5 x | >= 0.95 x\n" in output
    measure.answers["packing"] = {"error": "FAILED: a wrong name"}
    assert measure.main([*options, "packing"]) == 1
    assert "FAILED to be measured: 0.6B, lognormal: fused" in capsys.readouterr().out
    row = next(row for row in gpu("rows").ROWS if row.label.startswith("device to slab"))
    assert row.cells({"slab": {"of_raw": 0.96}}) == [row.label, "0.96 x", ">= 0.95 x: met"]


def test_each_figure_is_stored_and_a_second_call_measures_the_rest(
    gpu, measure, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("RELAX_COMMIT", "abc")
    options = ["--device", "cpu", "--small", "--store", str(tmp_path), "--only", "copies"]

    def killed(program, *_):
        if measure.asked:
            raise KeyboardInterrupt
        measure.asked.append(program)
        return {"of_raw": 0.75}

    whole = measure.ask
    monkeypatch.setattr(measure, "ask", killed)
    with pytest.raises(KeyboardInterrupt):
        measure.main(options)
    results = gpu("results")
    stored = results.load({"device": "cpu", "commit": "abc", "torch": torch_version()}, tmp_path)
    assert list(stored) == ["rates"]
    monkeypatch.setattr(measure, "ask", whole)
    measure.asked.clear()
    assert measure.main(options) == 0
    assert measure.asked == ["copies"] * 3 and "rates | stored" in capsys.readouterr().out
    monkeypatch.setenv("RELAX_COMMIT", "def")
    measure.asked.clear()
    measure.main(options)
    assert measure.asked == ["rates"] + ["copies"] * 3, "figures of another commit do not count"


def test_no_job_is_started_that_would_end_too_late(measure, capsys) -> None:
    options = ["--device", "cpu", "--only", "rates", "copies", "--seconds", "25"]
    assert measure.main(options) == 0
    assert measure.asked == ["rates"]
    assert capsys.readouterr().out.count("no time left") == 3


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
    (tmp_path / "partly.py").write_text(
        "import sys, time\nprint('{\"first_s\": 1.5}', flush=True)\ntime.sleep(600)\n"
    )
    figures = child.ask("partly", {}, "cpu", 1.0)
    assert figures["first_s"] == 1.5 and figures["error"].startswith("FAILED"), figures


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


def test_a_case_that_fails_keeps_the_figures_of_the_others(gpu, capsys) -> None:
    cases = gpu("cases").Cases("cpu")

    def fail(figures: dict[str, float]) -> None:
        figures["first_s"] = 1.0
        raise ValueError("no\nkernel")

    cases.run("norm", fail)
    cases.run("adam", lambda figures: figures.update(ms=2.0))
    expected = {
        "passed": 1.0,
        "failed": 1.0,
        "norm first_s": 1.0,
        "norm error": "ValueError: no kernel",
        "adam ms": 2.0,
    }
    assert cases.figures == expected
    assert gpu("child").last_report(capsys.readouterr().out) == expected
