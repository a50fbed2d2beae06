"""Checks of what GPUs need from a host: a driver for torch's CUDA, and compilers for engines."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from relax_hpc.cluster.slurm.program_output import run_program
from relax_hpc.config.schema import Config
from relax_hpc.ops.doctor.finding import Finding, ok, warning
from relax_hpc.rollout.engines.sglang.toolchain import compilers

OLDEST_DRIVER = {12: 525, 13: 580}
"""CUDA's major version -> the oldest branch of the driver that runs it.

Source: table 2 of NVIDIA's "CUDA Compatibility" (minor version compatibility). Package cuda-compat
lets data-centre GPUs run a newer CUDA on an older driver.
"""
_TIMEOUT_S = 10.0


def check_gpus(config: Config) -> Iterator[Finding]:
    """Check this host's driver and compilers, for runs on GPUs that use this environment."""
    if (
        config.model.device != "cuda"
        or config.site.python
        or config.site.container.runtime != "none"
    ):
        return
    yield from map(warning, driver_problems(torch_cuda(), _driver_version()))
    if any(engine_roles(config).intersection(group.roles) for group in config.groups.values()):
        compiler, missing = describe_compiler()
        scope = "" if config.layout == "local" else " (this host; doctor --deep checks the nodes)"
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


def torch_cuda() -> str:
    """CUDA version of the installed torch, such as `13.0`; empty without CUDA or torch.

    It is read from torch's source, because an import takes seconds.
    """
    spec = find_spec("torch")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    for folder in folders:
        file = Path(folder) / "version.py"
        text = file.read_text() if file.exists() else ""
        match = re.search(r"^cuda\b.*?['\"]([\d.]+)['\"]", text, re.MULTILINE)
        if match:
            return match[1]
    return ""


def driver_problems(cuda: str, driver: str) -> Iterator[str]:
    """Problems of torch with CUDA ``cuda`` on ``driver`` (such as `570.86.15`).

    An empty version is not checked.
    """
    oldest = OLDEST_DRIVER.get(int(cuda.partition(".")[0])) if cuda else None
    if driver and oldest and int(driver.partition(".")[0]) < oldest:
        yield (
            f"GPUs: found driver {driver}, which cannot run CUDA {cuda} of the installed torch, "
            f"allowed: {oldest} or newer; update the driver, load cuda-compat in site.modules, or "
            "install a torch of an older CUDA"
        )


def _driver_version() -> str:
    """Version of this host's NVIDIA driver; empty if it is unknown or not installed."""
    try:
        result = run_program(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], _TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    version = result.stdout.strip().partition("\n")[0].strip()
    return version if re.fullmatch(r"\d+(\.\d+)*", version) else ""


def node_report(engines: bool) -> dict[str, Any]:
    """Section of a node's report: `warnings` and a sentence on the `compiler`.

    The warnings are about the driver and, with ``engines``, about compilers.
    """
    compiler, missing = describe_compiler() if engines else ("", [])
    return {
        "warnings": [*driver_problems(torch_cuda(), _driver_version()), *missing],
        "compiler": compiler,
    }
