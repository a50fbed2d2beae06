"""Samples of the resources of a role's processes: CPU time, memory, descriptors, GPUs.

Each rank appends its samples to `resources-<role>-<rank>.jsonl` in the logs of its incarnation. A
sample has the present values of each process, and totals since the start of the rank, so that the
last line of a file has all that `relax-hpc report` needs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from relax_hpc.base.foreign_files import open_in_run, parse_json
from relax_hpc.base.rundir import is_map

RESOURCES = "resources/"
"""Group of the tags."""
_TAIL_BYTES = 1 << 18
_FILE = re.compile(r"resources-(.+)-(\d+)\.jsonl")


@dataclass(slots=True)
class ProcessUse:
    """Present resources of one process."""

    pid: int
    name: str
    """`rank` for the rank itself, else the beginning of the command line."""
    cores: float
    """CPU seconds per second since the last sample."""
    memory_bytes: int
    """Resident memory. Pages that several processes share count for each of them."""
    threads: int
    descriptors: int


@dataclass(slots=True)
class GpuUse:
    """Present state of a GPU, and its totals since the start of the rank."""

    uuid: str
    utilization: float
    power_w: float
    memory_bytes: int
    energy_j: float = 0.0
    busy_s: float = 0.0
    """Integral of the utilisation over time."""
    seconds: float = 0.0
    """Seconds of the integral."""
    errors: dict[str, int] = field(default_factory=dict)
    """Number of errors of the driver by their codes (XID)."""


@dataclass(slots=True)
class Sample:
    """Resources of a rank and of the processes that it has started."""

    time: float
    """Seconds of the wall clock."""
    node: str
    seconds: float
    """Seconds since the start of the sampling."""
    cpu_s: float
    """CPU seconds of all processes since their start. Those of a process that has ended count up to
    the sample before its end."""
    peak_memory_bytes: int
    processes: list[ProcessUse]
    gpus: list[GpuUse]
    """GPUs of this rank's node that the role may use, in the first rank of the node only."""

    def to_line(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode() + b"\n"


def samples_path(logs: Path, role: str, rank: int) -> Path:
    """File of the samples of a rank."""
    return logs / f"resources-{role}-{rank}.jsonl"


def read_last_samples(logs: Path) -> dict[tuple[str, int], Sample]:
    """The last complete sample of each rank in a folder of logs, by role and rank."""
    samples = {}
    for path in sorted(logs.glob("resources-*.jsonl")):
        match = _FILE.fullmatch(path.name)
        sample = _read_last(path) if match else None
        if match and sample:
            samples[match[1], int(match[2])] = sample
    return samples


def _read_last(path: Path) -> Sample | None:
    """The last complete sample in a file; None: the file has none."""
    with contextlib.suppress(OSError):
        with open_in_run(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).splitlines()
        for line in reversed(lines):
            sample = _parse(line)
            if sample:
                return sample
    return None


def _parse(line: bytes) -> Sample | None:
    """Sample of a line; None: it is incomplete."""
    number = (int, float)
    kinds: dict[str, Any] = {"time": number, "node": str, "seconds": number, "cpu_s": number}
    try:
        value = parse_json(line)
        if not is_map(value, **kinds, peak_memory_bytes=int, processes=list, gpus=list):
            return None
        processes = [ProcessUse(**entry) for entry in value["processes"]]
        gpus = [GpuUse(**entry) for entry in value["gpus"]]
        return Sample(**(value | {"processes": processes, "gpus": gpus}))
    except (ValueError, TypeError):
        return None


def tags_of_samples(role: str, samples: Iterable[Sample]) -> dict[str, float]:
    """Metrics of a role from the last samples of all its ranks; empty without a sample."""
    all_samples = list(samples)
    processes = list(chain.from_iterable(sample.processes for sample in all_samples))
    if not processes:
        return {}
    tags = {
        "cores": round(sum(process.cores for process in processes), 3),
        "memory_bytes": float(sum(process.memory_bytes for process in processes)),
        "processes": float(len(processes)),
        "threads": float(sum(process.threads for process in processes)),
        "descriptors": float(sum(process.descriptors for process in processes)),
    }
    gpus = list(chain.from_iterable(sample.gpus for sample in all_samples))
    if gpus:
        tags["gpu_utilization"] = sum(gpu.utilization for gpu in gpus) / len(gpus)
        tags["gpu_power_w"] = sum(gpu.power_w for gpu in gpus)
        tags["gpu_memory_bytes"] = float(sum(gpu.memory_bytes for gpu in gpus))
        tags["gpu_errors"] = float(sum(count_errors(gpu.errors) for gpu in gpus))
    return {f"{RESOURCES}{role}_{name}": value for name, value in tags.items()}


def count_errors_by_node(samples: Iterable[Sample]) -> Counter[tuple[str, str]]:
    """Number of errors of the driver by node and code."""
    counts = Counter[tuple[str, str]]()
    for sample in samples:
        for gpu in sample.gpus:
            for code, count in gpu.errors.items():
                counts[sample.node, code] += count
    return counts


def count_errors(errors: Mapping[str, int]) -> int:
    """Number of errors of all codes."""
    return sum(errors.values())
