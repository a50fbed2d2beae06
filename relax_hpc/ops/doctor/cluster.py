"""Findings by asking Slurm: the request against partitions, nodes, limits and Slurm's
configuration."""

from __future__ import annotations

import difflib
import grp
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from relax_hpc.base.errors import ConfigError
from relax_hpc.cluster.slurm.commands import Node, Slurm, SlurmError, parse_time
from relax_hpc.cluster.slurm.layout import Component, seconds
from relax_hpc.cluster.slurm.render import render
from relax_hpc.config.schema import Config
from relax_hpc.ops.doctor.accounts import check_accounts, number
from relax_hpc.ops.doctor.finding import Finding, error, ok, warning
from relax_hpc.ops.doctor.memory import check_memory

TRIED_VERSIONS = ("22.05",)
"""Releases of Slurm that the whole toolkit was run on."""
MIN_KILL_WAIT_S = 30
_UNUSABLE = (
    "down",
    "drain",
    "drng",
    "fail",
    "maint",
    "unk",
    "no_respond",
    "power_down",
    "reboot",
    "future",
)
_UNITS = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}


@dataclass(slots=True)
class Cluster:
    """Slurm's answers; what it did not answer is empty and among the problems."""

    version: str = ""
    config: dict[str, str] = field(default_factory=dict)
    partitions: dict[str, dict[str, str]] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)

    @property
    def answers(self) -> bool:
        return bool(self.partitions and self.nodes)

    @property
    def hosts(self) -> int:
        """Machines behind the nodes: a sandbox's nodes share one address."""
        return len({node.address for node in self.nodes})


def look(slurm: Slurm) -> Cluster:
    """Ask once for everything that the checks share."""
    found = Cluster()
    if missing := slurm.missing():
        text = (
            f"Slurm: {', '.join(missing)} not found on PATH; load the site's Slurm module, or "
            "take layout: local"
        )
        found.problems.append(error(text))
        return found
    try:
        found.partitions, found.nodes = slurm.partitions(), slurm.nodes()
        found.config, found.version = slurm.config(), slurm.version()
    except SlurmError as problem:
        found.problems.append(error(f"Slurm: {problem}"))
    return found


def check_cluster(
    config: Config, parts: list[Component], slurm: Slurm, cluster: Cluster
) -> Iterator[Finding]:
    """All findings about the cluster; what Slurm cannot say yields a warning that names it."""
    findings = [*_version(cluster)]
    for part in parts:
        findings += _component(config, part, cluster)
    findings += _layout(config, cluster)
    findings += _signals(config, cluster)
    for what, check in {
        "site.mpi.launcher": lambda: _mpi(config, slurm),
        "site.container.runtime": lambda: _pyxis(config, slurm),
        "site.account, site.qos and limits of jobs": lambda: check_accounts(config, parts, slurm),
    }.items():
        findings += _asked(what, check)
    yield from dict.fromkeys(findings)
    if not any(finding.severity == "error" for finding in findings):
        yield from _asked("sbatch --test-only", lambda: _test_only(config, slurm))


