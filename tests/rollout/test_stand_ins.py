"""Modules that replace those of SGLang which need a GPU, on machines without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import torch
from relax_hpc.rollout.engines.sglang.cpu import stand_ins
stand_ins.install()
import sgl_kernel
print(sgl_kernel.__file__)
"""


@pytest.mark.parametrize("library", ["sm100/common_ops.abi3.so", "common_ops.abi3.so"])
def test_kernels_for_gpus_are_replaced_and_kernels_for_cpus_are_not(
    tmp_path: Path, library: str
) -> None:
    """The wheel of the GPU lock raises ImportError on a machine without the NVIDIA driver."""
    package = tmp_path / "sgl_kernel"
    (package / library).parent.mkdir(parents=True)
    (package / library).touch()
    is_for_gpus = library.startswith("sm")
    error = "raise ImportError('libcuda.so.1: cannot open shared object file')"
    (package / "__init__.py").write_text(error if is_for_gpus else "")
    output = subprocess.check_output(
        [sys.executable, "-c", PROGRAM],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""},
        text=True,
        timeout=300,
    )
    stand_in = ROOT / "relax_hpc/rollout/engines/sglang/cpu/kernel.py"
    expected = stand_in if is_for_gpus else package / "__init__.py"
    assert Path(output.strip()) == expected
