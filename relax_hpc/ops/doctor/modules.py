"""Findings about modules and staging from this host; `doctor --deep` looks from the nodes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from relax_hpc.base.model_sizes import weights_bytes
from relax_hpc.cluster.slurm.program_output import ask
from relax_hpc.config.schema import Config
from relax_hpc.net.rendezvous.process import clean_environment
from relax_hpc.ops.doctor.finding import Finding, error, warning

_NO_MODULES = 9
_LOAD_MODULES = "type module >/dev/null 2>&1 || exit {missing}\nmodule load {names} 2>&1"
MODULES_TIMEOUT_S = 60.0


def check_staging(config: Config) -> Iterator[Finding]:
    """Modules that cannot be loaded, and a local_dir without room for what is staged there."""
    if config.site.modules:
        yield from _modules(config.site.modules, config.site.setup)
    # Of a cluster's nodes this host's disks say nothing.
    if config.layout == "local" and config.site.stage:
        yield from _room(config)


def _modules(names: list[str], setup: list[str]) -> Iterator[Finding]:
    """Load modules as a batch script does: after the site's lines, which may say where modules are
    (`module use`)."""
    load = _LOAD_MODULES.format(missing=_NO_MODULES, names=shlex.join(names))
    before = ["{ :", *setup, "} >/dev/null 2>&1"] if setup else []
    command, listed = ["bash", "-lc", "\n".join([*before, load])], ", ".join(names)
    try:
        done = ask(command, MODULES_TIMEOUT_S, clean_environment())
    except (OSError, subprocess.TimeoutExpired) as problem:
        yield warning(f"site.modules: {listed} not checked: {problem}")
        return
    if done.returncode == _NO_MODULES:
        yield warning(
            f"site.modules: {listed} not checked, as there is no `module` on this host; see doctor "
            "--deep"
        )
    # Tcl Modules before 4 end with 0 whatever happens, and say so only.
    elif done.returncode or "unable to locate" in done.stdout.lower():
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        said = next(
            (line for line in lines if "error" in line.lower() or "unable" in line.lower()),
            " ".join(lines),
        )
        # Lines that are meant for a node may fail on this host, and take the modules along.
        found = warning if setup else error
        yield found(
            f"site.modules: found {listed}, which cannot be loaded on this host: {said}; see "
            "module avail"
        )


def _room(config: Config) -> Iterator[Finding]:
    folder = Path(config.site.local_dir or tempfile.gettempdir())
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield error(
            f"site.local_dir: found {folder}, but {existing} is not writable for you; name another "
            "directory"
        )
        return
    needed = (
        weights_bytes(config.model.path)
        if "model" in config.site.stage and config.model.path
        else 0
    )
    if "environment" in config.site.stage:
        needed += sum(path.lstat().st_size for path in Path(sys.prefix).rglob("*"))
    room = os.statvfs(existing)
    if (free := room.f_bavail * room.f_frsize) < needed:
        yield error(
            f"site.local_dir: {existing} has {free / 2**30:.1f} GiB free, "
            f"{' and '.join(config.site.stage)} of "
            f"{needed / 2**30:.1f} are to be staged there; name a larger one, or stage less"
        )
