"""Both implementations of GPU vendors, on recorded files and outputs, and the rule that no other
module names a vendor. ROCm was never run: its files and outputs are those of public reports."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from relax_hpc.base.machine.facts import Facts, ask_driver, read_facts
from relax_hpc.base.machine.gpu_vendors import (
    VENDORS,
    Driver,
    GpuMemory,
    MissingTool,
    NoGpuAnswer,
    find_vendor,
    run_tool,
    select_vendor,
)
from relax_hpc.base.machine.gpu_vendors.rocm import architecture_name
from relax_hpc.base.machine.requirements import GPU, INSTALLATION, find_problems

ROOT = Path(__file__).resolve().parents[2]
NVIDIA, ROCM = VENDORS["nvidia"], VENDORS["rocm"]

# -- the rule --------------------------------------------------------------------------------------

NAMES = re.compile(
    r"nvidia|cuda_visible|--nv\b|rocm|rocr|hip_visible|/dev/kfd|/dev/dxg|amdgpu", re.IGNORECASE
)
ALLOWED = re.compile(
    r"gpu-nvidia-h200\.json|\"nvidia-[a-z-]+\"|peak_flops\(\"NVIDIA H100 80GB HBM3\"\)"
)
"""Names of stored results, of packages, and of a GPU whose speed is looked up by its name."""


def test_vendors_are_named_in_their_modules_only() -> None:
    """Neither the code, nor configurations and scripts for Slurm."""
    vendors = ROOT / "relax_hpc/base/machine/gpu_vendors"
    lines = []
    for folder in ("relax_hpc", "configs", "slurm"):
        for path in sorted((ROOT / folder).rglob("*")):
            is_text = path.suffix in (".py", ".yaml", ".sbatch", ".j2", ".sh")
            if not is_text or path.is_relative_to(vendors):
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                # Comments of site files describe the hardware of a centre.
                text = line.partition("#")[0] if path.suffix == ".yaml" else line
                if NAMES.search(ALLOWED.sub("", text)):
                    lines.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert lines == []


def test_each_vendor_names_itself_only() -> None:
    text = (ROOT / "relax_hpc/base/machine/gpu_vendors/nvidia.py").read_text()
    assert not re.search("rocm|rocr|kfd", text, re.IGNORECASE)
    text = (ROOT / "relax_hpc/base/machine/gpu_vendors/rocm.py").read_text()
    assert not re.search("nvidia|--nv", text, re.IGNORECASE)


# -- files of machines -----------------------------------------------------------------------------

CPU_NODE = "cpu_cores_count 96\nsimd_count 0\ngfx_target_version 0\nvendor_id 0\nlocation_id 0\n"
MI300X_NODE = """\
cpu_cores_count 0
simd_count 1216
simd_per_cu 4
gfx_target_version 90402
vendor_id 4098
device_id 29857
location_id 18176
domain 0
drm_render_minor 128
hive_id 10631624818852212319
unique_id 4376936076086227261
num_xcc 8
"""
"""Lines of the properties of a node with MI300X, as recorded in tests/test_hip_runtime.py of
github.com/makodevai/gpuq (read on 2026-11-27)."""


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def rocm_machine(root: Path, count: int = 2) -> Path:
    """Files of a machine with two processors and ``count`` MI300X."""
    write(root, "dev/kfd", "")
    for number in range(2 + count):
        text = CPU_NODE if number < 2 else MI300X_NODE.replace("18176", f"{number << 8 | 3 << 3}")
        write(root, f"sys/class/kfd/kfd/topology/nodes/{number}/properties", text)
    for number in range(2, 2 + count):
        write(root, f"sys/bus/pci/devices/0000:{number:02x}:03.0/vendor", "0x1002\n")
        write(root, f"sys/bus/pci/devices/0000:{number:02x}:03.0/class", "0x120000\n")
    # The GPU inside of a desktop processor.
    write(root, "sys/bus/pci/devices/0000:c6:00.0/vendor", "0x1002\n")
    write(root, "sys/bus/pci/devices/0000:c6:00.0/class", "0x030000\n")
    return root


def test_a_machine_with_rocm(tmp_path: Path) -> None:
    root = str(rocm_machine(tmp_path))
    assert find_vendor(root) is ROCM and select_vendor("auto", root) is ROCM
    assert select_vendor("nvidia", root) is NVIDIA, "the site's setting counts"
    facts = read_facts(root=root, environment={"PATH": ""}, driver_deadline_s=30)
    architectures = ("gfx942", "gfx942")
    assert facts.driver == Driver("in-kernel", architectures, architectures, vendor="rocm")
    assert facts.gpus_on_bus == ("rocm", "rocm")
    write(tmp_path, "sys/module/amdgpu/version", "6.12.12\n")
    assert ask_driver(root, 30).version == "6.12.12"
    assert ROCM.gpu_addresses(tmp_path) == {0: "0000:02:03.0", 1: "0000:03:03.0"}
    assert [architecture_name(number) for number in (90010, 110000)] == ["gfx90a", "gfx1100"]


def test_the_driver_for_computations_decides_on_the_vendor(tmp_path: Path) -> None:
    """Processors with a GPU of their own have AMD's driver too."""
    assert find_vendor(str(tmp_path)) is None and select_vendor("", str(tmp_path)) is NVIDIA
    write(rocm_machine(tmp_path), "dev/nvidia0", "")
    assert find_vendor(str(tmp_path)) is NVIDIA


