"""AMD's GPUs with ROCm: the only module that names its driver, tools, device files and variables.

Untested: no machine with such a GPU was available. Files and outputs are those of public reports
of such machines, which the tests name.

Sources, read on 2026-11-27: rocm.docs.amd.com, "GPU isolation techniques" and "ROCm environment
variables"; the kernel's documentation of amdgpu and of the topology of KFD in
/sys/class/kfd/kfd/topology; apptainer.org, "GPU Support".
"""

import json
from collections.abc import Mapping
from pathlib import Path

from .vendor import Driver, GpuMemory, GpuVendor, VisibleGpus, path_exists, read_entries, read_text

_NODES = "sys/class/kfd/kfd/topology/nodes"
_PCI_VENDOR_DECIMAL = 4098
"""AMD's number of PCI as the topology writes it. Other vendors' GPUs can have nodes too."""
_KERNEL_VERSION = "in-kernel"
"""Version of a driver that is part of the kernel, which has no version of its own."""
_HIP_VARIABLES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Variables by which HIP selects among the GPUs that `visible_variable` leaves. The first one that
has a value counts."""


class Rocm(GpuVendor):
    """GPUs with AMD's driver for computations."""

    name = "rocm"
    title = "AMD"
    driver_title = "AMD driver (amdgpu)"
    release_title = "ROCm"
    release_key = "rocm"
    release_pattern = r"^hip\b.*?['\"](\d[\d.]*)"
    smi = ("rocm-smi", "--showmeminfo", "vram", "--showuniqueid", "--json")
    device_file = "/dev/kfd"
    device_files = "dev/kfd"
    visible_variable = "ROCR_VISIBLE_DEVICES"
    apptainer_option = "--rocm"
    podman_options = ("--device=/dev/kfd", "--device=/dev/dri")
    pci_vendor = "0x1002"
    # 0x0380: display controllers without a display; 0x1200: processing accelerators, such as MI300.
    # GPUs inside of a processor have class 0x0300.
    pci_classes = ("0x0380", "0x1200")

    def has_driver(self, root: Path) -> bool:
        return path_exists(root / "dev/kfd")

    def read_driver(self, root: Path) -> Driver:
        version = read_text(root / "sys/module/amdgpu/version") or _KERNEL_VERSION
        architectures = [node["architecture"] for node in _gpu_nodes(root)]
        return Driver(version, tuple(architectures), tuple(architectures), vendor=self.name)

    def gpu_addresses(self, root: Path) -> "dict[int, str]":
        addresses = {}
        for number, node in enumerate(_gpu_nodes(root)):
            location = int(node["location_id"])
            # As the kernel packs it: 8 bits of bus, 5 of device, 3 of function.
            bus, device, function = location >> 8 & 255, location >> 3 & 31, location & 7
            domain = int(node.get("domain", "0"))
            addresses[number] = f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"
        return addresses

    def parse_memory(self, output: str) -> "list[GpuMemory]":
        # rocm-smi prints warnings, for example about GPUs in a low-power state, before the object.
        start = output.index("{")
        gpus = []
        for card, fields in json.loads(output[start:]).items():
            if card.startswith("card"):
                unique = fields.get("Unique ID", "")
                uuid = "GPU-" + unique[2:] if unique.startswith("0x") else ""
                total = int(fields["VRAM Total Memory (B)"])
                used = int(fields["VRAM Total Used Memory (B)"])
                gpus.append(GpuMemory(card[len("card") :], uuid, total, used))
        return gpus

    def visible_gpus(self, environment: "Mapping[str, str]") -> "VisibleGpus | None":
        """HIP numbers the GPUs that ROCr leaves from 0. Slurm sets variables of both, by default
        with the same numbers, so that HIP may find none."""
        runtime = super().visible_gpus(environment)
        variable = next((name for name in _HIP_VARIABLES if environment.get(name)), "")
        if not variable:
            return runtime
        value = environment[variable]
        entries = tuple(read_entries(value))
        if runtime is not None:
            numbers = [int(entry) for entry in entries if entry.isdigit()]
            in_range = [number for number in numbers if number < len(runtime.entries)]
            entries = tuple(runtime.entries[number] for number in in_range)
            value = f"{value}, with {runtime.variable}={runtime.value}"
        return VisibleGpus(variable, value, entries)

    def can_run(self, capability: str, target: str) -> bool:
        """Code for an architecture runs on it alone; features follow a colon, `gfx90a:xnack-`."""
        return capability == target.partition(":")[0]


def architecture_name(target_version: int) -> str:
    """Name of an architecture by `gfx_target_version`, which has two decimal digits each for minor
    version and stepping. The name has them in hexadecimal.

    >>> [architecture_name(number) for number in (90402, 90010, 110000)]
    ['gfx942', 'gfx90a', 'gfx1100']
    """
    major, minor, stepping = (
        target_version // 10000,
        target_version // 100 % 100,
        target_version % 100,
    )
    return f"gfx{major}{minor:x}{stepping:x}"


def _gpu_nodes(root: Path) -> "list[dict[str, str]]":
    """Properties of each GPU in KFD's topology, in the order by which ROCr numbers them."""
    folders = [path for path in (root / _NODES).glob("*") if path.name.isdigit()]
    nodes = []
    for folder in sorted(folders, key=lambda path: int(path.name)):
        lines = [line.split() for line in read_text(folder / "properties").splitlines()]
        properties = {line[0]: line[1] for line in lines if len(line) == 2}
        # Nodes of CPUs have no SIMD units.
        is_gpu = int(properties.get("simd_count", "0")) > 0
        if is_gpu and int(properties.get("vendor_id", "0")) == _PCI_VENDOR_DECIMAL:
            target = int(properties.get("gfx_target_version", "0"))
            nodes.append({**properties, "architecture": architecture_name(target)})
    return nodes
