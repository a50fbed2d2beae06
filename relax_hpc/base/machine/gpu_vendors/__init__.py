"""The one place that knows vendors of GPUs: their drivers, device files, tools, options of
containers, environment variables, and names in messages.

All other code asks a `GpuVendor` of `VENDORS`. A third vendor is a module here and an entry there.
Computations are no part of it: torch calls the GPUs of both vendors `cuda`.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from .cuda_compat import compat_variables
from .nvidia import Nvidia
from .rocm import Rocm
from .vendor import (
    SMI_TIMEOUT_S,
    CompatDriver,
    Driver,
    GpuMemory,
    GpuReading,
    GpuSensors,
    GpuVendor,
    MissingTool,
    NoGpuAnswer,
    VisibleGpus,
    end_session,
    path_exists,
    read_entries,
    read_text,
    run_tool,
)

__all__ = [
    "DEFAULT_VENDOR",
    "SMI_TIMEOUT_S",
    "VENDORS",
    "CompatDriver",
    "Driver",
    "GpuMemory",
    "GpuReading",
    "GpuSensors",
    "GpuVendor",
    "MissingTool",
    "NoGpuAnswer",
    "VisibleGpus",
    "compat_variables",
    "end_session",
    "find_compat_driver",
    "find_vendor",
    "path_exists",
    "read_entries",
    "read_text",
    "run_tool",
    "select_vendor",
]

VENDORS: "dict[str, GpuVendor]" = {vendor.name: vendor for vendor in (Nvidia(), Rocm())}
"""Vendors by name. The first one that has a driver on a machine is its vendor: processors of other
vendors may contain GPUs that no role uses."""
DEFAULT_VENDOR = next(iter(VENDORS.values()))
"""Vendor where none is known, such as on a login node without GPUs."""


def find_vendor(root: str = "/") -> "GpuVendor | None":
    """Vendor of the GPUs of this machine, by its loaded driver or its device files; None: no
    GPU."""
    for vendor in VENDORS.values():
        if vendor.has_driver(Path(root)) or vendor.has_devices(Path(root)):
            return vendor
    return None


def select_vendor(name: str = "", root: str = "/") -> GpuVendor:
    """Vendor of that ``name``. For any other name, such as `auto`: the vendor of this machine, and
    on a machine without GPUs the default."""
    if name in VENDORS:
        return VENDORS[name]
    return find_vendor(root) or DEFAULT_VENDOR


def find_compat_driver(
    environment: "Mapping[str, str]" = os.environ, root: str = "/"
) -> CompatDriver:
    """Libraries of a newer driver, of the first vendor that has some on this machine."""
    for vendor in VENDORS.values():
        compat = vendor.find_compat_driver(environment, root)
        if compat.folder:
            return compat
    return CompatDriver()
