"""Snapshot of a run's code and settings at its submission, so that whatever is submitted again runs
the same code."""

from __future__ import annotations

import compileall
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from py_compile import PycInvalidationMode

import relax_hpc
from relax_hpc.base.errors import RelaxError
from relax_hpc.base.rundir import RunDir, write_atomic, write_json

_GIT_S = 10.0
_BESIDE = ("slurm", "examples")
"""Folders of a checkout, beside the package, that a wheel has inside of the package."""


def take_snapshot(run: RunDir) -> None:
    """Copy the package to <run>/code and describe the environment in <run>/submit; what is there
    already stays."""
    run.submit.mkdir(exist_ok=True)
    if not run.code.exists():
        copy_code(Path(relax_hpc.__file__).resolve().parents[1], run.code)
    if not (run.submit / "environment.txt").exists():
        packages = sorted(f"{found.name}=={found.version}" for found in metadata.distributions())
        write_atomic(run.submit / "environment.txt", ("\n".join(packages) + "\n").encode())
        write_json(run.submit / "made_with.json", _made_with())


def keep_code(run: RunDir, source: Path) -> Path:
    """Copy the package below ``source`` into the run, for groups that are upgraded to it; the
    folder of the copy."""
    numbers = (
        int(path.suffix[1:]) for path in run.root.glob("code.*") if path.suffix[1:].isdecimal()
    )
    target = run.root / f"code.{max(numbers, default=0) + 1:06d}"
    copy_code(source, target)
    return target


def copy_code(source: Path, target: Path) -> None:
    """Copy the package relax_hpc out of ``source``; of a checkout also the templates and examples
    beside it. OSError or RelaxError, with nothing left behind: a file cannot be copied."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        _copy_trees(source, temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    # Once, here, and not in every process of every rank, at each of their starts where none may
    # write beside the code.
    for name in ("relax_hpc", "examples"):
        if (temporary / name).is_dir():
            compileall.compile_dir(
                temporary / name, quiet=2, invalidation_mode=PycInvalidationMode.TIMESTAMP
            )
    temporary.rename(target)


def _copy_trees(source: Path, target: Path) -> None:
    failures: list[OSError] = []

    def copy_file(from_path: str, to_path: str) -> str:
        try:
            return str(shutil.copy2(from_path, to_path))
        except OSError as error:
            cause = error.errno or 0
            failures.append(OSError(cause, os.strerror(cause), to_path))
            raise

    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    try:
        shutil.copytree(
            source / "relax_hpc", target / "relax_hpc", ignore=ignored, copy_function=copy_file
        )
        # Beside an installed package, a folder of such a name belongs to another project.
        is_wheel = (source / "relax_hpc" / "templates").is_dir()
        for name in _BESIDE:
            if (source / name).is_dir() and not is_wheel:
                shutil.copytree(
                    source / name, target / name, ignore=ignored, copy_function=copy_file
                )
    except shutil.Error as error:
        # It lists every file, as texts without errno.
        _, path, reason = error.args[0][0]
        raise (
            failures[0] if failures else RelaxError(f"{path}: cannot be copied: {reason}")
        ) from error


def _made_with() -> dict[str, str]:
    root = Path(relax_hpc.__file__).resolve().parent.parent
    return {
        "relax_hpc": relax_hpc.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "git_commit": _git(root, "rev-parse", "HEAD"),
        "git_changes": _git(root, "status", "--porcelain", "--", "relax_hpc", "examples"),
        "command": json.dumps(sys.argv),
    }


def _git(root: Path, *words: str) -> str:
    """Output of git on the code; empty where it is no checkout."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=_GIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""
