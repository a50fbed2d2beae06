"""Free memory of the host, without the memory of GPUs.

On Grace Hopper each GPU is a NUMA node without CPUs, so that MemTotal and MemAvailable of
/proc/meminfo count its memory. DeltaAI's nodes have the CPUs on nodes 0 to 3 and the GPUs on nodes
4, 12, 20 and 28 (https://docs.ncsa.illinois.edu/systems/deltaai/en/latest/user-guide/, page
architecture, read on 2026-11-27). A host process that uses this memory takes it from the GPU.
"""

from __future__ import annotations

from pathlib import Path

import psutil

NUMA_NODES = Path("/sys/devices/system/node")
# The kernel may free these without swapping; MemAvailable counts most of them.
_FREE_FIELDS = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")


def available_host_bytes(nodes: Path = NUMA_NODES, available: int | None = None) -> int:
    """Bytes of host memory that new processes can use.

    ``nodes``: the kernel's folder of NUMA nodes; ``available``: bytes that the kernel calls
    available on all of them, by default those of this host. NUMA nodes without CPUs do not count:
    they are GPUs, or CXL memory, which is also left out.
    """
    if available is None:
        available = psutil.virtual_memory().available
    without_cpus = [node for node in nodes.glob("node[0-9]*") if _has_no_cpus(node)]
    return max(0, available - sum(map(_free_bytes, without_cpus)))


def _has_no_cpus(node: Path) -> bool:
    try:
        return not (node / "cpulist").read_text().strip()
    except OSError:
        # Containers may hide the files of a node.
        return False


def _free_bytes(node: Path) -> int:
    """Free and reclaimable bytes of a NUMA node, from lines such as `Node 4 MemFree: 1024 kB`."""
    try:
        lines = (node / "meminfo").read_text().splitlines()
    except OSError:
        return 0
    kibibytes = 0
    for line in lines:
        fields = line.split()
        if len(fields) >= 4 and fields[2].rstrip(":") in _FREE_FIELDS and fields[3].isdigit():
            kibibytes += int(fields[3])
    return kibibytes * 1024