def _asked(what: str, check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    try:
        return list(check())
    except SlurmError as problem:
        return [warning(f"{what}: not checked: {problem}")]


def _version(cluster: Cluster) -> Iterator[Finding]:
    if not cluster.version.startswith(TRIED_VERSIONS):
        tried = ", ".join(TRIED_VERSIONS)
        yield warning(
            f"Slurm {cluster.version or '(unknown)'}: untried, tried are {tried}; try a small run "
            "first"
        )
    else:
        yield ok(f"Slurm {cluster.version}: tried")


def _component(config: Config, part: Component, cluster: Cluster) -> Iterator[Finding]:
    """Findings on one allocation and the partitions it names."""
    named = [name for name in part.options.get("partition", "").split(",") if name]
    names = named or [
        name for name, table in cluster.partitions.items() if table.get("Default") == "YES"
    ]
    key = (
        "site.hub_partition"
        if part.name == "hub" and config.site.hub_partition
        else "site.partition"
    )
    if not names:
        yield error(
            f"{key}: found none, and Slurm has no default; name one of "
            f"{', '.join(cluster.partitions)}"
        )
    for name in names:
        if name not in cluster.partitions:
            near = difflib.get_close_matches(name, cluster.partitions, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield error(f"{key}: found {name!r}, allowed: {', '.join(cluster.partitions)}{hint}")
    tables = [cluster.partitions[name] for name in names if name in cluster.partitions]
    for table in tables:
        yield from _partition(config, part, table, key)
    if tables:
        nodes = {node.name: node for node in cluster.nodes if node.partition in names}
        yield from _size(config, part, list(nodes.values()), tables)
        limits = cluster.config | {
            name: value for name, value in tables[0].items() if name.startswith("DefMem")
        }
        asked = mebibytes(part.memory or part.options.get("mem", ""))
        yield from check_memory(config, part, asked, list(nodes.values()), limits)


def _partition(
    config: Config, part: Component, table: dict[str, str], key: str
) -> Iterator[Finding]:
    name = table["PartitionName"]
    if table.get("State", "UP") != "UP":
        yield error(f"{key}: partition {name} is {table['State']}; name another, or ask the site")
    if config.site.sbatch_on_nodes and table.get("AllocNodes", "ALL") != "ALL":
        yield error(
            f"site.sbatch_on_nodes: found true, but jobs for partition {name} may be submitted on "
            f"{table['AllocNodes']} alone; set it to false, and give the groups spares"
        )
    for limit, option, where in (
        ("Accounts", "account", "site.account"),
        ("Qos", "qos", "site.qos"),
    ):
        value, allowed = part.options.get(option, ""), table.get(f"Allow{limit}", "ALL")
        if value and allowed != "ALL" and value not in allowed.split(","):
            yield error(f"{where}: found {value!r}, allowed in partition {name}: {allowed}")
        if value and value in table.get(f"Deny{limit}", "").split(","):
            yield error(f"{where}: found {value!r}, which partition {name} denies; name another")
    groups = table.get("AllowGroups", "ALL")
    if groups != "ALL" and not set(groups.split(",")) & _own_groups():
        yield error(
            f"{key}: partition {name} is for the groups {groups}, of which you are in none; name "
            "another"
        )
    if os.getuid() == 0 and table.get("DisableRootJobs") == "YES":
        yield error(f"{key}: partition {name} takes no jobs of root; submit as a plain user")
    if config.layout == "jobs" and table.get("OverSubscribe") == "EXCLUSIVE" and part.name == "hub":
        yield warning(
            f"{key}: partition {name} gives whole nodes, one of them to the hub alone; name a "
            "smaller one"
        )


def _own_groups() -> set[str]:
    names = {"root"} if os.getuid() == 0 else set()
    for group in {os.getgid(), *os.getgroups()}:
        try:
            names.add(grp.getgrgid(group).gr_name)
        except KeyError:
            continue
    return names


def _size(
    config: Config, part: Component, nodes: list[Node], tables: list[dict[str, str]]
) -> Iterator[Finding]:
    key, names = (
        f"groups.{part.name}.resources",
        ", ".join(table["PartitionName"] for table in tables),
    )
    most = max((number(table.get("MaxNodes", ""), len(nodes)) for table in tables), default=0)
    if part.nodes > min(most, len(nodes)):
        yield error(
            f"{key}.nodes: found {part.nodes}, allowed in partition {names}: "
            f"{min(most, len(nodes))}; take fewer, or another partition"
        )
    if (least := min(int(number(table.get("MinNodes", ""), 0)) for table in tables)) > part.nodes:
        yield error(
            f"{key}.nodes: found {part.nodes}, allowed in partition {names}: at least {least}"
        )
    wants = [
        (
            "gpus_per_node",
            0 if config.site.gpu_request == "none" else part.gpus_per_node,
            _gpus(config),
        ),
        ("cpus_per_task", part.tasks_per_node * part.cpus_per_task, lambda node: node.cpus),
        ("memory", mebibytes(part.memory), lambda node: node.memory_mib),
    ]
    for name, wanted, has in wants:
        best = max(map(has, nodes), default=0)
        if wanted > best:
            yield _too_much(config, part, f"{key}.{name}", wanted, best, names)
    fitting = [node for node in nodes if all(wanted <= has(node) for _, wanted, has in wants)]
    usable = [
        node
        for node in fitting
        if not node.state.lower().startswith(_UNUSABLE) and node.state[-1] != "*"
    ]
    if len(usable) < part.nodes <= len(nodes) and fitting:
        yield warning(
            f"{key}: {part.nodes} nodes asked for, {len(usable)} of partition {names} fit and are "
            "up at the moment; the job will wait for more"
        )
    limits = [parse_time(table.get("MaxTime", "UNLIMITED")) for table in tables]
    asked = seconds(part.time, "time")
    if all(limit is not None and asked > limit for limit in limits):
        where = "slurm.time" if part.time == config.slurm.time else f"{key}.time"
        allowed = max(
            (table["MaxTime"] for table in tables), key=lambda text: parse_time(text) or 0
        )
        yield error(
            f"{where}: found {part.time}, allowed in partition {names}: {allowed}; ask for less, "
            "or another"
        )


def _too_much(
    config: Config, part: Component, key: str, wanted: int, best: int, names: str
) -> Finding:
    if key.endswith("cpus_per_task"):
        return error(
            f"{key}: found {part.cpus_per_task}, for {part.tasks_per_node} processes a node "
            f"{wanted} CPUs; nodes of "
            f"partition {names} have at most {best}; lower it, or take more nodes"
        )
    if key.endswith("memory"):
        return error(
            f"{key}: found {part.memory}, nodes of partition {names} have at most {best}M; ask for "
            "less"
        )
    kind = f" of type {config.site.gpu_type}" if config.site.gpu_type else ""
    fix = (
        "take fewer, or another partition"
        if best
        else "see site.gpu_type and site.gpu_request, or sinfo -o '%P %G'"
    )
    return error(
        f"{key}: found {wanted}, nodes of partition {names} have at most {best} GPUs{kind}; {fix}"
    )


def _gpus(config: Config) -> Callable[[Node], int]:
    kind = config.site.gpu_type

    def count(node: Node) -> int:
        found = re.findall(r"\bgpu:(?:([^:,()]+):)?(\d+)", node.gres)
        return sum(int(number) for name, number in found if not kind or name == kind)

    return count


def mebibytes(memory: str) -> int:
    """Mebibytes of a text such as `64G`; 0 for `0`, which asks for all, and for no text: they fit
    everywhere."""
    found = re.fullmatch(r"(\d+)([KMGT]?)", memory.upper())
    return int(int(found[1]) * _UNITS[found[2] or "M"]) if found else 0


def _layout(config: Config, cluster: Cluster) -> Iterator[Finding]:
    """Findings on what heterogeneous and requeued jobs need of Slurm's configuration."""
    if config.layout == "het":
        scheduler = cluster.config.get("SchedulerType", "sched/backfill")
        if scheduler != "sched/backfill":
            yield error(
                f"layout: found het, but SchedulerType is {scheduler}, and heterogeneous jobs are "
                "started by sched/backfill alone; take layout: jobs"
            )
        if re.search(r"disable_het(job|ero)_steps", cluster.config.get("SchedulerParameters", "")):
            yield warning(
                "layout: found het with SchedulerParameters=disable_hetjob_steps; steps of one "
                "component, which this "
                "run has, work in 22.05 all the same; if they fail here take layout: jobs"
            )
    if config.layout == "jobs" and cluster.config.get("JobRequeue", "1") == "0":
        yield warning(
            "layout: found jobs with JobRequeue=0; the jobs ask for --requeue, which Slurm grants "
            "unless the site's "
            "submit plugin takes it away; watch `scontrol show job` for Requeue=1"
        )


def _signals(config: Config, cluster: Cluster) -> Iterator[Finding]:
    """Findings on the time to save before a kill."""
    kill_wait = re.match(r"\d+", cluster.config.get("KillWait", ""))
    if kill_wait and int(kill_wait[0]) < MIN_KILL_WAIT_S:
        yield warning(
            f"KillWait: found {kill_wait[0]} s, recommended: {MIN_KILL_WAIT_S} or more, as a "
            "preempted run saves "
            "between SIGTERM and SIGKILL; lower checkpoint.every and checkpoint.every_s"
        )
    mode = cluster.config.get("PreemptMode", "OFF").upper()
    if "SUSPEND" in mode:
        yield warning(
            "PreemptMode: found SUSPEND; a suspended group is dead to the others and replaced; "
            "avoid such qos"
        )
    sends = "preempt_send_user_signal" in cluster.config.get("SlurmctldParameters", "")
    if ("REQUEUE" in mode or "CANCEL" in mode) and not sends:
        yield warning(
            f"PreemptMode: found {mode} without SlurmctldParameters=preempt_send_user_signal, so "
            "preemption comes "
            f"without the {config.slurm.signal_s} s of slurm.signal_s; lower checkpoint.every and "
            "checkpoint.every_s, or ask the site for it"
        )


def _mpi(config: Config, slurm: Slurm) -> Iterator[Finding]:
    launcher = config.site.mpi.launcher
    if launcher == "mpiexec" or config.layout == "local":
        return
    plugins = slurm.mpi_plugins()
    if not any(plugin == launcher or plugin.startswith(f"{launcher}_") for plugin in plugins):
        yield error(
            f"site.mpi.launcher: found {launcher}, allowed by srun --mpi=list: "
            f"{', '.join(plugins) or 'none'}"
        )


def _pyxis(config: Config, slurm: Slurm) -> Iterator[Finding]:
    if config.site.container.runtime == "pyxis" and "--container-image" not in slurm.srun_help():
        yield error(
            "site.container.runtime: found pyxis, but srun has no --container-image here; take "
            "apptainer, or none"
        )


def _test_only(config: Config, slurm: Slurm) -> Iterator[Finding]:
    """Slurm's own opinion, which knows of reservations, constraints and the site's submit
    plugin."""
    try:
        texts = render(config)
    except ConfigError:
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, text in texts.items():
            path = Path(folder) / name
            path.write_text(text)
            try:
                slurm.test_only(path)
            except SlurmError as problem:
                if problem.transient or problem.timed_out:
                    raise
                said = problem.said or str(problem)
                named = [
                    f"site.{key}" for key in ("account", "partition", "qos") if key in said.lower()
                ]
                keys = ", ".join(named) or "site.options"
                yield error(f"{name}: sbatch --test-only refuses it: {said}; see {keys}")
