"""Libraries of a newer NVIDIA driver (package cuda-compat) on nodes whose driver is too old for the
CUDA of the environment.

Sources: NVIDIA, "CUDA Compatibility", chapter "Forward Compatibility"
(https://docs.nvidia.com/deploy/cuda-compatibility/forward-compatibility.html, read on 2026-11-27):
the package works on data-centre GPUs, on some RTX cards and on Jetson boards, if its folder is the
first in LD_LIBRARY_PATH. The variable NVIDIA_REQUIRE_CUDA of the image nvidia/cuda:13.0.2 has the
drivers and the brands of GPUs on which it can be used; GeForce and TITAN are not among them.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from ..version_numbers import parse_version
from .vendor import CompatDriver

VARIABLE = "RELAX_COMPAT_LIBRARIES"
"""Variable with the folder of cuda-compat, if it is not in one of `FOLDERS`."""
FOLDERS = ("usr/local/cuda/compat", "usr/local/cuda-*/compat")
"""Folders in which NVIDIA's packages and images have it, below the root of the filesystem."""
BASE_DRIVERS = {13: (535, 550, 565, 570, 575)}
"""CUDA's major version -> branches of the driver on which its cuda-compat can be used."""
DATA_CENTRE_GPUS = (
    *("B300", "GB300", "B200", "GB200", "H100", "H200", "H800", "H20", "GH200"),
    *("L4", "L40", "L40S", "A2", "A10", "A16", "A40", "A30", "A100", "A800", "T4"),
)
"""Words in the names of data-centre GPUs that CUDA 13 supports."""


def find_cuda_compat(
    environment: "Mapping[str, str]" = os.environ, root: str = "/"
) -> CompatDriver:
    """The libcuda that is in LD_LIBRARY_PATH, in the folder of `VARIABLE`, or the newest one of
    `FOLDERS`."""
    for folder in environment.get("LD_LIBRARY_PATH", "").split(":"):
        if folder and (Path(folder) / "libcuda.so.1").exists():
            return CompatDriver(library_version(folder), folder, True, True)
    chosen = environment.get(VARIABLE, "")
    if chosen:
        return CompatDriver(library_version(chosen), chosen, True)
    drivers = []
    for pattern in FOLDERS:
        for path in Path(root).glob(pattern):
            drivers.append(CompatDriver(library_version(str(path)), str(path)))
    return max(drivers, key=lambda driver: parse_version(driver.version), default=CompatDriver())


def library_version(folder: str) -> str:
    """Version of the driver whose libcuda.so.1 is in ``folder``, such as `580.65.06`. It is the end
    of the name of the file; empty if there is none."""
    try:
        name = (Path(folder) / "libcuda.so.1").resolve(strict=True).name
    except OSError:
        return ""
    version = name.partition(".so.")[2]
    return version if version != "1" else ""


def forbidden_reason(gpu: str, driver: str, cuda_major: int, is_chosen: bool) -> str:
    """Reason why cuda-compat cannot be used on a GPU with a driver; empty if it can be."""
    branches = BASE_DRIVERS.get(cuda_major, ())
    if parse_version(driver)[:1] not in [(branch,) for branch in branches]:
        supported = ", ".join(map(str, branches)) or "none"
        return f"cuda-compat for CUDA {cuda_major} works with drivers {supported} only"
    words = gpu.replace("-", " ").split()
    if "GeForce" in words or "TITAN" in words:
        return f"cuda-compat does not work on {gpu}, only on data-centre GPUs"
    is_workstation = "Quadro" in words or "RTX" in words
    is_data_centre = not is_workstation and any(word in DATA_CENTRE_GPUS for word in words)
    if not is_data_centre and not is_chosen:
        return f"{gpu} is not known as a data-centre GPU, on which cuda-compat works"
    return ""


def compat_variables(
    compat: CompatDriver, environment: "Mapping[str, str]" = os.environ
) -> "dict[str, str]":
    """Variables with which a new process loads the libcuda of ``compat``; empty if it does without
    them."""
    if not compat.folder or compat.is_loaded:
        return {}
    others = environment.get("LD_LIBRARY_PATH", "")
    return {"LD_LIBRARY_PATH": f"{compat.folder}:{others}" if others else compat.folder}
