"""Whether what Slurm will give a node's processes of its memory can hold them and the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from relax_hpc.base.errors import ConfigError
from relax_hpc.cluster.slurm.layout import Component
from relax_hpc.cluster.slurm.parsing import Node
from relax_hpc.config.schema import Config
from relax_hpc.ops.checks.model_files import spec_at
from relax_hpc.ops.doctor.finding import Finding, warning
from relax_hpc.ops.plan.plan import plan


def check_memory(
    config: Config, part: Component, asked: int, nodes: Sequence[Node], limits: Mapping[str, str]
) -> Iterator[Finding]:
    """A warning if a component gets less than its processes need at the least.

    ``asked``: MiB a node that it asks for itself, 0 for all of them; ``limits``: what Slurm gives
    to who does not ask, a partition's fields over those of the cluster. Only where memory is given
    out, and for models of a size.
    """
    if "MEMORY" not in limits.get("SelectTypeParameters", "").upper() or not nodes:
        return
    given, why = _given(part, asked, nodes, limits)
    needed = host_mib(config, part)
    if given < needed:
        advice = 'set "0", which is all of a node, or as much'
        if given >= max(node.memory_mib for node in nodes):
            advice = "this is all that a node has; use nodes with more memory, or more nodes"
        yield warning(
            f"groups.{part.name}.resources.memory: found {part.memory or 'none'!r}, for which "
            f"Slurm gives {given / 1024:.1f} GiB a node ({why}); its processes and the model need "
            f"{needed / 1024:.0f} GiB and more; {advice}"
        )


def _given(
    part: Component, asked: int, nodes: Sequence[Node], limits: Mapping[str, str]
) -> tuple[int, str]:
    """MiB that a job gets on each node, and by which setting."""
    whole, cpus = max(node.memory_mib for node in nodes), part.tasks_per_node * part.cpus_per_task
    stated = part.memory or part.options.keys() & {"mem", "mem-per-cpu", "mem-per-gpu", "exclusive"}
    if asked:
        return asked, "as asked"
    if not stated and (a_cpu := limits.get("DefMemPerCPU", "")).isdigit():
        return int(a_cpu) * cpus, f"DefMemPerCPU {a_cpu} MiB x {cpus} CPUs"
    if not stated and (a_node := limits.get("DefMemPerNode", "")).isdigit():
        return int(a_node), "DefMemPerNode"
    return whole, "RealMemory"


def host_mib(config: Config, part: Component) -> float:
    """MiB a node that cannot be done without, by calculation; 0 for models that are not known, or
    of no size."""
    try:
        spec = spec_at(config.model)
    except ConfigError:
        return 0.0
    if config.model.device != "cuda" or not config.model.path:
        return 0.0
    found = [
        one for place in plan(config, spec) for one in place.footprints if one.group in part.groups
    ]
    return sum(sum(one.host.values()) + sum(one.pinned.values()) for one in found) / (1 << 20)
