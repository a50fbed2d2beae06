"""Checks of modules and staging on this host; `doctor --deep` checks the nodes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from relax_hpc.base.model_sizes import weights_bytes
from relax_hpc.cluster.slurm.program_output import run_program
from relax_hpc.config.schema import Config
from relax_hpc.net.rendezvous.process import clean_environment
from relax_hpc.ops.doctor.finding import Finding, error, warning

_NO_MODULES = 9
_LOAD_MODULES = "type module >/dev/null 2>&1 || exit {missing}\nmodule load {names} 2>&1"
MODULES_TIMEOUT_S = 60.0


def check_staging(config: Config) -> Iterator[Finding]:
    """Check that modules can be loaded, and that local_dir has space for staged files."""
    if config.site.modules:
        yield from _load_modules(config.site.modules, config.site.setup)
    # The disks of a cluster's nodes are checked by `doctor --deep`.
    if config.layout == "local" and config.site.stage:
        yield from _staging_space(config)


def _load_modules(names: list[str], setup: list[str]) -> Iterator[Finding]:
    """Load modules as a batch script does, after the lines of site.setup (such as `module use`)."""
    load = _LOAD_MODULES.format(missing=_NO_MODULES, names=shlex.join(names))
    setup_lines = ["{ :", *setup, "} >/dev/null 2>&1"] if setup else []
    command = ["bash", "-lc", "\n".join([*setup_lines, load])]
    listed = ", ".join(names)
    try:
        result = run_program(command, MODULES_TIMEOUT_S, clean_environment())
    except (OSError, subprocess.TimeoutExpired) as problem:
        yield warning(f"site.modules: {listed} not checked: {problem}")
        return
    if result.returncode == _NO_MODULES:
        yield warning(
            f"site.modules: {listed} not checked, because this host has no `module` command; run "
            "doctor --deep"
        )
    # Environment Modules (Tcl) before version 4 exits with 0 after an error and only prints it.
    elif result.returncode or "unable to locate" in result.stdout.lower():
        # Lines of site.setup may work on nodes only, and without them a module may be missing.
        severity = warning if setup else error
        yield severity(
            f"site.modules: found {listed}, which cannot be loaded on this host: "
            f"{_module_error(result.stdout)}; see module avail"
        )


def _module_error(output: str) -> str:
    """The line of ``output`` that reports an error, or the whole output on one line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for line in lines:
        if "error" in line.lower() or "unable" in line.lower():
            return line
    return " ".join(lines)


def _staging_space(config: Config) -> Iterator[Finding]:
    """Check that local_dir is writable and has space for the files that are staged there."""
    staged, model_path = config.site.stage, config.model.path
    folder = Path(config.site.local_dir or tempfile.gettempdir())
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield error(
            f"site.local_dir: found {folder}, but you cannot write in {existing}; name another "
            "directory"
        )
        return
    needed_bytes = weights_bytes(model_path) if "model" in staged and model_path else 0
    if "environment" in staged:
        needed_bytes += sum(path.lstat().st_size for path in Path(sys.prefix).rglob("*"))
    disk = os.statvfs(existing)
    free_bytes = disk.f_bavail * disk.f_frsize
    if free_bytes < needed_bytes:
        yield error(
            f"site.local_dir: found {free_bytes / 2**30:.1f} GiB free in {existing}, allowed: at "
            f"least {needed_bytes / 2**30:.1f} GiB for site.stage ({', '.join(staged)}); name a "
            "larger disk, or stage less"
        )
