"""Kernels compiled ahead of time, without a GPU: registers, spills, shared memory and memory accesses
of each variant that training launches.

    python -m tests.helpers.kernel_compilation          # compile all, print and store the figures
    python -m tests.helpers.kernel_compilation --only _norm_backward

Triton's wheel contains the compiler and ptxas. `tests/training/test_kernel_variants.py` compares
the stored figures with the code.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import linecache
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "tests/training/compiled_kernels.json"
ARCHITECTURES = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}
"""Names in ptxas, as Triton calls it."""
SHARED_LIMITS_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Most shared memory of a block (CUDA programming guide, table of compute capabilities)."""
WIDEST_ACCESS_BYTES = 16
_LOCATION = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)")
_FILE = re.compile(r'\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?')
_ACCESS = re.compile(r"\b(?:ld|st)\.global\S*?(?:\.v([248]))?\.[bufs](\d+)\s")


@dataclass(frozen=True)
class Compiled:
    """Figures of a variant on one architecture."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    instructions: int
    """Instructions of the PTX code, all branches together."""
    narrow_lines: dict[str, int] = field(default_factory=dict)
    """Source lines that move more than 16 bytes of a thread in accesses of less than 16 bytes: these
    bytes. Contiguous data would need fewer accesses."""

    def faults(self, architecture: int) -> list[str]:
        """What must not be, one phrase each."""
        faults = []
        if self.spill_bytes:
            faults.append(f"spills {self.spill_bytes} bytes of registers")
        if self.shared_bytes > SHARED_LIMITS_BYTES[architecture]:
            faults.append(f"needs {self.shared_bytes} bytes of shared memory")
        for line, moved_bytes in self.narrow_lines.items():
            faults.append(f"moves {moved_bytes} bytes of a thread in narrow accesses: {line}")
        return faults


def compile_variant(variant: Any, function: Any, architecture: int) -> Compiled:
    """Compile a `kernel_launches.Variant` of a `JITFunction`."""
    import triton
    from triton.compiler import ASTSource, make_backend

    from tests.helpers.kernel_launches import target

    source = ASTSource(
        fn=function,
        signature=dict(variant.signature),
        constexprs=dict(variant.constants),
        attrs={path: [list(pair) for pair in pairs] for path, pairs in variant.attributes},
    )
    options = make_backend(target(architecture)).parse_options(dict(variant.options))
    kernel = triton.compile(source, target=target(architecture), options=options.__dict__)
    ptx = kernel.asm["ptx"]
    registers, spill_bytes = _assemble(ptx, architecture)
    return Compiled(
        registers=registers,
        spill_bytes=spill_bytes,
        shared_bytes=kernel.metadata.shared,
        instructions=len(re.findall(r"^\s+(?:@%\w+\s+)?[a-z][\w.]*\s.*;$", ptx, re.MULTILINE)),
        narrow_lines=narrow_lines(ptx),
    )


def _assemble(ptx: str, architecture: int) -> tuple[int, int]:
    """Registers of a thread, and bytes of registers that ptxas stores to memory and loads."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "kernel.ptx")
        path.write_text(ptx)
        name = f"--gpu-name={ARCHITECTURES[architecture]}"
        command = [get_ptxas(architecture).path, "-v", name, str(path), "-o", os.devnull]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", text)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    assert registers and spills, text
    return int(registers[1]), int(spills[1]) + int(spills[2])


def narrow_lines(ptx: str) -> dict[str, int]:
    """See `Compiled.narrow_lines`. Only lines with `tl.load` or `tl.store` count: a sine reads a table
    in global memory."""
    files: dict[str, str] = {}
    for line in ptx.splitlines():
        declaration = _FILE.match(line)
        if declaration:
            number, folder, name = declaration.groups()
            files[number] = str(Path(folder, name)) if name else folder
    location = ("", 0)
    moved_bytes: Counter[tuple[str, int]] = Counter()
    for line in ptx.splitlines():
        if position := _LOCATION.match(line):
            location = (files.get(position[1], ""), int(position[2]))
        elif access := _ACCESS.search(line):
            size = int(access[1] or 1) * int(access[2]) // 8
            if size < WIDEST_ACCESS_BYTES:
                moved_bytes[location] += size
    lines = {}
    for (file, number), size in moved_bytes.items():
        text = linecache.getline(file, number).strip()
        if size > WIDEST_ACCESS_BYTES and ("tl.load(" in text or "tl.store(" in text):
            lines[text] = size
    return lines


# -- inputs and figures ----------------------------------------------------------------------------


def kernel_sources() -> list[Path]:
    """Modules of the package with Triton kernels."""
    modules = sorted((ROOT / "relax_hpc").rglob("*.py"))
    return [path for path in modules if "@triton.jit" in path.read_text()]


def inputs(variants: Mapping[Any, Any]) -> dict[str, Any]:
    """What the figures follow from: the sources, the variants and the version of Triton."""
    import triton

    digest = hashlib.sha256()
    for path in (*kernel_sources(), Path(__file__)):
        digest.update(path.read_bytes())
    for name in sorted(map(repr, variants)):
        digest.update(name.encode())
    return {"triton": triton.__version__, "sha256": digest.hexdigest()}


def figures_digest(kernels: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(kernels, sort_keys=True).encode()).hexdigest()


def record_launches() -> tuple[dict[Any, Any], dict[Any, str]]:
    """Variants of all launches with their functions, and the first launch of each."""
    from tests.helpers.kernel_launches import launches, record

    functions: dict[Any, Any] = {}
    names: dict[Any, str] = {}
    for name, launch in launches():
        with record(run=False) as variants:
            launch()
        for variant, function in variants.items():
            functions.setdefault(variant, function)
            names.setdefault(variant, f"{variant.kernel}, {name}")
    return functions, names


def compile_all(functions: Mapping[Any, Any], names: Mapping[Any, str]) -> tuple[Any, list[str]]:
    """Figures of all variants by name and architecture, and their faults. Triton's cache is empty."""
    kernels: dict[str, dict[str, Any]] = {}
    faults = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for variant, function in functions.items():
            for architecture in ARCHITECTURES:
                compiled = compile_variant(variant, function, architecture)
                name = f"{names[variant]}, sm_{architecture}"
                print(f"{name}: {asdict(compiled)}", flush=True)
                kernels.setdefault(names[variant], {})[f"sm_{architecture}"] = asdict(compiled)
                faults += [f"{name}: {fault}" for fault in compiled.faults(architecture)]
    return kernels, faults


def main() -> int:
    """0; 1 if a variant has a fault or, with --check, other figures than the stored ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="compile kernels that match; store nothing")
    parser.add_argument("--check", action="store_true", help="compare with the stored figures")
    options = parser.parse_args()
    functions, names = record_launches()
    if options.only:
        functions = {
            key: value for key, value in functions.items() if re.search(options.only, names[key])
        }
    kernels, faults = compile_all(functions, names)
    if options.check and json.loads(STORED.read_text())["kernels"] != kernels:
        faults.append(f"{STORED.name} has other figures")
    for fault in faults:
        print(f"FAULT {fault}")
    if not (faults or options.only or options.check):
        stored = {"inputs": inputs(functions), "figures": figures_digest(kernels)}
        STORED.write_text(json.dumps(stored | {"kernels": kernels}, indent=1) + "\n")
    return int(bool(faults))


if __name__ == "__main__":
    # Triton reads the variable when it is imported: functions are compiled, not interpreted.
    os.environ["TRITON_INTERPRET"] = "0"
    sys.exit(main())
