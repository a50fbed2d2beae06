"""What a machine has for this code, and what it lacks; exit code 78 if it cannot even begin."""

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
"""Module -> package: without these nothing runs."""
WANTED = {
    "triton": ("triton", "kernels of our own"),
    "transformers": ("transformers", "the peer, and most tests of training"),
    "liger_kernel": ("liger-kernel", "the peer with fused layers"),
    "transformer_engine": ("transformer-engine", "actor.kernels: te"),
    "sglang": ("sglang", "the engine: what modes cost"),
    "sgl_kernel": ("sglang-kernel", "the engine's kernels"),
    "mpi4py": ("mpi4py", "groups of several ranks"),
    "pyarrow": ("pyarrow", "prompts in parquet"),
}


def has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "?"


def lacking(device: str) -> Iterator[str]:
    """What is missing although the check goes on, one line each."""
    for module, (package, use) in WANTED.items():
        if not has(module):
            yield f"{package}: {use}"
    if has("mpi4py") and not Path(sys.prefix, "bin", "mpiexec").exists():
        yield "mpich: groups of several ranks (its wheel has the library and mpiexec)"
    if device == "cuda":
        import torch

    there = torch.cuda.device_count() if device == "cuda" else 0
    if there < 1:
        yield "a GPU: figures that mean something"
    if there < 2:
        yield "a second GPU: NCCL between ranks, and tensor, pipeline and data parallelism there"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    if missing := [package for module, package in NEEDED.items() if not has(module)]:
        print(
            f"found: needed and missing: {', '.join(missing)}; put them beside torch, on this "
            "Python's path"
        )
        return 78
    import torch

    print(
        f"found: Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} "
        "cores"
    )
    if device == "cuda":
        if not torch.cuda.is_available():
            print(
                "found: no GPU that torch can use; --device cpu --small goes through everything "
                "without one"
            )
            return 78
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        print(f"found: {', '.join(names)}, CUDA {torch.version.cuda}")
    there = [
        f"{package} {version(package)}" for module, (package, _) in WANTED.items() if has(module)
    ]
    print(f"found: {', '.join(there) or 'no optional package'}")
    for line in lacking(device):
        print(f"missing: {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