def test_torch_is_built_for_another_vendor(tmp_path: Path) -> None:
    driver = Driver("6.12.12", ("gfx942",) * 4, ("gfx942",) * 4, vendor="rocm")
    facts = Facts(system="Linux", c_compiler="gcc", driver=driver)
    (problem,) = find_problems(facts, {"cuda": "13.0"}, [GPU])
    assert str(problem) == (
        "4 AMD GPUs found, GPUs of NVIDIA needed by CUDA 13.0, for which torch is built: install a "
        "torch for ROCm, or use other nodes"
    )
    assert problem.is_fatal and not problem.is_node_fault
    (problem,) = find_problems(facts, {"cuda": "13.0"}, [GPU, INSTALLATION])
    assert not problem.is_fatal, "an environment for nodes with other GPUs"
    assert find_problems(facts, {"cuda": "", "rocm": "6.4.43482"}, [GPU]) == []
    silent = facts._replace(driver=Driver(answers=False, vendor="rocm"))
    (problem,) = find_problems(silent, {"rocm": "6.4"}, [GPU])
    assert str(problem).startswith("AMD driver (amdgpu) without an answer found, an answer needed")
    assert problem.is_node_fault and "rocm-smi" in problem.advice


# -- variables -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vendor", "environment", "entries"),
    [
        ("nvidia", {}, None),
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "0,1"}, ("0", "1")),
        ("nvidia", {"CUDA_VISIBLE_DEVICES": ""}, ()),
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "-1"}, ()),
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ()),
        # CUDA ignores everything after an invalid number.
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "2,-1,1"}, ("2",)),
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "GPU-1f,MIG-2e"}, ("GPU-1f", "MIG-2e")),
        ("nvidia", {"ROCR_VISIBLE_DEVICES": "0"}, None),
        ("rocm", {"ROCR_VISIBLE_DEVICES": "0,1"}, ("0", "1")),
        ("rocm", {"ROCR_VISIBLE_DEVICES": ""}, ()),
        # HIP ignores an empty variable (github.com/ROCm/hip/issues/3001).
        ("rocm", {"HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": "4,5"}, ("4", "5")),
        ("rocm", {"HIP_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "4,5"}, ("5",)),
        # As on Frontier, where HIP then finds no GPU (github.com/Parsl/parsl/issues/3858).
        ("rocm", {"CUDA_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "1"}, ()),
        ("rocm", {"CUDA_VISIBLE_DEVICES": "1"}, ("1",)),
    ],
)
def test_visible_gpus(
    vendor: str, environment: dict[str, str], entries: tuple[str, ...] | None
) -> None:
    visible = VENDORS[vendor].visible_gpus(environment)
    assert (visible.entries if visible else None) == entries
    if visible:
        assert environment[visible.variable] in visible.value


# -- tools -----------------------------------------------------------------------------------------

ROCM_SMI_7900XT = """{
  "card0": {
    "GPU use (%)": "0",
    "VRAM Total Memory (B)": "21458059264",
    "VRAM Total Used Memory (B)": "27856896",
    "Card Series": "Radeon RX 7900 XT",
    "Node ID": "1",
    "GUID": "26967",
    "GFX Version": "gfx1100"
  }
}
"""
"""Part of an output of `rocm-smi --showproductname --showuse --showmeminfo vram --json`,
github.com/marimo-team/marimo/issues/9237 (2026-04-16)."""
MI250_UNIQUE_ID = "0x1f9de0957d137942"
"""Field `Unique ID` of card0 in an output of rocm-smi that github.com/wandb/wandb records in its
tests of GPUs (core/pkg/monitor). rocminfo reports `GPU-1f9de0957d137942` for the same GPU, in
github.com/ROCm/rocm_smi_lib/issues/165."""
LOW_POWER = (
    "WARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status\n\n"
)
"""github.com/ROCm/legacy-rocm-build/issues/5849 (2026-01-11)."""
NVIDIA_SMI = "0, GPU-22b2c6ac-2d49-4863-197c-9c469071178a, 7979, 5\n"
"""Fields as nvidia-smi printed them with the same format in
github.com/Ricks-Lab/gpu-utils/issues/83; the number in use is ours."""


def test_outputs_of_the_tools() -> None:
    assert NVIDIA.parse_memory(NVIDIA_SMI) == [
        GpuMemory("0", "GPU-22b2c6ac-2d49-4863-197c-9c469071178a", 7979, 5)
    ]
    radeon = GpuMemory("0", "", 21458059264, 27856896)
    assert ROCM.parse_memory(ROCM_SMI_7900XT) == [radeon]
    cards = json.loads(ROCM_SMI_7900XT)
    cards["card0"]["Unique ID"] = MI250_UNIQUE_ID
    output = LOW_POWER + json.dumps({**cards, "system": {"Driver version": "6.2.4"}})
    assert ROCM.parse_memory(output) == [radeon._replace(uuid="GPU-1f9de0957d137942")]


def put_tool(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
    """A program in place of a vendor's tool."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.parametrize("name", sorted(VENDORS))
def test_a_tool_that_gives_no_answer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vendor = VENDORS[name]
    tool = vendor.smi[0]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingTool, match=f"found no {tool}"):
        vendor.read_memory()
    # The text and the code of nvidia-smi after an update of the driver without a restart.
    failure = "Failed to initialize NVML: Driver/library version mismatch"
    put_tool(tmp_path / "bin", monkeypatch, tool, f"echo '{failure}'; exit 18")
    with pytest.raises(NoGpuAnswer, match=rf"{tool} failed with exit code 18 \({failure}\)"):
        vendor.read_memory()
    put_tool(tmp_path / "bin", monkeypatch, tool, "echo 'No devices were found'")
    with pytest.raises(NoGpuAnswer, match=f"{tool} printed 'No devices were found', which cannot"):
        vendor.read_memory()
    # A child process keeps the pipe of the output open.
    put_tool(tmp_path / "bin", monkeypatch, tool, "sleep 300 & echo $! >pid; wait")
    monkeypatch.chdir(tmp_path)
    started = time.monotonic()
    with pytest.raises(NoGpuAnswer, match=f"{tool} gave no answer within 0.5 s"):
        vendor.read_memory(timeout_s=0.5)
    assert time.monotonic() - started < 60


def test_a_tool_without_output() -> None:
    with pytest.raises(NoGpuAnswer, match=r"false failed with exit code 1 \(no output\)"):
        run_tool(["false"], 30)
