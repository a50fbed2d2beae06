"""Checks of what a run needs from a host: minimum requirements, and compilers for engines."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from relax_hpc.base.machine.own_environment import own_problems
from relax_hpc.cluster.slurm.program_output import run_program
from relax_hpc.config.gpus import gpu_vendor
from relax_hpc.config.schema import Config
from relax_hpc.ops.checks.machine import machine_problems, runs_here
from relax_hpc.ops.doctor.finding import Finding, ok, warning
from relax_hpc.rollout.engines.sglang.toolchain import compilers

_TIMEOUT_S = 10.0
_THIS_HOST = " (this host; doctor --deep checks the nodes)"


def check_requirements(config: Config) -> Iterator[Finding]:
    """Compare this host with the minimum requirements. If it runs the roles, `check_settings` has
    the fatal ones, so that they stop `relax-hpc run` too."""
    for problem in machine_problems(config):
        if not runs_here(config):
            yield warning(f"{problem}{_THIS_HOST}")
        elif not problem.is_fatal:
            yield warning(str(problem))


def check_compilers(config: Config) -> Iterator[Finding]:
    """Check this host's compilers, for engines on GPUs that use this environment."""
    site, groups = config.site, config.groups.values()
    uses_this_host = not site.python and site.container.runtime == "none"
    if config.model.device != "cuda" or not uses_this_host or not gpu_vendor(config).nvcc_package:
        return
    if any(engine_roles(config).intersection(group.roles) for group in groups):
        compiler, missing = describe_compiler()
        scope = "" if config.layout == "local" else _THIS_HOST
        yield from (warning(f"{problem}{scope}") for problem in missing)
        if not missing:
            yield ok(compiler + scope)


def engine_roles(config: Config) -> set[str]:
    """Roles that start SGLang servers."""
    return {"genrm", "rollout"} if config.rollout.engine.kind == "sglang" else {"genrm"}


def describe_compiler() -> tuple[str, list[str]]:
    """Sentence on the compiler that engines of this environment use, and missing programs."""
    nvcc, missing = compilers(os.environ)
    if missing:
        return "", missing
    return f"engines: will compile kernels with {nvcc} ({_cuda_release(nvcc)})", []


def _cuda_release(nvcc: Path) -> str:
    try:
        output = run_program([str(nvcc), "--version"], _TIMEOUT_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "its version cannot be read"
    match = re.search(r"release (\d+\.\d+)", output)
    return f"CUDA {match[1]}" if match else "unknown version"


def node_report(uses: Sequence[str], engines: bool) -> dict[str, Any]:
    """Section of a node's report: `problems`, `warnings` and a sentence on the `compiler`.

    ``uses``: of the node, see `find_problems`; ``engines``: whether to check compilers of engines.
    """
    problems = own_problems(uses)
    compiler, missing = describe_compiler() if engines else ("", [])
    return {
        "problems": [str(problem) for problem in problems if problem.is_fatal],
        "warnings": [*(str(problem) for problem in problems if not problem.is_fatal), *missing],
        "compiler": compiler,
    }
