"""Copies on a node's own disk of files that every process of the node reads.

The first process that needs a copy makes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import psutil

from relax_hpc.base.errors import DeadlineError
from relax_hpc.base.local_dir import local_folder
from relax_hpc.base.model_sizes import read_seconds
from relax_hpc.base.rundir import RunDir
from relax_hpc.config.schema import Config

_CHECK_S = 0.2


def model_directory(run: RunDir, config: Config) -> Path:
    """Directory with the run's first weights and tokenizer: the run's own, or a copy on this
    node."""
    if "model" not in config.site.stage:
        return run.model
    name = hashlib.sha256(f"{run.root}:{run.model.resolve()}".encode()).hexdigest()[:16]
    patience_s = config.liveness.start_timeout_s + read_seconds(run.model)
    return copy_once(run.model, local_folder() / f"model-{name}", patience_s)


def restart_in_local_environment(config: Config, module: str, arguments: list[str]) -> None:
    """Replace this process by ``module`` from a copy of the Python environment on this node.

    The copy is of the folder of this interpreter's virtual or conda environment, named by its path
    and its last change. The process keeps its pid and everything that it has inherited. The
    function returns if `site.stage` has no environment, or if this process already runs a copy.
    """
    source = Path(sys.prefix)
    if "environment" not in config.site.stage or source.parent == local_folder():
        return
    # Installing or removing a package changes the modification time of site-packages.
    packages = Path(sysconfig.get_path("purelib"))
    name = hashlib.sha256(f"{source}:{packages.stat().st_mtime_ns}".encode()).hexdigest()[:16]
    target = local_folder() / f"environment-{name}"
    copy_once(source, target, config.liveness.start_timeout_s, symlinks=True)
    python = str(target / Path(sys.executable).relative_to(source))
    # execv keeps the pid, so that Slurm and the supervisor still know the process.
    os.execv(python, [python, "-m", module, *arguments])


def copy_once(source: Path, target: Path, patience_s: float, symlinks: bool = False) -> Path:
    """Copy folder ``source`` to ``target``, which appears complete. Returns ``target``.

    One process of the node copies, and the others wait. If it dies, another one copies.
    ``symlinks``: copy links as links, else their targets. DeadlineError: there is no copy after
    ``patience_s`` seconds.
    """
    deadline = time.monotonic() + patience_s
    claim = target.with_name(f".{target.name}.claim")
    while not target.exists():
        if take_claim(claim):
            try:
                _copy(source, target, symlinks)
            finally:
                claim.unlink(missing_ok=True)
        elif time.monotonic() > deadline:
            raise DeadlineError(
                f"{target}: not copied within {patience_s:.0f} s; see whether its disk is full"
            )
        elif is_abandoned(claim):
            claim.unlink(missing_ok=True)
        else:
            time.sleep(_CHECK_S)
    return target


def _copy(source: Path, target: Path, symlinks: bool) -> None:
    # Another process may have finished the copy since the check, or may have removed our claim
    # because it took this process for dead.
    if target.exists():
        return
    temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        shutil.copytree(source, temporary, symlinks=symlinks, dirs_exist_ok=True)
        # rename(2) is atomic. It fails if another process has created the target before.
        temporary.rename(target)
    except OSError:
        if not target.exists():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def is_abandoned(claim: Path) -> bool:
    """Whether the process that holds the claim has ended."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return not psutil.pid_exists(int(claim.read_text()))
    return False


def take_claim(claim: Path) -> bool:
    """Create ``claim`` with the pid of this process. Returns whether it did not exist."""
    try:
        with os.fdopen(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(str(os.getpid()))
        return True
    except FileExistsError:
        return False
