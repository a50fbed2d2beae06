"""Allocations of a `Config`: nodes, tasks, CPUs and GPUs of each group, and the hours that they
cost.

`het`: one heterogeneous job. Component 0, the hub, has two nodes, one active and one standby.
`jobs`: one ordinary job for each group. A hub with two nodes has a standby there too. `local`: one
job of one node with all groups.
"""

# Node failures in heterogeneous jobs of Slurm 22.05: if component 0 has one node, the death of any
# node ends the whole job. If a component loses its only node, each later component of one node ends
# too. Therefore the hub has two nodes, and groups of one node come last.

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from relax_hpc.base.errors import ConfigError, Mistakes
from relax_hpc.config.gpus import device_setting
from relax_hpc.config.groups import group_settings, rank_count, roles_with_cpus
from relax_hpc.config.roles import RANKED
from relax_hpc.config.schema import Config

HUB = "hub"
_MAIL_TYPES = "mail-type"
_HET_HUB_NODES = 2
_TIME = re.compile(
    r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?", re.ASCII
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One allocation: a component of a heterogeneous job, or an ordinary job."""

    groups: tuple[str, ...]
    """Groups in it; in layout `local` all groups. The first one names it. A hub on the nodes of
    another group comes second."""
    nodes: int
    tasks_per_node: int
    cpus_per_task: int
    gpus_per_node: int
    memory: str
    time: str
    options: dict[str, str]
    """sbatch options by long name. Options of the group replace those of the site."""
    removed: frozenset[str] = frozenset()
    """Options of relax_hpc that the user removes."""

    @property
    def name(self) -> str:
        return self.groups[0]

    @property
    def hours(self) -> float:
        """Time limit, hours."""
        return time_limit_s(self.time, "time") / 3600


def job_name(config: Config, component: Component) -> str:
    """Name of the job, or of the component, in Slurm."""
    # The group comes first, because squeue shows only 8 characters of a name by default.
    return config.name if config.layout == "local" else f"{component.name}-{config.name}"


def components(config: Config) -> list[Component]:
    """The allocations of ``config.layout``, in the order of the components. ConfigError with all
    mistakes if the layout is not possible."""
    if HUB not in config.groups:
        raise ConfigError(
            f"groups: found {', '.join(config.groups) or 'none'}, but no hub; add hub: {{roles: "
            f"[]}}"
        )
    builders = {"het": _het_components, "jobs": _separate_jobs, "local": _local_job}
    mistakes, allocations = Mistakes(), list[Component]()
    with mistakes:
        allocations = builders[config.layout](config)
    for key, time in _time_limits(config).items():
        with mistakes:
            _check_signal(config, key, time)
    mistakes.raise_if_any()
    return allocations


def group_component(config: Config, group: str) -> Component:
    """The separate job of one group: in layout `jobs`, or as a replacement, a spare job or a
    further member."""
    resources = group_settings(config, group).resources
    return _component(config, group, resources.nodes, resources.time or config.slurm.time)


def gpu_hours(config: Config) -> float:
    """GPU-hours of the run if all its allocations last until their time limits."""
    return sum(
        allocation.nodes * allocation.gpus_per_node * allocation.hours
        for allocation in components(config)
    )


def node_hours(config: Config) -> float:
    """Node-hours of the run if all its allocations last until their time limits. A node that
    several jobs share counts once for each job."""
    return sum(allocation.nodes * allocation.hours for allocation in components(config))


def tasks_per_node(config: Config, group: str) -> int:
    """Processes of all roles of ``group`` on one node.

    ConfigError if the nodes do not divide the ranks of a role, or have too few GPUs for them.
    """
    resources = group_settings(config, group).resources
    total, mistakes = 0, Mistakes()
    for role in roles_with_cpus(config, group):
        ranks = rank_count(config, group, role)
        if role in RANKED and ranks % resources.nodes:
            mistakes.add(_uneven(config, group, role))
        if role == "genrm" and config.genrm.replicas % ranks:
            mistakes.add(
                f"genrm.replicas: found {config.genrm.replicas}, allowed: a multiple of "
                f"groups.{group}.resources.nodes, {ranks} (each node has as many servers)"
            )
        if role == "rollout" and config.rollout.replicas % ranks:
            mistakes.add(
                f"rollout.replicas: found {config.rollout.replicas}, allowed: a multiple of "
                f"groups.{group}.resources.nodes, {resources.nodes}, times rollout.processes, "
                f"{config.rollout.processes} (each process has as many engines)"
            )
        count = -(-ranks // resources.nodes)
        if config.model.device == "cuda" and role in RANKED and count > resources.gpus_per_node:
            mistakes.add(
                f"groups.{group}.resources.gpus_per_node: found {resources.gpus_per_node}, "
                f"allowed: at least {count}, "
                f"the ranks of {role} on a node (model.device is cuda: each takes the GPU of its "
                "number on the node)"
            )
        total += count
    mistakes.raise_if_any()
    return max(1, total)


def time_limit_s(time: str, key: str) -> int:
    """Seconds of a time limit in the format of sbatch. ConfigError that names ``key`` for any other
    text, also for no limit.

    >>> [time_limit_s(text, "slurm.time") for text in ("90", "1-12", "24:00:00")]
    [5400, 129600, 86400]
    """
    match = _TIME.fullmatch(time)
    total = 0
    if match:
        days = match["days"]
        numbers = [int(match[name] or 0) for name in ("first", "second", "third")]
        if days is None and not match["third"]:
            # MM or MM:SS has no hours.
            numbers = [0, *numbers[:2]]
        total = int(days or 0) * 86400 + numbers[0] * 3600 + numbers[1] * 60 + numbers[2]
    if not total:
        raise ConfigError(
            f"{key}: found {time!r}, allowed: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or "
            "D-HH:MM:SS, more than 0 (a run needs a limit; name the partition's)"
        )
    return total


def mail_types(config: Config) -> str:
    """Value of --mail-type of the job with the hub; empty if there is none."""
    if config.layout == "jobs":
        return group_component(config, HUB).options.get(_MAIL_TYPES, "")
    return components(config)[0].options.get(_MAIL_TYPES, "")


def _het_components(config: Config) -> list[Component]:
    names = [name for name in config.groups if name != HUB]
    riders: tuple[str, ...] = ()
    if config.site.cpu_nodes:
        host = HUB
        least_nodes = 1 if config.slurm.one_node_hub else _HET_HUB_NODES
        nodes = max(config.groups[HUB].resources.nodes, least_nodes)
    else:
        # The hub shares the nodes of the largest group.
        host = max(names, key=lambda name: config.groups[name].resources.nodes, default=HUB)
        nodes = config.groups[host].resources.nodes
        riders = () if host == HUB else (HUB,)
        names = [name for name in names if name != host]
    mistakes, allocations = Mistakes(), list[Component]()
    if nodes < _HET_HUB_NODES and not config.slurm.one_node_hub:
        mistakes.add(
            f"groups.{host}.resources.nodes: found 1 for component 0 of a het job, where any "
            "node's death would end the whole run; take two nodes, or layout: jobs, or allow it "
            "by slurm.one_node_hub: true"
        )
    # Groups of one node come last, see the top of this module.
    names.sort(key=lambda name: config.groups[name].resources.nodes == 1)
    with mistakes:
        allocations.append(_component(config, host, nodes, riders=riders))
    for name in names:
        with mistakes:
            allocations.append(_component(config, name, config.groups[name].resources.nodes))
    mistakes.raise_if_any()
    return allocations


def _separate_jobs(config: Config) -> list[Component]:
    mistakes, allocations = Mistakes(), list[Component]()
    for name in (HUB, *(name for name in config.groups if name != HUB)):
        with mistakes:
            allocations.append(group_component(config, name))
    mistakes.raise_if_any()
    return allocations


def _local_job(config: Config) -> list[Component]:
    mistakes, cpus = Mistakes(), 0
    for name, group in config.groups.items():
        if group.resources.nodes > 1:
            mistakes.add(
                f"groups.{name}.resources.nodes: found {group.resources.nodes}, allowed with "
                "layout local: 1; for more take layout: het or jobs"
            )
        else:
            with mistakes:
                cpus += tasks_per_node(config, name) * group.resources.cpus_per_task
    mistakes.raise_if_any()
    # The options and the memory of the hub are meant for CPU nodes, so that they do not count here.
    resources = [group.resources for name, group in config.groups.items() if name != HUB]
    gpus = sum(group.resources.gpus_per_node for group in config.groups.values())
    allocation = Component(
        groups=(HUB, *(name for name in config.groups if name != HUB)),
        nodes=1,
        # One task with all CPUs, because the batch script starts the roles itself, not as steps.
        tasks_per_node=1,
        cpus_per_task=cpus,
        gpus_per_node=gpus,
        memory=_memory(config, *(group.memory for group in resources)),
        time=config.slurm.time,
        **_changes(_stated_options(config, gpus, [group.options for group in resources])),
    )
    return [allocation]


def _component(
    config: Config, name: str, nodes: int, time: str = "", riders: tuple[str, ...] = ()
) -> Component:
    """An allocation of ``nodes`` for a group. Groups in ``riders`` share its CPUs."""
    has_hub = HUB in (name, *riders)
    resources, tasks, mistakes = group_settings(config, name).resources, 0, Mistakes()
    with mistakes:
        _check_devices(config, name)
    with mistakes:
        tasks = tasks_per_node(config, name)
    mistakes.raise_if_any()
    return Component(
        groups=(name, *riders),
        nodes=nodes,
        tasks_per_node=tasks,
        cpus_per_task=resources.cpus_per_task,
        gpus_per_node=_gpus(config, name),
        memory=_memory(config, resources.memory),
        time=time or config.slurm.time,
        **_changes(
            _stated_options(
                config,
                _gpus(config, name),
                [resources.options],
                hub=name == HUB,
                has_hub=has_hub,
            )
        ),
    )


def _stated_options(
    config: Config,
    gpus: int,
    groups: Sequence[Mapping[str, str | None]],
    hub: bool = False,
    has_hub: bool = True,
) -> dict[str, str | None]:
    """sbatch options of an allocation with ``gpus`` on each node: those of the site, of the kind of
    nodes, and of its ``groups``. None removes an option.

    ``hub``: it is the hub alone; ``has_hub``: the hub is in it. Only the allocation with the hub
    sends the mails that the site's options request, because the others tell nothing about the run.
    """
    options: dict[str, str | None] = {**_queue_options(config, hub), **config.site.options}
    if not has_hub:
        options.pop(_MAIL_TYPES, None)
    options |= config.site.gpu_options if gpus else config.site.cpu_options
    for group in groups:
        options |= group
    return options


class _Changes(TypedDict):
    options: dict[str, str]
    removed: frozenset[str]


def _changes(options: Mapping[str, str | None]) -> _Changes:
    """Fields of a `Component`: the options that are stated, and the names of the others."""
    stated = {name: value for name, value in options.items() if value is not None}
    return {"options": stated, "removed": frozenset(options.keys() - stated.keys())}


def _queue_options(config: Config, hub: bool = False) -> dict[str, str]:
    site = config.site
    partition = (site.hub_partition if hub and site.cpu_nodes else "") or site.partition
    options = {"partition": partition, "account": site.account, "qos": site.qos}
    return {option: value for option, value in options.items() if value}


def _gpus(config: Config, name: str) -> int:
    """GPUs of a group on each node. The hub requests at least one if all nodes have GPUs, because
    such sites often refuse a job without GPUs or place it in an unsuitable partition."""
    gpus = group_settings(config, name).resources.gpus_per_node
    if name == HUB and not config.site.cpu_nodes and config.model.device == "cuda":
        return max(gpus, 1)
    return gpus


def _memory(config: Config, *memories: str) -> str:
    """The first stated memory, if the site requests memory by --mem."""
    if config.site.memory_request != "mem":
        return ""
    return next((memory for memory in memories if memory), "")


def _uneven(config: Config, group: str, role: str) -> str:
    parallel, nodes = getattr(config, role).parallel, group_settings(config, group).resources.nodes
    return (
        f"groups.{group}.resources.nodes: found {nodes}, allowed: a divisor of {role}'s "
        f"{parallel.ranks} ranks ({role}.parallel: {parallel}); change either"
    )


def _check_devices(config: Config, name: str) -> None:
    group = group_settings(config, name)
    requests_gpus = group.resources.gpus_per_node and config.site.gpu_request != "none"
    key, devices = device_setting(group)
    if group.devices or (requests_gpus and devices):
        raise ConfigError(
            f"groups.{name}.{key}: found {devices!r}, allowed with layout "
            f"{config.layout}: none, as "
            "Slurm gives each group its own GPUs; remove it, or take layout: local"
        )


def _time_limits(config: Config) -> dict[str, str]:
    """The time limits of the layout's jobs, by their keys. In layout `het`, the time limit of a
    group applies only to its replacement jobs, and is not included."""
    group_limits = {}
    if config.layout == "jobs":
        for name, group in config.groups.items():
            if group.resources.time:
                group_limits[f"groups.{name}.resources.time"] = group.resources.time
    if len(group_limits) == len(config.groups):
        return group_limits
    return {"slurm.time": config.slurm.time} | group_limits


def _check_signal(config: Config, key: str, time: str) -> None:
    if config.slurm.signal_s >= time_limit_s(time, key):
        raise ConfigError(
            f"slurm.signal_s: found {config.slurm.signal_s}, allowed: less than the "
            f"{time_limit_s(time, key)} s of "
            f"{key} ({time}), else the run ends for its successor as soon as it starts"
        )
