"""List the packages and GPUs that this machine has and lacks.

Exit code 78: a needed package or GPU is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

NEEDED = {
    "torch": "torch",
    "megatron.core": "megatron-core",
    "pytest": "pytest",
    "hypothesis": "hypothesis",
}
NEEDED |= {
    name: name
    for name in ("numpy", "psutil", "msgpack", "xxhash", "jsonargparse", "h5py", "safetensors")
}
"""Packages without which no program runs, by module."""
OPTIONAL = {
    "triton": ("triton", "the fused kernels"),
    "transformers": ("transformers", "the peer, and most tests of training"),
    "liger_kernel": ("liger-kernel", "the peer with fused layers"),
    "transformer_engine": ("transformer-engine", "actor.kernels: te"),
    "sglang": ("sglang", "the engine, for the cost of modes"),
    "sgl_kernel": ("sglang-kernel", "the engine's kernels"),
    "mpi4py": ("mpi4py", "groups of several ranks"),
    "pyarrow": ("pyarrow", "prompts in parquet"),
}
"""Package and its use, by module."""


def has(module: str) -> bool:
    """Whether a module can be imported. It is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def version(package: str) -> str:
    """Version of an installed package, or "?"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "?"


def missing_options(device: str) -> Iterator[str]:
    """One line for each missing package or GPU that the check can do without."""
    for module, (package, use) in OPTIONAL.items():
        if not has(module):
            yield f"{package}: {use}"
    if has("mpi4py") and not Path(sys.prefix, "bin", "mpiexec").exists():
        yield "mpich: groups of several ranks (its wheel has the library and mpiexec)"
    gpus = 0
    if device == "cuda":
        import torch

        gpus = torch.cuda.device_count()
    if gpus < 1:
        yield "a GPU: meaningful figures"
    if gpus < 2:
        yield "a second GPU: NCCL between ranks, and tensor, pipeline and data parallelism"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    missing = [package for module, package in NEEDED.items() if not has(module)]
    if missing:
        print(f"found: needed and missing: {', '.join(missing)}; install them for this Python")
        return 78
    import torch

    software = f"Python {platform.python_version()}, torch {torch.__version__}"
    print(f"found: {software}, {os.cpu_count()} cores")
    if device == "cuda":
        if not torch.cuda.is_available():
            print("found: no GPU that torch can use; --device cpu --small needs none")
            return 78
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        print(f"found: {', '.join(names)}, CUDA {torch.version.cuda}")
    packages = [package for module, (package, _) in OPTIONAL.items() if has(module)]
    versions = [f"{package} {version(package)}" for package in packages]
    print(f"found: {', '.join(versions) or 'no optional package'}")
    for line in missing_options(device):
        print(f"missing: {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
