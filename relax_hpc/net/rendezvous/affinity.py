"""Cores of a node that a rank takes: its own share of what the group was given, near its GPU.

Slurm cannot say this of roles that share nodes: steps overlap, as GPUs are shared and an ended
step's nodes count as busy for seconds, and slurmctld gives overlapping steps the same first cores
(seen on 22.05: 32 of 64 picked twice, 32 never). So each step gets all cores that the group has on
the node, and its ranks divide them: each computes the same plan from the same facts and binds
itself to its part. Nothing is bound where there are fewer cores than ranks.
"""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from relax_hpc.base.server_devices import devices_per_server
from relax_hpc.config.groups import group_of, ranks_of, roles_of
from relax_hpc.config.roles import RANKED
from relax_hpc.config.schema import Config

_CPUS, _NUMA = Path("/sys/devices/system/cpu"), Path("/sys/devices/system/node")
_GPUS, _PCI = Path("/proc/driver/nvidia/gpus"), Path("/sys/bus/pci/devices")


@dataclass(frozen=True, slots=True)
class Core:
    """Hardware threads that share a core, and the NUMA domain they are in."""

    cpus: tuple[int, ...]
    domain: int


@dataclass(frozen=True, slots=True)
class Rank:
    """A process that Slurm starts on a node, with what it starts itself."""

    role: str
    number: int
    """Number among the ranks of its role on the node."""
    weight: int = 1
    """Share of the cores; an engine of a rollout weighs as much as a rank."""
    domain: int | None = None
    """NUMA domain of its GPU; None: it has several, in all domains."""


def bind_to_share(config: Config, group: str, role: str) -> None:
    """Bind this process, and what it starts, to its share of the node; only inside a Slurm step,
    before threads are.

    Left as it is where the site has Slurm bind (`site.srun_options.cpu-bind`), or there is too
    little to divide.
    """
    number = os.environ.get("SLURM_LOCALID", "")
    if config.layout == "local" or not number.isdigit() or "cpu-bind" in config.site.srun_options:
        return
    found = read_cores(os.sched_getaffinity(0))
    mine = divide_cores(
        found, list_ranks_of_node(config, group, domains_of_gpus(config, group, found))
    ).get((role, int(number)))
    if mine is None:
        print(
            f"{role}: {len(found)} cores here are too few for a share each: not bound",
            file=sys.stderr,
            flush=True,
        )
        return
    try:
        os.sched_setaffinity(0, mine)
    except OSError as problem:
        print(
            f"{role}: cannot be bound to CPUs {sorted(mine)}: {problem}",
            file=sys.stderr,
            flush=True,
        )


def divide_cores(cores: Sequence[Core], ranks: Sequence[Rank]) -> dict[tuple[str, int], set[int]]:
    """CPUs of each rank by role and number: whole cores, no core twice, first from the domain of
    its GPU.

    Empty if there are fewer cores than ranks.
    """
    if len(cores) < len(ranks):
        return {}
    free: dict[int, list[Core]] = defaultdict(list)
    for core in cores:
        free[core.domain].append(core)
    found: dict[tuple[str, int], list[Core]] = {}
    wanted = _counts(len(cores), [rank.weight for rank in ranks])
    for rank, count in zip(ranks, wanted, strict=True):
        near = free[rank.domain] if rank.domain is not None else []
        found[rank.role, rank.number], near[:count] = near[:count], []
    for rank, count in zip(ranks, wanted, strict=True):
        have = found[rank.role, rank.number]
        while len(have) < count:
            # What its own domain has not, and what belongs to no domain, comes from where most is
            # left.
            have.append(max(free.values(), key=len).pop(0))
    return {rank: {cpu for core in mine for cpu in core.cpus} for rank, mine in found.items()}


