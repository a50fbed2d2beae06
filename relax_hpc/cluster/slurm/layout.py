"""Allocations of a `Config`: which groups get which nodes, tasks, CPUs and GPUs, and what that
costs.

`het`: one heterogeneous job. Its component 0, the hub, has two nodes (active and standby): with
one, the death of any node anywhere ends the whole job. One-node groups come last, as the death of
one takes those after it along (both seen on Slurm 22.05). `jobs`: one ordinary job a group; a hub
that is given two nodes has its standby there too. `local`: one job of one node that holds all
groups.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relax_hpc.base.errors import ConfigError, Mistakes
from relax_hpc.config.groups import group_of, ranks_of, roles_of
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
    """One allocation: a component of a het job, or an ordinary job."""

    groups: tuple[str, ...]
    """Groups in it, all in the `local` layout. The first names it; a hub that rides on another
    group comes second."""
    nodes: int
    tasks_per_node: int
    cpus_per_task: int
    gpus_per_node: int
    memory: str
    time: str
    options: dict[str, str]
    """sbatch options by long name, the group's over the site's."""

    @property
    def name(self) -> str:
        return self.groups[0]

    @property
    def hours(self) -> float:
        """Time limit, hours."""
        return seconds(self.time, "time") / 3600


def job_name(config: Config, part: Component) -> str:
    """Name of the job, or component, of ``part``. The part comes first, because squeue shows 8
    characters of a name."""
    return config.name if config.layout == "local" else f"{part.name}-{config.name}"


def components(config: Config) -> list[Component]:
    """The allocations of ``config.layout``, in the order of their het numbers; ConfigError, with
    every mistake, if they cannot be had."""
    if HUB not in config.groups:
        raise ConfigError(
            f"groups: found {', '.join(config.groups) or 'none'}, but no hub; add hub: {{roles: "
            f"[]}}"
        )
    mistakes, found = Mistakes(), list[Component]()
    with mistakes:
        found = {"het": _het, "jobs": _jobs, "local": _local}[config.layout](config)
    for key, time in _times(config).items():
        with mistakes:
            _check_signal(config, key, time)
    mistakes.raise_if_any()
    return found


def component(config: Config, group: str) -> Component:
    """The ordinary job of one group: in the `jobs` layout, or as a replacement, a spare or an
    elastic member."""
    resources = group_of(config, group).resources
    return _component(config, group, resources.nodes, resources.time or config.slurm.time)


def gpu_hours(config: Config) -> float:
    """GPU-hours that the run asks for, if all its allocations last to their time limits."""
    return sum(part.nodes * part.gpus_per_node * part.hours for part in components(config))


def node_hours(config: Config) -> float:
    """Node-hours, likewise; a node that several jobs may share counts once for each."""
    return sum(part.nodes * part.hours for part in components(config))


def tasks_per_node(config: Config, group: str) -> int:
    """Processes that a node of ``group`` must hold: those of all its roles; in the hub each node
    can hold all.

    ConfigError if the nodes do not divide the ranks of a role, or have too few GPUs for them.
    """
    resources = group_of(config, group).resources
    total, mistakes = 0, Mistakes()
    for role in roles_of(config, group):
        ranks = ranks_of(config, group, role)
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


def seconds(time: str, key: str) -> int:
    """A time limit as sbatch writes it; ConfigError naming ``key`` for anything else, no limit
    included.

    >>> seconds("90", "slurm.time"), seconds("1-12", "slurm.time"), seconds("24:00:00",
    ...     "slurm.time")
    (5400, 129600, 86400)
    """
    match = _TIME.fullmatch(time)
    total = 0
    if match:
        days = match["days"]
        parts = [int(match[name] or 0) for name in ("first", "second", "third")]
        if days is None and not match["third"]:
            parts = [0, *parts[:2]]
        total = int(days or 0) * 86400 + parts[0] * 3600 + parts[1] * 60 + parts[2]
    if not total:
        raise ConfigError(
            f"{key}: found {time!r}, allowed: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or "
            "D-HH:MM:SS, more than 0 (a run needs a limit; name the partition's)"
        )
    return total


def mail_types(config: Config) -> str:
    """Value of --mail-type of the job that has the hub; empty: none."""
    if config.layout == "jobs":
        return component(config, HUB).options.get(_MAIL_TYPES, "")
    return components(config)[0].options.get(_MAIL_TYPES, "")


def _het(config: Config) -> list[Component]:
    names = [name for name in config.groups if name != HUB]
    if config.site.cpu_nodes:
        host, riders = HUB, ()
        nodes = max(
            config.groups[HUB].resources.nodes, 1 if config.slurm.one_node_hub else _HET_HUB_NODES
        )
    else:
        host = max(names, key=lambda name: config.groups[name].resources.nodes, default=HUB)
        nodes, riders = config.groups[host].resources.nodes, () if host == HUB else (HUB,)
        names = [name for name in names if name != host]
    mistakes, found = Mistakes(), list[Component]()
    if nodes < _HET_HUB_NODES and not config.slurm.one_node_hub:
        mistakes.add(
            f"groups.{host}.resources.nodes: found 1 for component 0 of a het job, where any "
            "node's death would end the whole run; take two nodes, or layout: jobs, or allow it "
            "by slurm.one_node_hub: true"
        )
    names.sort(key=lambda name: config.groups[name].resources.nodes == 1)
    with mistakes:
        found.append(_component(config, host, nodes, riders=riders))
    for name in names:
        with mistakes:
            found.append(_component(config, name, config.groups[name].resources.nodes))
    mistakes.raise_if_any()
    return found


def _jobs(config: Config) -> list[Component]:
    mistakes, found = Mistakes(), list[Component]()
    for name in (HUB, *(name for name in config.groups if name != HUB)):
        with mistakes:
            found.append(component(config, name))
    mistakes.raise_if_any()
    return found


def _local(config: Config) -> list[Component]:
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
    # The hub's own options and memory are those of CPU nodes.
    resources = [group.resources for name, group in config.groups.items() if name != HUB]
    gpus = sum(group.resources.gpus_per_node for group in config.groups.values())
    part = Component(
        groups=(HUB, *(name for name in config.groups if name != HUB)),
        nodes=1,
        # One task with all CPUs: the roles are started by the batch script itself, not as steps.
        tasks_per_node=1,
        cpus_per_task=cpus,
        gpus_per_node=gpus,
        memory=_memory(config, *(group.memory for group in resources)),
        time=config.slurm.time,
        options=_stated_options(config, gpus, [group.options for group in resources]),
    )
    return [part]


def _component(
    config: Config, name: str, nodes: int, time: str = "", riders: tuple[str, ...] = ()
) -> Component:
    """An allocation of ``nodes`` for a group; a group that rides along shares its CPUs."""
    leads = HUB in (name, *riders)
    resources, tasks, mistakes = group_of(config, name).resources, 0, Mistakes()
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
        options=_stated_options(
            config,
            _gpus(config, name),
            [resources.options],
            hub=name == HUB,
            leads=leads,
        ),
    )


def _stated_options(
    config: Config,
    gpus: int,
    groups: Sequence[Mapping[str, str | None]],
    hub: bool = False,
    leads: bool = True,
) -> dict[str, str]:
    """sbatch options of an allocation with so many ``gpus`` a node: the site's, then those of its
    ``groups``, of which a null takes an option off. ``leads``: the mails that the site's options
    ask for are about this allocation; each further one would send a mail that says nothing of the
    run."""
    options: dict[str, str | None] = {**_places(config, hub), **config.site.options}
    if not leads:
        options.pop(_MAIL_TYPES, None)
    if gpus:
        options |= config.site.gpu_options
    for group in groups:
        options |= group
    return {name: value for name, value in options.items() if value is not None}


def _places(config: Config, hub: bool = False) -> dict[str, str]:
    site = config.site
    partition = (site.hub_partition if hub and site.cpu_nodes else "") or site.partition
    named = {"partition": partition, "account": site.account, "qos": site.qos}
    return {option: value for option, value in named.items() if value}


def _gpus(config: Config, name: str) -> int:
    """GPUs a node; where all nodes have some, a job without any is refused, or put where nobody
    wants it."""
    asked = group_of(config, name).resources.gpus_per_node
    return (
        max(asked, 1)
        if name == HUB and not config.site.cpu_nodes and config.model.device == "cuda"
        else asked
    )


def _memory(config: Config, *wanted: str) -> str:
    return (
        next((memory for memory in wanted if memory), "")
        if config.site.memory_request == "mem"
        else ""
    )


def _uneven(config: Config, group: str, role: str) -> str:
    parallel, nodes = getattr(config, role).parallel, group_of(config, group).resources.nodes
    return (
        f"groups.{group}.resources.nodes: found {nodes}, allowed: a divisor of {role}'s "
        f"{parallel.ranks} ranks ({role}.parallel: {parallel}); change either"
    )


def _check_devices(config: Config, name: str) -> None:
    group = group_of(config, name)
    asked = group.resources.gpus_per_node and config.site.gpu_request != "none"
    if asked and (devices := group.env.get("CUDA_VISIBLE_DEVICES")):
        raise ConfigError(
            f"groups.{name}.env.CUDA_VISIBLE_DEVICES: found {devices!r}, allowed with layout "
            f"{config.layout}: none, as "
            "Slurm gives each group its own GPUs; remove it, or take layout: local"
        )


def _times(config: Config) -> dict[str, str]:
    """The time limits of the layout's jobs, by their keys; in `het` a group's own is that of its
    replacements."""
    resources = {
        name: group.resources for name, group in config.groups.items() if config.layout == "jobs"
    }
    own = {
        f"groups.{name}.resources.time": found.time
        for name, found in resources.items()
        if found.time
    }
    return own if len(own) == len(config.groups) else {"slurm.time": config.slurm.time} | own


def _check_signal(config: Config, key: str, time: str) -> None:
    if config.slurm.signal_s >= seconds(time, key):
        raise ConfigError(
            f"slurm.signal_s: found {config.slurm.signal_s}, allowed: less than the "
            f"{seconds(time, key)} s of "
            f"{key} ({time}), else the run makes way as soon as it starts"
        )
