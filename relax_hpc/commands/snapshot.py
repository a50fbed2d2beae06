"""Snapshot of the code and the environment of a run at its submission, so that all its later jobs
run the same code."""

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
_CHECKOUT_FOLDERS = ("slurm", "examples")
"""Folders next to the package in a checkout. A wheel has them inside the package."""


def take_snapshot(run: RunDir) -> None:
    """Copy the package to <run>/code, and describe the environment in <run>/submit. Existing files
    are not replaced."""
    run.submit.mkdir(exist_ok=True)
    if not run.code.exists():
        copy_code(Path(relax_hpc.__file__).resolve().parents[1], run.code)
    if not (run.submit / "environment.txt").exists():
        packages = sorted(
            f"{package.name}=={package.version}" for package in metadata.distributions()
        )
        write_atomic(run.submit / "environment.txt", ("\n".join(packages) + "\n").encode())
        write_json(run.submit / "made_with.json", _made_with())


def keep_code(run: RunDir, source: Path) -> Path:
    """Copy the package in ``source`` into the run, for groups that are upgraded to it. Returns the
    folder of the copy."""
    numbers = (
        int(path.suffix[1:]) for path in run.root.glob("code.*") if path.suffix[1:].isdecimal()
    )
    target = run.root / f"code.{max(numbers, default=0) + 1:06d}"
    copy_code(source, target)
    return target


def copy_code(source: Path, target: Path) -> None:
    """Copy the package relax_hpc from ``source``, and from a checkout also its templates and
    examples. If a file cannot be copied, raise OSError or RelaxError and remove the copy."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        _copy_trees(source, temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    # Compile once here. Otherwise each process compiles at its start, and at every start if it may
    # not write next to the code.
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
        # Next to an installed package, a folder with such a name belongs to another project.
        is_wheel = (source / "relax_hpc" / "templates").is_dir()
        for name in _CHECKOUT_FOLDERS:
            if (source / name).is_dir() and not is_wheel:
                shutil.copytree(
                    source / name, target / name, ignore=ignored, copy_function=copy_file
                )
    except shutil.Error as error:
        # shutil.Error lists all files with texts, but without errno.
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


def _git(root: Path, *arguments: str) -> str:
    """Output of git in the folder of the code; empty if it is no checkout."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=_GIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""
