"""Import every package of the GPU lock and every module of relax_hpc, and write the result.

`gpu_lock.sh` calls it with the environment's Python and a stub of libcuda.so.1. Exit code 1: a
module cannot be imported and is not in `EXCEPTIONS`, or is in it although it can be imported.

A child process imports the modules one after the other. If a module ends it or takes too long, the
next child continues with the module after it. Modules that failed are tried again alone.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "env/requirements-gpu.txt"
MODULE_DEADLINE_S = 600.0
DEEP_MODULES = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.tokenizer_manager",
    "sglang.srt.model_executor.model_runner",
    "megatron.core.models.gpt",
    "megatron.core.transformer.moe.moe_layer",
    "torch.distributed.checkpoint",
    "torch.nn.attention.varlen",
)
"""Modules below the top level that roles import on GPUs."""
_HOOK = "torch_memory_saver_hook_mode_"
_PRELOADED = "a library that SGLang puts into LD_PRELOAD, no Python module"
EXCEPTIONS = {
    "deep_ep": "looks for a GPU when it is imported; SGLang expects that error",
    f"{_HOOK}preload": f"{_PRELOADED}; for CUDA 12",
    f"{_HOOK}preload_cu12": f"{_PRELOADED}; for CUDA 12",
    f"{_HOOK}preload_cu13": _PRELOADED,
    f"{_HOOK}torch": f"{_PRELOADED}; for CUDA 12",
    f"{_HOOK}torch_cu12": f"{_PRELOADED}; for CUDA 12",
    f"{_HOOK}torch_cu13": _PRELOADED,
}
"""Module that cannot be imported without a GPU -> the reason."""


def canonical(name: str) -> str:
    """PEP 503 form of a package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def top_modules(package: Distribution) -> set[str]:
    """Names of the modules and packages that a distribution has at its top level."""
    names = set()
    for file in package.files or ():
        first, *others = file.parts
        if first.endswith((".dist-info", ".data", ".egg-info", ".libs")) or first == "..":
            continue
        if not others and first.endswith(".py"):
            names.add(first.removesuffix(".py"))
        elif not others and ".so" in first:
            names.add(first.partition(".")[0])
        elif others == ["__init__.py"]:
            names.add(first)
    return {name for name in names if name.isidentifier()}


def lock_modules() -> list[str]:
    """Top-level modules of all pins. SystemExit: a pin is not installed."""
    pins = re.findall(r"^([^#\s=]+)==", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    installed = {
        canonical(package.metadata["Name"]): package
        for package in distributions(path=[sysconfig.get_path("purelib")])
    }
    missing = [pin for pin in pins if canonical(pin) not in installed]
    if missing:
        sys.exit(f"not installed: {', '.join(missing)}")
    modules: set[str] = set()
    for pin in pins:
        modules |= top_modules(installed[canonical(pin)])
    return sorted(modules)


def own_modules() -> list[str]:
    """All modules of relax_hpc, except programs that start when they are imported."""
    names = []
    for path in sorted((ROOT / "relax_hpc").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] != "__main__" and "templates" not in parts:
            names.append(".".join(parts).removesuffix(".__init__"))
    return names


def import_all(names: Sequence[str]) -> None:
    """Import modules in this process, and print a line of JSON after each."""
    # Modules may print too. Their output goes to standard error.
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:  # some modules call sys.exit
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            print(json.dumps({"module": name, "error": text}), file=report, flush=True)
        else:
            print(json.dumps({"module": name, "error": ""}), file=report, flush=True)


def find_failures(names: Sequence[str]) -> dict[str, str]:
    """Module -> error of each module that cannot be imported.

    A module that fails after others is imported alone, because some libraries cannot be loaded
    together, such as the UCX of NIXL and that of the system.
    """
    errors = {}
    for name in first_failures(names):
        errors |= first_failures([name])
    return errors


def first_failures(names: Sequence[str]) -> dict[str, str]:
    """Module -> error of each module whose import fails after those before it."""
    errors = {}
    pending = list(names)
    while pending:
        finished = 0
        for record in child_records(pending):
            finished += 1
            if record["error"]:
                errors[record["module"]] = record["error"]
        if finished < len(pending):
            errors[pending[finished]] = "its import ended the process, or took too long"
        pending = pending[finished + 1 :]
    return errors


def child_records(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Lines of a child process that imports modules. It is killed if a module takes too long."""
    command = [sys.executable, str(Path(__file__).resolve()), "--import", *names]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        # UCX's handler of signals may fail itself, for ever.
        env={**os.environ, "UCX_HANDLE_ERRORS": "none"},
    )
    assert process.stdout is not None
    with process:
        while True:
            deadline = threading.Timer(MODULE_DEADLINE_S, process.kill)
            deadline.start()
            line = process.stdout.readline()
            deadline.cancel()
            if not line:
                return
            yield json.loads(line)


def describe(modules: int, errors: dict[str, str], arguments: argparse.Namespace) -> dict[str, Any]:
    """The result to store."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    packages = list(distributions(path=[sysconfig.get_path("purelib")]))
    return {
        "commit": subprocess.check_output(git, text=True).strip(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, glibc {platform.libc_ver()[1]}",
        "command": "tools/nightly/gpu_lock.sh",
        "lock_sha256": hashlib.sha256(LOCK.read_bytes()).hexdigest(),
        "python": platform.python_version(),
        "packages": len(packages),
        "environment_bytes": folder_bytes(Path(sys.prefix)),
        "setup_s": arguments.setup_s,
        "run_on_cpus_s": arguments.run_s,
        "nvcc": arguments.nvcc,
        "modules": modules,
        "errors": errors,
        "exceptions": EXCEPTIONS,
    }


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder, each inode once."""
    sizes = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--import", nargs="+", dest="names", help="import these in this process")
    parser.add_argument("--setup-s", type=int, help="seconds that the installation took")
    parser.add_argument("--run-s", type=int, help="seconds of the run on CPUs")
    parser.add_argument("--nvcc", help="release of nvcc, which has compiled a kernel")
    parser.add_argument("--out", type=Path, help="file of the result")
    arguments = parser.parse_args()
    if arguments.names:
        import_all(arguments.names)
        return 0
    names = [*lock_modules(), *DEEP_MODULES, *own_modules()]
    errors = find_failures(names)
    result = describe(len(names), errors, arguments)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    unexpected = errors.keys() ^ EXCEPTIONS.keys()
    for name in sorted(unexpected):
        print(f"{name}: {errors.get(name, 'can be imported: remove it from EXCEPTIONS')}")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
