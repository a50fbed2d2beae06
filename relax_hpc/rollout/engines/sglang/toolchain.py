"""The compilers with which an engine builds kernels on a node, when a kernel is needed there for
the first time.

SGLang 0.5.21 (`kernels/jit/utils/compile/toolchain.py`), tvm-ffi and flashinfer look for the CUDA
toolkit in CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda. They do not find the toolkit of the
wheels that `env/setup.sh gpu` installs, so CUDA_HOME of an engine names it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from relax_hpc.base.machine.gpu_vendors import VENDORS

DEFAULT_TOOLKIT = Path("/usr/local/cuda")
LINKS = ("lib64/libcudart.so", "lib64/stubs/libcuda.so")
"""Files that kernels are linked with. The wheels have them under other names, so `env/setup.sh`
adds links."""


def cuda_home(environment: Mapping[str, str]) -> Path:
    """Root of the CUDA toolkit that SGLang uses in ``environment``. It may not exist."""
    configured = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if configured:
        return Path(configured)
    nvcc = shutil.which("nvcc", path=environment.get("PATH"))
    return Path(nvcc).parent.parent if nvcc else DEFAULT_TOOLKIT


def has_compiler(toolkit: Path) -> bool:
    """Whether ``toolkit``, the root of a CUDA toolkit, has an nvcc that can be executed."""
    return os.access(toolkit / "bin/nvcc", os.X_OK)


def wheel_toolkit() -> Path | None:
    """Root of the newest CUDA toolkit in the installed wheels. None: no wheel has nvcc."""
    folders: list[str] = []
    for package in filter(None, (vendor.nvcc_package for vendor in VENDORS.values())):
        spec = find_spec(package)
        folders += (spec.submodule_search_locations or ()) if spec else ()
    toolkits: list[Path] = []
    for folder in folders:
        toolkits += filter(has_compiler, Path(folder).glob("cu[0-9]*"))
    return max(toolkits, key=lambda path: int(path.name.removeprefix("cu")), default=None)


def toolkit_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that an engine needs in addition to ``environment`` to find nvcc; empty if it finds
    nvcc without them, or if there is no nvcc."""
    if has_compiler(cuda_home(environment)):
        return {}
    toolkit = wheel_toolkit()
    return {"CUDA_HOME": str(toolkit)} if toolkit else {}


def compilers(environment: Mapping[str, str]) -> tuple[Path, list[str]]:
    """The nvcc of an engine that is started with ``environment``, and a line for each missing file
    or program."""
    toolkit = cuda_home({**environment, **toolkit_variables(environment)})
    missing: list[str] = []
    if not has_compiler(toolkit):
        missing.append(
            f"engines: found no nvcc (CUDA_HOME, CUDA_PATH, PATH, {DEFAULT_TOOLKIT}, installed "
            "wheels), with which SGLang compiles kernels; load a CUDA module in site.modules, or "
            "install by env/setup.sh gpu"
        )
    elif toolkit == wheel_toolkit():
        missing += [
            f"engines: found no {toolkit / name}, with which SGLang links kernels; call "
            "env/setup.sh gpu again (it needs gcc)"
            for name in LINKS
            if not (toolkit / name).exists()
        ]
    # relax_hpc.base.machine checks the C compiler, which Triton needs too.
    name = environment.get("CXX") or "c++"
    if shutil.which(name.split()[0], path=environment.get("PATH")) is None:
        missing.append(
            f"engines: found no compiler {name!r} (CXX, or c++ on PATH), which nvcc uses; install "
            "g++, or load a module in site.modules"
        )
    return toolkit / "bin/nvcc", missing
