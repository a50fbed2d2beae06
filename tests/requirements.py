"""What a test needs from the machine: it skips where that is missing, and fails where RELAX_REQUIRE
says it may not."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from importlib import util
from pathlib import Path

import pytest

PACKAGE = f"{Path(__file__).resolve().parent.parent / 'relax_hpc'}/"
"""Beginning of the paths of the product's modules."""
DEVICE = os.environ.get("RELAX_TEST_DEVICE", "cpu")
"""Where tests that are marked `gpu` compute; `cuda` runs them alone, and conftest.py hides GPUs
otherwise."""


def _has_module(name: str) -> bool:
    try:
        return util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def mpiexec() -> Path:
    """The MPI launcher of this Python's environment; the system's own belongs to another MPI
    library."""
    return Path(sys.prefix) / "bin" / "mpiexec"


CHECKS: dict[str, tuple[Callable[[], bool], str]] = {
    "sglang": (lambda: _has_module("sglang"), "package sglang (env/setup.sh)"),
    "mpi": (
        lambda: _has_module("mpi4py") and mpiexec().exists(),
        "packages mpi4py and mpich (env/setup.sh)",
    ),
    "slurm": (lambda: shutil.which("sinfo") is not None, "a Slurm cluster: sinfo on PATH"),
    "bubblewrap": (lambda: shutil.which("bwrap") is not None, "bubblewrap: bwrap on PATH"),
    "podman": (
        lambda: all(map(shutil.which, ("podman", "runc", "newuidmap"))),
        "podman, runc and newuidmap on PATH",
    ),
    "chromium": (
        lambda: shutil.which("chromium") is not None,
        "chromium on PATH (apt-get install chromium)",
    ),
    "shellcheck": (lambda: shutil.which("shellcheck") is not None, "shellcheck on PATH"),
    "gcc": (lambda: shutil.which("gcc") is not None, "a C compiler: gcc on PATH"),
    "g++": (lambda: shutil.which("g++") is not None, "a C++ compiler: g++ on PATH"),
    "ffmpeg": (lambda: shutil.which("ffmpeg") is not None, "ffmpeg on PATH"),
    "torch": (lambda: _has_module("torch"), "package torch (env/setup.sh)"),
    "megatron": (lambda: _has_module("megatron.core"), "package megatron-core (env/setup.sh)"),
    "triton": (lambda: _has_module("triton"), "package triton (env/setup.sh)"),
    "transformers": (lambda: _has_module("transformers"), "package transformers (env/setup.sh)"),
    "h5py": (lambda: _has_module("h5py"), "package h5py (env/setup.sh)"),
    "pexpect": (lambda: _has_module("pexpect"), "package pexpect (env/setup.sh)"),
    "pyarrow": (lambda: _has_module("pyarrow"), "package pyarrow (env/setup.sh)"),
    "nixl": (
        lambda: any(map(_has_module, ("nixl_cu12", "nixl_cu13", "nixl"))),
        "package nixl-cu12 (env/setup.sh rdma)",
    ),
    "math_verify": (lambda: _has_module("math_verify"), "package math-verify (env/setup.sh)"),
    "gymnasium": (lambda: _has_module("gymnasium"), "package gymnasium (env/setup.sh dev)"),
    "reasoning_gym": (
        lambda: _has_module("reasoning_gym"),
        "package reasoning_gym (pip install reasoning_gym)",
    ),
    "qwen_vl_utils": (
        lambda: _has_module("qwen_vl_utils"),
        "package qwen-vl-utils (env/setup.sh dev)",
    ),
    "datasets": (lambda: _has_module("datasets"), "package datasets (env/setup.sh dev)"),
    "matplotlib": (lambda: _has_module("matplotlib"), "package matplotlib (env/setup.sh)"),
}


def requires(*names: str) -> None:
    """Skip the calling test, or the calling module, unless all of `names` (keys of CHECKS) are
    here.

    A missing name that the comma-separated RELAX_REQUIRE holds is a failure instead: where the
    installer put something, a silent skip would hide that it broke. Nothing heavy is imported.
    ValueError: an unknown name.
    """
    unknown = sorted(set(names) - set(CHECKS))
    if unknown:
        raise ValueError(
            f"requires: unknown {', '.join(unknown)}; known are {', '.join(sorted(CHECKS))}"
        )
    must = {name.strip() for name in os.environ.get("RELAX_REQUIRE", "").split(",")}
    for name in names:
        present, what = CHECKS[name]
        if present():
            continue
        if name in must:
            pytest.fail(f"RELAX_REQUIRE names {name}, but it is missing: {what}", pytrace=False)
        pytest.skip(f"needs {what}", allow_module_level=True)
