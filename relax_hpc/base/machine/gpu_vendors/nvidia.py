"""NVIDIA's GPUs: the only module that names NVIDIA's driver, tools, device files and variables."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from ..version_numbers import parse_version
from .cuda_compat import VARIABLE, find_cuda_compat, forbidden_reason
from .nvml import open_nvml
from .vendor import (
    CompatDriver,
    Driver,
    GpuMemory,
    GpuSensors,
    GpuVendor,
    path_exists,
    read_text,
)

OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""CUDA's major version -> the oldest branch of the driver that runs it.

Source: NVIDIA, "CUDA Compatibility", chapter "Minor Version Compatibility", table 1 (and the CUDA
Toolkit release notes, which it refers to). Package cuda-compat lets data-centre GPUs run a newer
CUDA on an older driver: its `libcuda.so` is used in place of the driver's.
"""

CAPABILITIES = {
    "B300": "10.3",
    "GB300": "10.3",
    "B200": "10.0",
    "GB200": "10.0",
    "H100": "9.0",
    "H200": "9.0",
    "H800": "9.0",
    "H20": "9.0",
    "GH200": "9.0",
    "L4": "8.9",
    "L40": "8.9",
    "L40S": "8.9",
    "A2": "8.6",
    "A10": "8.6",
    "A16": "8.6",
    "A40": "8.6",
    "A30": "8.0",
    "A100": "8.0",
    "A800": "8.0",
    "T4": "7.5",
    "V100": "7.0",
    "P100": "6.0",
    "P40": "6.1",
    "K80": "3.7",
}
"""Word in the name of a GPU in /proc/driver/nvidia/gpus/*/information -> compute capability.

Source: NVIDIA, "CUDA GPU Compute Capability" (developer.nvidia.com/cuda-gpus).
"""

_DRIVER_FOLDER = "proc/driver/nvidia"


class Nvidia(GpuVendor):
    """GPUs with NVIDIA's driver."""

    name = "nvidia"
    title = "NVIDIA"
    driver_title = "NVIDIA driver"
    release_title = "CUDA"
    release_key = "cuda"
    release_pattern = r"^cuda\b.*?['\"]([\d.]+)['\"]"
    smi = (
        "nvidia-smi",
        "--query-gpu=index,uuid,memory.total,memory.used",
        "--format=csv,noheader,nounits",
    )
    device_file = "/dev/nvidia0"
    device_files = "dev/nvidia[0-9]*"
    visible_variable = "CUDA_VISIBLE_DEVICES"
    apptainer_option = "--nv"
    podman_options = ("--gpu",)
    nvcc_package = "nvidia"
    pci_vendor = "0x10de"
    # 0x03: display controllers. NVIDIA's bridges and audio devices have other classes.
    pci_classes = ("0x03",)

    def has_driver(self, root: Path) -> bool:
        return path_exists(root / _DRIVER_FOLDER)

    def has_devices(self, root: Path) -> bool:
        # /dev/dxg: the GPU of a Windows host in its Linux subsystem.
        return super().has_devices(root) or path_exists(root / "dev/dxg")

    def read_driver(self, root: Path) -> Driver:
        version = ""
        for word in read_text(root / _DRIVER_FOLDER / "version").split():
            # The first line ends in `NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 ...`.
            if word[:1].isdigit() and word.count(".") >= 1 and word.replace(".", "").isdigit():
                version = word
                break
        names = []
        for path in sorted((root / _DRIVER_FOLDER / "gpus").glob("*/information")):
            for line in read_text(path).splitlines():
                if line.startswith("Model:"):
                    names.append(line.partition(":")[2].strip())
        capabilities = [gpu_capability(name) for name in names]
        if names and not all(capabilities):
            capabilities = _ask_capabilities() or capabilities
        known = tuple(text for text in capabilities if text)
        return Driver(version, tuple(names), known, vendor=self.name)

    def gpu_addresses(self, root: Path) -> "dict[int, str]":
        # The driver has a folder for each GPU, named by its PCI address.
        addresses = {}
        for folder in (root / _DRIVER_FOLDER / "gpus").glob("*"):
            minor = re.search(r"Device Minor:\s*(\d+)", read_text(folder / "information"))
            if minor:
                addresses[int(minor.group(1))] = folder.name.lower()
        return addresses

    def parse_memory(self, output: str) -> "list[GpuMemory]":
        gpus = []
        for line in output.splitlines():
            if line.strip():
                index, uuid, total, used = (field.strip() for field in line.split(","))
                gpus.append(GpuMemory(index, uuid, int(total), int(used)))
        return gpus

    def open_sensors(self) -> "GpuSensors | None":
        return open_nvml()

    def oldest_driver(self, release: str) -> int:
        major = release.split(".")[0]
        return OLDEST_DRIVERS.get(int(major), 0) if major.isdigit() else 0

    def find_compat_driver(self, environment: "Mapping[str, str]", root: str) -> CompatDriver:
        return find_cuda_compat(environment, root)

    def compat_problem(self, driver: Driver, release: str, compat: CompatDriver) -> str:
        """See `GpuVendor.compat_problem`: whether package cuda-compat can be used."""
        major = (*parse_version(release), 0)[0]
        for gpu in sorted(set(driver.gpus)):
            reason = forbidden_reason(gpu, driver.version, major, compat.is_chosen)
            if reason:
                return reason
        if (*parse_version(compat.version), 0)[0] >= self.oldest_driver(release):
            return ""
        package = "cuda-compat-" + "-".join(release.split(".")[:2])
        return f"or install {package}, and name its folder in site.env.{VARIABLE}"

    def can_run(self, capability: str, target: str) -> bool:
        """Machine code runs on GPUs of its major version that are not older. PTX is compiled for
        all newer ones (NVIDIA, CUDA C++ Programming Guide, "Binary Compatibility")."""
        gpu, code = parse_version(capability), parse_version(target.partition("+")[0])
        return gpu >= code and (gpu[0] == code[0] or target.endswith("+PTX"))


def gpu_capability(name: str) -> str:
    """Compute capability of a GPU by its name; empty if the name is unknown."""
    for word in name.replace("-", " ").split():
        # Names of desktop GPUs have such words too (`Quadro P40`, `RTX A10`), of the same chips.
        if word in CAPABILITIES:
            return CAPABILITIES[word]
    return ""


def _ask_capabilities() -> "list[str]":
    """Compute capabilities of all GPUs; empty if nvidia-smi fails. It may hang."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        output = subprocess.check_output(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    except (OSError, subprocess.CalledProcessError):
        return []
    return [line.strip() for line in output.decode().splitlines() if line.strip()]