def list_ranks_of_node(config: Config, group: str, domains: Sequence[int]) -> list[Rank]:
    """All ranks that a node of ``group`` holds when every role has started; ``domains``: of its
    GPUs, by number."""
    nodes, found = group_of(config, group).resources.nodes, []
    for role in roles_of(config, group):
        ranks = ranks_of(config, group, role)
        count = -(-ranks // nodes)
        for number in range(count):
            if role in RANKED:
                # On GPUs local rank r takes GPU r; else ranks are spread evenly.
                own = number if config.model.device == "cuda" else number * len(domains) // count
                found.append(Rank(role, number, domain=domains[min(own, len(domains) - 1)]))
            else:
                found.append(Rank(role, number, weight=_engine_processes(config, role, ranks)))
    return found


def _engine_processes(config: Config, role: str, ranks: int) -> int:
    """Number of engine processes (one for each device) that a rank of ``role`` starts; 1 if it
    starts none."""
    served = {"rollout": (config.rollout.replicas, config.rollout.engine.flags)}
    served["genrm"] = (config.genrm.replicas, config.genrm.flags)
    if role not in served:
        return 1
    replicas, flags = served[role]
    return -(-replicas // ranks) * devices_per_server(flags)


def domains_of_gpus(config: Config, group: str, cores: Sequence[Core]) -> list[int]:
    """NUMA domain of each GPU that a process of the group sees, by its number; at least one.

    Where the driver or the machine does not say (or there are no GPUs), as if they were spread
    evenly in order.
    """
    domains = sorted({core.domain for core in cores}) or [0]
    count = group_of(config, group).resources.gpus_per_node or len(domains)
    spread = [domains[number * len(domains) // count] for number in range(count)]
    said = numa_of_gpus() if config.model.device == "cuda" else []
    return [
        found if found in domains else guess
        for found, guess in zip(said or spread, spread, strict=False)
    ]


def numa_of_gpus(
    environment: Mapping[str, str] = os.environ, driver: Path = _GPUS, pci: Path = _PCI
) -> list[int]:
    """NUMA node of each GPU of this process, by its number, as far as the driver and the machine
    say; -1: unknown."""
    nodes: dict[int, int] = {}
    for folder in driver.glob("*"):
        minor = re.search(r"Device Minor:\s*(\d+)", _read(folder / "information"))
        if minor:
            text = _read(pci / folder.name.lower() / "numa_node").strip()
            nodes[int(minor[1])] = int(text) if text.isdigit() else -1
    # Slurm numbers them like their device files; CUDA_VISIBLE_DEVICES begins at 0 where others' are
    # hidden.
    given = environment.get("SLURM_STEP_GPUS") or environment.get("CUDA_VISIBLE_DEVICES", "")
    numbers = [int(word) for word in given.split(",") if word.isdigit()] or sorted(nodes)
    return [nodes.get(number, -1) for number in numbers] if nodes else []


def read_cores(allowed: set[int], cpus: Path = _CPUS, numa: Path = _NUMA) -> list[Core]:
    """The cores that ``allowed`` CPUs are in, by domain and number, with those of their threads
    that are allowed."""
    domains = {
        cpu: int(path.parent.name.removeprefix("node"))
        for path in numa.glob("node*/cpulist")
        for cpu in parse_cpu_list(_read(path))
    }
    found: dict[tuple[int, ...], int] = {}
    for cpu in sorted(allowed):
        siblings = parse_cpu_list(
            _read(cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list")
        ) or [cpu]
        found[tuple(sorted(allowed & {cpu, *siblings}))] = domains.get(cpu, 0)
    return sorted(
        (Core(*item) for item in found.items()), key=lambda core: (core.domain, core.cpus)
    )


def parse_cpu_list(text: str) -> list[int]:
    """A list as the kernel writes it.

    >>> parse_cpu_list("0-2,8")
    [0, 1, 2, 8]
    """
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _counts(total: int, weights: Sequence[int]) -> list[int]:
    """``total`` divided by weight, at least 1 each; what cannot be divided is left."""
    found = [max(1, total * weight // sum(weights)) for weight in weights]
    while sum(found) > total:
        found[found.index(max(found))] -= 1
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
