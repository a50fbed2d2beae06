"""Whether what Slurm will give a node's processes of its memory can hold them and the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from relax_hpc.config.groups import ranks_of, roles_of
from relax_hpc.config.schema import Config
from relax_hpc.doctor.finding import Finding, warning
from relax_hpc.slurm.layout import Component
from relax_hpc.slurm.parsing import Node

MEBIBYTES_A_PROCESS = 2048
"""Of a process with torch and CUDA, before it has any weights."""


def check_memory(
    config: Config, part: Component, asked: int, nodes: Sequence[Node], limits: Mapping[str, str]
) -> Iterator[Finding]:
    """A warning if a component gets less than its processes need at the least.

    ``asked``: MiB a node that it asks for itself, 0 for all of them; ``limits``: what Slurm gives to who does not ask,
    a partition's fields over those of the cluster. Only where memory is given out, and for models of a size.
    """
    if "MEMORY" not in limits.get("SelectTypeParameters", "").upper() or not nodes:
        return
    given, why = _given(part, asked, nodes, limits)
    needed = _needed(config, part)
    if given < needed:
        yield warning(
            f"groups.{part.name}.resources.memory: found {part.memory or 'none'!r}, for which Slurm gives "
            f"{given / 1024:.1f} GiB a node ({why}); its processes and the model need {needed / 1024:.0f} GiB and "
            'more; set "0", which is all of a node, or as much'
        )


def _given(part: Component, asked: int, nodes: Sequence[Node], limits: Mapping[str, str]) -> tuple[int, str]:
    """MiB a node, and where they come from."""
    whole, cpus = max(node.memory_mib for node in nodes), part.tasks_per_node * part.cpus_per_task
    stated = part.memory or part.options.keys() & {"mem", "mem-per-cpu", "mem-per-gpu", "exclusive"}
    if asked:
        return asked, "as asked"
    if not stated and (a_cpu := limits.get("DefMemPerCPU", "")).isdigit():
        return int(a_cpu) * cpus, f"DefMemPerCPU {a_cpu} MiB x {cpus} CPUs"
    if not stated and (a_node := limits.get("DefMemPerNode", "")).isdigit():
        return int(a_node), "DefMemPerNode"
    return whole, "RealMemory"


def _needed(config: Config, part: Component) -> int:
    """MiB a node that cannot be done without: processes, and the weights that are in host memory on their way."""
    device = config.model.device == "cuda"
    weights = _weights_mib(config.model.path)
    if not device or not weights:
        return 0
    needed = 0
    for group in part.groups:
        for role in roles_of(config, group):
            count = -(-ranks_of(config, group, role) // part.nodes)
            if role == "rollout":
                needed += -(-config.rollout.replicas // part.nodes) * MEBIBYTES_A_PROCESS + weights
            elif role == "actor":
                slabs = config.weights.slabs or config.max_staleness + 2
                needed += count * MEBIBYTES_A_PROCESS + slabs * weights // part.nodes
            elif role in ("actor_fwd", "reference"):
                needed += count * MEBIBYTES_A_PROCESS
    return needed


def _weights_mib(path: str) -> int:
    return sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) >> 20 if path else 0
