"""Triton kernels as compiled code, without a GPU: variants, spilled registers, narrow accesses."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.effort import effort
from tests.helpers import kernel_compilation
from tests.helpers.kernel_launches import Variant, record
from tests.helpers.training_helpers import (  # noqa: F401
    LR,
    batch,
    one_rank_fixture,
    rows,
    tiny_fixture,
    trainer,
)
from tests.requirements import requires

requires("triton", "megatron")
pytestmark = [pytest.mark.usefixtures("one_rank")]
STORE = "python -m tests.helpers.kernel_compilation"


def run_compiler(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Output of Python with ``arguments``, in a process that does not interpret kernels. Triton
    keeps them in ``cache``."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        capture_output=True,
        text=True,
        cwd=kernel_compilation.ROOT,
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)},
        timeout=600,
    )


def test_the_stored_figures_are_those_of_the_kernels():
    """Without compiling: sources, launches and Triton are those of the stored figures."""
    stored = json.loads(kernel_compilation.STORED.read_text())
    functions, _ = kernel_compilation.record_launches()
    current = kernel_compilation.inputs(functions)
    assert current == stored["inputs"], f"the kernels have changed: {STORE}"
    assert kernel_compilation.figures_digest(stored["kernels"]) == stored["figures"], STORE
    assert {name.partition(",")[0] for name in stored["kernels"]} >= {"_terms", "_rotate_heads"}
    for name, figures in stored["kernels"].items():
        for architecture in kernel_compilation.ARCHITECTURES:
            compiled = kernel_compilation.Compiled(**figures[f"sm_{architecture}"])
            assert compiled.faults(architecture) == [], name


def test_every_kernel_is_launched():
    """Each function with `@triton.jit` that no other kernel calls is in a recorded launch."""
    functions, _ = kernel_compilation.record_launches()
    launched = {variant.kernel for variant in functions}
    kernels: set[str] = set()
    called: set[str] = set()
    for path in kernel_compilation.kernel_sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            if any("triton.jit" in ast.unparse(each) for each in node.decorator_list):
                kernels.add(node.name)
                calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
                called |= {ast.unparse(call.func) for call in calls}
    assert kernels - called == launched


@pytest.mark.skipif(not effort(0, 1), reason="compiles all kernels for a minute: env/test.sh --all")
def test_compiled_again_the_kernels_have_the_stored_figures(tmp_path: Path):
    result = run_compiler(tmp_path, "-m", "tests.helpers.kernel_compilation", "--check")
    assert result.returncode == 0, result.stdout + result.stderr


BAD_KERNELS = """
from tests.helpers import kernel_compilation
from tests.helpers.kernel_launches import _launch_adam, record
from relax_hpc.training import triton_adam

def faults():
    with record(run=False) as variants:
        _launch_adam(2**16, first)
    [(variant, function)] = variants.items()
    return kernel_compilation.compile_variant(variant, function, 90).faults(90)

first = 1
print("unaligned:", *faults())
first, triton_adam._BLOCK = 0, 8192
print("large:", *faults())
"""


def test_unaligned_data_and_spilled_registers_are_found(tmp_path: Path):
    """Tensors that begin at the second element, and four times as many elements for a thread."""
    result = run_compiler(tmp_path, "-c", BAD_KERNELS)
    lines = result.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["unaligned", "large"], result.stderr
    assert "in narrow accesses: p, g = tl.load(P + at" in lines[0]
    assert "in narrow accesses: tl.store(P + at" in lines[0] and "spills" not in lines[0]
    assert "large: spills" in lines[1] and "narrow" not in lines[1]


def test_packs_of_new_lengths_compile_no_kernel(tiny: Path):
    """Numbers of tokens with and without the factor 16, and another salt of the optimizer's
    rounding in each step."""
    trained = trainer(tiny, kernels="fused", optimizer={"states": "bfloat16"})
    counts: list[int] = []
    known: set[Variant] = set()
    for count, seed in ((3, 6), (2, 1), (1, 5), (3, 1)):
        samples = rows(count, seed=seed)
        counts.append(sum(len(sample["token_ids"]) for sample in samples))
        with record(run=True) as variants:
            trained.model.forward_logprobs([batch(samples)], 0.9)
            trained.accumulate([batch(samples)])
            trained.step(LR)
        assert not known or set(variants) <= known, counts
        known |= set(variants)
    assert counts == [32, 25, 13, 40]
    assert {variant.kernel for variant in known} >= {"_terms", "_norm_backward", "_adamw"}
