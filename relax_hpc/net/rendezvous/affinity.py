"""Binding of ranks to cores of a node: each rank gets a share of its group's cores, near its GPU.

Slurm cannot compute these shares for roles that share nodes. Their steps run with `--overlap`,
because GPUs are shared and because the nodes of an ended step count as busy for some seconds.
slurmctld gives overlapping steps the same first cores (Slurm 22.05: of 64 cores, 32 were assigned
twice and 32 never). Therefore each step gets all cores of the group on the
node, and its ranks divide them. Each rank computes the same plan from the same facts and binds
itself to its share. If there are fewer cores than ranks, no rank is bound.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from relax_hpc.base.machine.gpu_vendors import GpuVendor
from relax_hpc.base.server_devices import devices_per_server
from relax_hpc.config.gpus import gpu_vendor
from relax_hpc.config.groups import group_settings, rank_count, roles_with_cpus
from relax_hpc.config.roles import RANKED
from relax_hpc.config.schema import Config

_CPUS, _NUMA = Path("/sys/devices/system/cpu"), Path("/sys/devices/system/node")
_PCI_DEVICES = "sys/bus/pci/devices"


@dataclass(frozen=True, slots=True)
class Core:
    """Hardware threads of one core, and its NUMA domain."""

    cpus: tuple[int, ...]
    domain: int


@dataclass(frozen=True, slots=True)
class Rank:
    """A process that Slurm starts on a node, with its child processes."""

    role: str
    number: int
    """Number among the ranks of its role on the node."""
    weight: int = 1
    """Weight in the division of cores. An engine of a rollout counts as one rank."""
    domain: int | None = None
    """NUMA domain of its GPU. None: it has several GPUs, in all domains."""


def bind_to_share(config: Config, group: str, role: str) -> None:
    """Bind this process to its share of the node's cores. Call it before threads are started.

    Threads and child processes inherit the binding. Nothing is bound outside of a Slurm step, if
    Slurm binds (`site.srun_options.cpu-bind`), or if there are fewer cores than ranks.
    """
    number = os.environ.get("SLURM_LOCALID", "")
    if config.layout == "local" or not number.isdigit() or _binds(config, group):
        return
    if role not in roles_with_cpus(config, group):
        return
    cores = read_cores(os.sched_getaffinity(0))
    ranks = list_ranks_of_node(config, group, domains_of_gpus(config, group, cores))
    share = divide_cores(cores, ranks).get((role, int(number)))
    if share is None:
        message = f"{role}: {len(cores)} cores are fewer than the ranks of the node: not bound"
        print(message, file=sys.stderr, flush=True)
        return
    # Pid 0 is the calling thread. Threads and processes that it starts later inherit the mask.
    try:
        os.sched_setaffinity(0, share)
    except OSError as error:
        message = f"{role}: cannot be bound to CPUs {sorted(share)}: {error}"
        print(message, file=sys.stderr, flush=True)


def _binds(config: Config, group: str) -> bool:
    """Whether Slurm binds the ranks of the group to cores."""
    site, resources = config.site, group_settings(config, group).resources
    of_kind = site.gpu_srun_options if resources.gpus_per_node else site.cpu_srun_options
    return "cpu-bind" in {**site.srun_options, **of_kind, **resources.srun_options}


def divide_cores(cores: Sequence[Core], ranks: Sequence[Rank]) -> dict[tuple[str, int], set[int]]:
    """CPUs of each rank, by its role and number.

    A rank gets whole cores, first from the domain of its GPU. No core is in two shares. Empty:
    there are fewer cores than ranks.
    """
    if len(cores) < len(ranks):
        return {}
    free: dict[int, list[Core]] = defaultdict(list)
    for core in cores:
        free[core.domain].append(core)
    shares: dict[tuple[str, int], list[Core]] = {}
    counts = _divide(len(cores), [rank.weight for rank in ranks])
    for rank, count in zip(ranks, counts, strict=True):
        near = free[rank.domain] if rank.domain is not None else []
        shares[rank.role, rank.number], near[:count] = near[:count], []
    for rank, count in zip(ranks, counts, strict=True):
        share = shares[rank.role, rank.number]
        # Missing cores come from the domain with the most free cores.
        while len(share) < count:
            share.append(max(free.values(), key=len).pop(0))
    cpus: dict[tuple[str, int], set[int]] = {}
    for key, share in shares.items():
        cpus[key] = set().union(*(core.cpus for core in share))
    return cpus


def list_ranks_of_node(config: Config, group: str, domains: Sequence[int]) -> list[Rank]:
    """All ranks of ``group`` on one node when every role has started.

    ``domains``: NUMA domain of each GPU of the node, by its number.
    """
    nodes = group_settings(config, group).resources.nodes
    node_ranks = []
    for role in roles_with_cpus(config, group):
        ranks = rank_count(config, group, role)
        count = -(-ranks // nodes)
        for number in range(count):
            if role not in RANKED:
                weight = engine_processes(config, role, ranks)
                node_ranks.append(Rank(role, number, weight=weight))
                continue
            # On GPUs local rank r takes GPU r. On CPUs ranks are spread evenly over the domains.
            gpu = number if config.model.device == "cuda" else number * len(domains) // count
            node_ranks.append(Rank(role, number, domain=domains[min(gpu, len(domains) - 1)]))
    return node_ranks


def engine_processes(config: Config, role: str, ranks: int) -> int:
    """Number of engine processes (one for each device) of a rank of ``role``; 1 if it has none."""
    served = {"rollout": (config.rollout.replicas, config.rollout.engine.flags)}
    served["genrm"] = (config.genrm.replicas, config.genrm.flags)
    if role not in served:
        return 1
    replicas, flags = served[role]
    return -(-replicas // ranks) * devices_per_server(flags)


def domains_of_gpus(config: Config, group: str, cores: Sequence[Core]) -> list[int]:
    """NUMA domain of each GPU of a process of the group, by its number; at least one entry.

    If the driver does not report it, or there are no GPUs, they are assumed to be spread evenly
    over the domains, in order.
    """
    domains = sorted({core.domain for core in cores}) or [0]
    count = group_settings(config, group).resources.gpus_per_node or len(domains)
    spread = [domains[number * len(domains) // count] for number in range(count)]
    reported = numa_of_gpus(gpu_vendor(config)) if config.model.device == "cuda" else []
    return [
        domain if domain in domains else guess
        for domain, guess in zip(reported or spread, spread, strict=False)
    ]


def numa_of_gpus(
    vendor: GpuVendor, environment: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> list[int]:
    """NUMA node of each GPU of this process, by its number; -1: unknown. Empty: there is no GPU."""
    nodes: dict[int, int] = {}
    # The kernel reports the NUMA node of a PCI address, or -1 if the firmware does not define it.
    for number, address in vendor.gpu_addresses(root).items():
        text = _read(root / _PCI_DEVICES / address / "numa_node").strip()
        nodes[number] = int(text) if text.isdigit() else -1
    # Slurm numbers GPUs like their device files. The variable of visible GPUs begins at 0 if
    # cgroups hide the GPUs of other jobs, so it is used only without SLURM_STEP_GPUS.
    listed = environment.get("SLURM_STEP_GPUS") or environment.get(vendor.visible_variable, "")
    numbers = [int(text) for text in listed.split(",") if text.isdigit()] or sorted(nodes)
    return [nodes.get(number, -1) for number in numbers] if nodes else []


def read_cores(allowed: set[int], cpus: Path = _CPUS, numa: Path = _NUMA) -> list[Core]:
    """The cores of the ``allowed`` CPUs, by domain and number. Other threads are left out."""
    domains: dict[int, int] = {}
    for path in numa.glob("node*/cpulist"):
        domain = int(path.parent.name.removeprefix("node"))
        domains |= dict.fromkeys(parse_cpu_list(_read(path)), domain)
    domain_of_threads: dict[tuple[int, ...], int] = {}
    for cpu in sorted(allowed):
        siblings = parse_cpu_list(_read(cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list"))
        threads = tuple(sorted(allowed & {cpu, *siblings}))
        domain_of_threads[threads] = domains.get(cpu, 0)
    cores = [Core(threads, domain) for threads, domain in domain_of_threads.items()]
    return sorted(cores, key=lambda core: (core.domain, core.cpus))


def parse_cpu_list(text: str) -> list[int]:
    """Numbers of a list in the kernel's format.

    >>> parse_cpu_list("0-2,8")
    [0, 1, 2, 8]
    """
    numbers: list[int] = []
    for entry in filter(None, text.strip().split(",")):
        first, _, last = entry.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _divide(total: int, weights: Sequence[int]) -> list[int]:
    """``total`` divided by weight, rounded down, at least 1 each."""
    counts = [max(1, total * weight // sum(weights)) for weight in weights]
    while sum(counts) > total:
        counts[counts.index(max(counts))] -= 1
    return counts


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
