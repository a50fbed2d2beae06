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
from relax_hpc.ops.checks.machine import FACTS_FILE, machine_problems, node_problems, runs_here
from relax_hpc.ops.doctor.finding import Finding, error, ok, warning
from relax_hpc.rollout.engines.sglang.toolchain import compilers

_TIMEOUT_S = 10.0
_THIS_HOST = " (this host; doctor --deep checks the nodes)"


def check_requirements(config: Config, is_node: bool = False) -> Iterator[Finding]:
    """Compare this host, or the nodes if their facts are known, with the minimum requirements.
    ``is_node``: whether this host is the only node of the cluster.

    If this host runs the roles, `check_settings` has the fatal ones, so that they stop
    `relax-hpc run` too.
    """
    if runs_here(config):
        problems = machine_problems(config)
        yield from (warning(str(problem)) for problem in problems if not problem.is_fatal)
        return
    known, scope = node_problems(config), f" (facts of the nodes in {FACTS_FILE})"
    if known is None and is_node:
        known, scope = machine_problems(config), " (this host, the only node)"
    if known is None:
        yield from (warning(f"{problem}{_THIS_HOST}") for problem in machine_problems(config))
        return
    for problem in known:
        severity = error if problem.is_fatal else warning
        yield severity(f"{problem}{scope}")


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
