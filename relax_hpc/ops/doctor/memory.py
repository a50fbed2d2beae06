"""Check that the host memory that Slurm grants can hold the processes and the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from relax_hpc.base.errors import ConfigError
from relax_hpc.cluster.slurm.layout import Component
from relax_hpc.cluster.slurm.parsing import SlurmNode
from relax_hpc.config.schema import Config
from relax_hpc.ops.checks.model_files import spec_at
from relax_hpc.ops.doctor.finding import Finding, warning
from relax_hpc.ops.plan.plan import plan


def check_memory(
    config: Config,
    component: Component,
    requested_mib: int,
    nodes: Sequence[SlurmNode],
    limits: Mapping[str, str],
) -> Iterator[Finding]:
    """Warn if a component gets less host memory than its processes need.

    ``requested_mib``: MiB per node that the component requests, 0 for none. ``limits``: fields of
    Slurm's configuration, overridden by those of the partition, with the default memory of a job.
    Nothing is checked if Slurm does not allocate memory, or for a model without a path.
    """
    if "MEMORY" not in limits.get("SelectTypeParameters", "").upper() or not nodes:
        return
    granted_mib, source = _granted_memory(component, requested_mib, nodes, limits)
    host_memory_mib = max(_host_memory_mib(config, node) for node in nodes)
    if host_memory_mib < granted_mib:
        granted_mib, source = host_memory_mib, f"{source}, without the memory of the GPUs"
    needed_mib = host_mib(config, component)
    if granted_mib >= needed_mib:
        return
    advice = f'set "0" (all memory of a node), or at least {needed_mib / 1024:.0f}G'
    if granted_mib >= host_memory_mib:
        advice = "the nodes have no more; use nodes with more memory, or more nodes"
    yield warning(
        f"groups.{component.name}.resources.memory: found {component.memory or 'none'!r}, for "
        f"which Slurm grants {granted_mib / 1024:.1f} GiB per node ({source}), allowed: at least "
        f"{needed_mib / 1024:.0f} GiB for the processes and the model; {advice}"
    )


def _granted_memory(
    component: Component, requested_mib: int, nodes: Sequence[SlurmNode], limits: Mapping[str, str]
) -> tuple[int, str]:
    """MiB per node that a job gets, and the setting that decides it."""
    if requested_mib:
        return requested_mib, "as requested"
    memory_options = {"mem", "mem-per-cpu", "mem-per-gpu", "exclusive"}
    if not component.memory and not component.options.keys() & memory_options:
        per_cpu_mib = limits.get("DefMemPerCPU", "")
        if per_cpu_mib.isdigit():
            cpus = component.tasks_per_node * component.cpus_per_task
            return int(per_cpu_mib) * cpus, f"DefMemPerCPU {per_cpu_mib} MiB x {cpus} CPUs"
        per_node_mib = limits.get("DefMemPerNode", "")
        if per_node_mib.isdigit():
            return int(per_node_mib), "DefMemPerNode"
    return max(node.memory_mib for node in nodes), "RealMemory"


def _host_memory_mib(config: Config, node: SlurmNode) -> int:
    """MiB of a node's memory in Slurm that are not memory of its GPUs."""
    if not config.site.memory_includes_gpus:
        return node.memory_mib
    return node.memory_mib - int(node.count_gpus() * config.site.gpu_memory_gib * 1024)


def host_mib(config: Config, component: Component) -> float:
    """Calculated minimum of host memory in MiB per node.

    0 for an unknown or tiny model, or on CPUs.
    """
    try:
        spec = spec_at(config.model)
    except ConfigError:
        return 0.0
    if config.model.device != "cuda" or not config.model.path:
        return 0.0
    nbytes = 0.0
    for device in plan(config, spec):
        for footprint in device.footprints:
            if footprint.group in component.groups:
                nbytes += sum(footprint.host.values()) + sum(footprint.pinned.values())
    return nbytes / (1 << 20)
