"""Checks of a run's request against Slurm's partitions, nodes, limits and configuration."""

from __future__ import annotations

import contextlib
import difflib
import grp
import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.machine.facts import Facts
from relax_hpc.base.machine.requirements import find_problems
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError, SlurmNode, parse_time
from relax_hpc.cluster.slurm.expedited_requeue import EXPEDITE, OPTION, is_enabled
from relax_hpc.cluster.slurm.layout import Component, time_limit_s
from relax_hpc.cluster.slurm.render import render
from relax_hpc.config.schema import Config
from relax_hpc.ops.checks.machine import environment_needs
from relax_hpc.ops.doctor.accounts import check_accounts, number
from relax_hpc.ops.doctor.finding import Finding, error, ok, warning
from relax_hpc.ops.doctor.memory import check_memory

TRIED_VERSIONS = ("22.05", "24.11", "25.11")
"""Releases of Slurm on which the whole toolkit has run."""
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
    """Slurm's answers. A field is empty if its query failed; `problems` then has the error."""

    version: str = ""
    config: dict[str, str] = field(default_factory=dict)
    partitions: dict[str, dict[str, str]] = field(default_factory=dict)
    nodes: list[SlurmNode] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)

    @property
    def answers(self) -> bool:
        return bool(self.partitions and self.nodes)

    @property
    def hosts(self) -> int:
        """Number of machines: the nodes of a sandbox share one address."""
        return len({node.address for node in self.nodes})

    def is_this_host(self) -> bool:
        """Whether this host is the only machine of the cluster."""
        host = socket.gethostname()
        names = (host, host.split(".")[0], "localhost", "127.0.0.1")
        return bool(self.nodes) and all(node.address in names for node in self.nodes)


def query_cluster(slurm: Slurm) -> Cluster:
    """Query Slurm once for everything that several checks need."""
    cluster = Cluster()
    if missing := slurm.missing():
        text = (
            f"Slurm: {', '.join(missing)} not found on PATH; load the site's Slurm module, or "
            "use layout: local"
        )
        cluster.problems.append(error(text))
        return cluster
    try:
        cluster.partitions, cluster.nodes = slurm.partitions(), slurm.nodes()
        cluster.config, cluster.version = slurm.config(), slurm.version()
    except SlurmError as problem:
        cluster.problems.append(error(f"Slurm: {problem}"))
    return cluster


def check_cluster(
    config: Config, components: list[Component], slurm: Slurm, cluster: Cluster
) -> Iterator[Finding]:
    """All findings about the cluster; a query that fails yields a warning."""
    findings = [*_version(cluster)]
    for component in components:
        findings += _component(config, component, cluster)
    findings += _layout(config, cluster)
    if config.layout == "jobs":
        findings += _expedited_requeue(components, cluster)
    findings += _signals(config, cluster)
    with contextlib.suppress(SlurmError):
        findings += _architecture(config, components, cluster, slurm)
    queries: dict[str, Callable[[], Iterator[Finding]]] = {
        "site.mpi.launcher": lambda: _mpi(config, slurm),
        "site.container.runtime": lambda: _container_option(config, slurm),
        "site.account, site.qos and limits of jobs": (
            lambda: check_accounts(config, components, slurm)
        ),
    }
    for subject, check in queries.items():
        findings += _run_check(subject, check)
    yield from dict.fromkeys(findings)
    if not any(finding.severity == "error" for finding in findings):
        yield from _run_check("sbatch --test-only", lambda: _test_only(config, slurm))


def _architecture(
    config: Config, components: list[Component], cluster: Cluster, slurm: Slurm
) -> list[Finding]:
    """Errors about partitions whose nodes have a CPU architecture that the environment does not
    support. One usable node of each partition is compared."""
    if config.site.container.runtime != "none":
        return []
    needs, findings = environment_needs(config), []
    names = set[str]()
    for component in components:
        names.update(component.options.get("partition", "").split(","))
    for name in sorted(names):
        usable = [node for node in cluster.nodes if node.partition == name and _is_usable(node)]
        if not usable:
            continue
        architecture = slurm.describe_node(usable[0].name).get("Arch", "")
        facts = Facts(system="Linux", architecture=architecture)
        for problem in find_problems(facts, needs):
            findings.append(error(f"{problem} (node {usable[0].name} of partition {name})"))
    return findings


def _run_check(subject: str, check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """Findings of ``check``, or a warning if Slurm does not answer."""
    try:
        return list(check())
    except SlurmError as problem:
        return [warning(f"{subject}: not checked: {problem}")]


def _version(cluster: Cluster) -> Iterator[Finding]:
    if not cluster.version.startswith(TRIED_VERSIONS):
        tried = ", ".join(TRIED_VERSIONS)
        yield warning(
            f"Slurm {cluster.version or '(unknown)'}: untested, tested: {tried}; try a small run "
            "first"
        )
    else:
        yield ok(f"Slurm {cluster.version}: tested")


def _component(config: Config, component: Component, cluster: Cluster) -> Iterator[Finding]:
    """Check one allocation against the partitions that it names."""
    names = [name for name in component.options.get("partition", "").split(",") if name]
    if not names:
        tables_by_name = cluster.partitions.items()
        names = [name for name, table in tables_by_name if table.get("Default") == "YES"]
    is_hub = component.name == "hub" and config.site.hub_partition
    key = "site.hub_partition" if is_hub else "site.partition"
    if not names:
        yield error(
            f"{key}: found none, and Slurm has no default partition; name one of "
            f"{', '.join(cluster.partitions)}"
        )
    for name in names:
        if name not in cluster.partitions:
            near = difflib.get_close_matches(name, cluster.partitions, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield error(f"{key}: found {name!r}, allowed: {', '.join(cluster.partitions)}{hint}")
    tables = [cluster.partitions[name] for name in names if name in cluster.partitions]
    for table in tables:
        yield from _partition(config, component, table, key)
    if tables:
        # Slurm lists a node once for each of its partitions.
        by_name = {node.name: node for node in cluster.nodes if node.partition in names}
        nodes = list(by_name.values())
        yield from _size(config, component, nodes, tables)
        yield from _time(config, component, tables)
        defaults = {name: text for name, text in tables[0].items() if name.startswith("DefMem")}
        memory_mib = parse_mebibytes(component.memory or component.options.get("mem", ""))
        yield from check_memory(config, component, memory_mib, nodes, cluster.config | defaults)


def _partition(
    config: Config, component: Component, table: dict[str, str], key: str
) -> Iterator[Finding]:
    """Check that the user may submit this component to the partition of ``table``."""
    name = table["PartitionName"]
    if table.get("State", "UP") != "UP":
        yield error(f"{key}: partition {name} is {table['State']}; name another, or ask the site")
    if config.site.sbatch_on_nodes and table.get("AllocNodes", "ALL") != "ALL":
        yield error(
            f"site.sbatch_on_nodes: found true, but partition {name} accepts jobs only from "
            f"{table['AllocNodes']}; set it to false, and give the groups spares"
        )
    for limit, option in (("Accounts", "account"), ("Qos", "qos")):
        value, allowed = component.options.get(option, ""), table.get(f"Allow{limit}", "ALL")
        problem = f"site.{option}: found {value!r}"
        if value and allowed != "ALL" and value not in allowed.split(","):
            yield error(f"{problem}, allowed in partition {name}: {allowed}")
        if value and value in table.get(f"Deny{limit}", "").split(","):
            yield error(f"{problem}, which partition {name} denies; name another")
    groups = table.get("AllowGroups", "ALL")
    if groups != "ALL" and not set(groups.split(",")) & _unix_groups():
        yield error(
            f"{key}: partition {name} is for the Unix groups {groups}, but you are in none; name "
            "another"
        )
    if os.getuid() == 0 and table.get("DisableRootJobs") == "YES":
        yield error(f"{key}: partition {name} rejects jobs of root; submit as another user")
    is_exclusive = table.get("OverSubscribe") == "EXCLUSIVE"
    if config.layout == "jobs" and is_exclusive and component.name == "hub":
        yield warning(
            f"{key}: partition {name} allocates whole nodes, and the hub would take one; name a "
            "partition with smaller nodes"
        )


def _unix_groups() -> set[str]:
    """Names of the user's Unix groups."""
    names = {"root"} if os.getuid() == 0 else set()
    for group in {os.getgid(), *os.getgroups()}:
        try:
            names.add(grp.getgrgid(group).gr_name)
        except KeyError:
            continue
    return names


def _size(
    config: Config, component: Component, nodes: list[SlurmNode], tables: list[dict[str, str]]
) -> Iterator[Finding]:
    """Check the number of nodes, and the CPUs, GPUs and memory of each."""
    key = f"groups.{component.name}.resources"
    names = ", ".join(table["PartitionName"] for table in tables)
    max_nodes = max((number(table.get("MaxNodes", ""), len(nodes)) for table in tables), default=0)
    if component.nodes > min(max_nodes, len(nodes)):
        yield error(
            f"{key}.nodes: found {component.nodes}, allowed in partition {names}: "
            f"{min(max_nodes, len(nodes))}; use fewer, or another partition"
        )
    min_nodes = min(int(number(table.get("MinNodes", ""), 0)) for table in tables)
    if min_nodes > component.nodes:
        yield error(
            f"{key}.nodes: found {component.nodes}, allowed in partition {names}: at least "
            f"{min_nodes}"
        )
    gpus = 0 if config.site.gpu_request == "none" else component.gpus_per_node
    cpus = component.tasks_per_node * component.cpus_per_task
    requests: list[tuple[str, int, Callable[[SlurmNode], int]]] = [
        ("gpus_per_node", gpus, lambda node: node.count_gpus(config.site.gpu_type)),
        ("cpus_per_task", cpus, lambda node: node.cpus),
        ("memory", parse_mebibytes(component.memory), lambda node: node.memory_mib),
    ]
    for name, requested, available in requests:
        largest = max(map(available, nodes), default=0)
        if requested > largest:
            yield _excess(config, component, f"{key}.{name}", requested, largest, names)
    fitting = [
        node
        for node in nodes
        if all(requested <= available(node) for _, requested, available in requests)
    ]
    usable = sum(map(_is_usable, fitting))
    if usable < component.nodes <= len(nodes) and fitting:
        yield warning(
            f"{key}: {component.nodes} nodes requested, but only {usable} nodes of partition "
            f"{names} fit and are up; the job waits for more"
        )


def _is_usable(node: SlurmNode) -> bool:
    """Whether jobs can start on the node; Slurm adds `*` to the state if it does not respond."""
    return not node.state.lower().startswith(_UNUSABLE) and node.state[-1] != "*"


def _time(config: Config, component: Component, tables: list[dict[str, str]]) -> Iterator[Finding]:
    """Check the time limit; it must be allowed in one of the partitions."""
    limits = [parse_time(table.get("MaxTime", "UNLIMITED")) for table in tables]
    time_s = time_limit_s(component.time, "time")
    if not all(limit is not None and time_s > limit for limit in limits):
        return
    is_of_run = component.time == config.slurm.time
    key = "slurm.time" if is_of_run else f"groups.{component.name}.resources.time"
    names = ", ".join(table["PartitionName"] for table in tables)
    allowed = max((table["MaxTime"] for table in tables), key=lambda text: parse_time(text) or 0)
    yield error(
        f"{key}: found {component.time}, allowed in partition {names}: {allowed}; request less, "
        "or use another partition"
    )


def _excess(
    config: Config, component: Component, key: str, requested: int, largest: int, names: str
) -> Finding:
    """Error for a request that no node of the partitions ``names`` can meet."""
    nodes = f"nodes of partition {names} have at most"
    if key.endswith("cpus_per_task"):
        return error(
            f"{key}: found {component.cpus_per_task}, which is {requested} CPUs for "
            f"{component.tasks_per_node} processes per node; {nodes} {largest}; lower it, or use "
            "more nodes"
        )
    if key.endswith("memory"):
        return error(f"{key}: found {component.memory}, {nodes} {largest}M; request less")
    kind = f" of type {config.site.gpu_type}" if config.site.gpu_type else ""
    fix = (
        "use fewer, or another partition"
        if largest
        else "see site.gpu_type and site.gpu_request, or sinfo -o '%P %G'"
    )
    return error(f"{key}: found {requested}, {nodes} {largest} GPUs{kind}; {fix}")


def parse_mebibytes(memory: str) -> int:
    """Mebibytes of a text such as `64G`.

    0 for `0`, which requests all memory, and for an empty text: such a request fits on every node.
    """
    match = re.fullmatch(r"(\d+)([KMGT]?)", memory.upper())
    return int(int(match[1]) * _UNITS[match[2] or "M"]) if match else 0


def _layout(config: Config, cluster: Cluster) -> Iterator[Finding]:
    """Check the settings of Slurm that heterogeneous and requeued jobs need."""
    if config.layout == "het":
        scheduler = cluster.config.get("SchedulerType", "sched/backfill")
        if scheduler != "sched/backfill":
            yield error(
                f"layout: found het, but SchedulerType is {scheduler}, and only sched/backfill "
                "starts heterogeneous jobs; use layout: jobs"
            )
        if re.search(r"disable_het(job|ero)_steps", cluster.config.get("SchedulerParameters", "")):
            yield warning(
                "layout: found het with SchedulerParameters=disable_hetjob_steps; this run starts "
                "steps of one component each, which Slurm 22.05 still allows; if they fail, use "
                "layout: jobs"
            )
    if config.layout == "jobs" and cluster.config.get("JobRequeue", "1") == "0":
        yield warning(
            "layout: found jobs with JobRequeue=0; the jobs request --requeue, which Slurm grants "
            "unless the site's submit plugin removes it; check that `scontrol show job` prints "
            "Requeue=1"
        )


def _expedited_requeue(components: list[Component], cluster: Cluster) -> Iterator[Finding]:
    """Check that Slurm accepts the expedited requeue that the user requests."""
    if is_enabled(cluster.config):
        yield ok("layout: jobs with an expedited requeue, which this Slurm offers")
        return
    for component in components:
        if component.options.get(OPTION) == EXPEDITE:
            yield error(
                f"groups.{component.name}: found the option {OPTION}: {EXPEDITE}, but Slurm "
                f"{cluster.version} refuses it without 25.11 and "
                "SlurmctldParameters=enable_expedited_requeue; remove it from the options of sbatch"
            )


def _signals(config: Config, cluster: Cluster) -> Iterator[Finding]:
    """Check that a preempted run has time to save before Slurm kills it."""
    kill_wait = re.match(r"\d+", cluster.config.get("KillWait", ""))
    if kill_wait and int(kill_wait[0]) < MIN_KILL_WAIT_S:
        yield warning(
            f"KillWait: found {kill_wait[0]} s, recommended: at least {MIN_KILL_WAIT_S} s, because "
            "a preempted run saves between SIGTERM and SIGKILL; lower checkpoint.every and "
            "checkpoint.every_s"
        )
    mode = cluster.config.get("PreemptMode", "OFF").upper()
    if "SUSPEND" in mode:
        yield warning(
            "PreemptMode: found SUSPEND; the run takes a suspended group for dead and replaces "
            "it; avoid a qos that can be suspended"
        )
    sends = "preempt_send_user_signal" in cluster.config.get("SlurmctldParameters", "")
    if ("REQUEUE" in mode or "CANCEL" in mode) and not sends:
        yield warning(
            f"PreemptMode: found {mode} without SlurmctldParameters=preempt_send_user_signal, so "
            f"Slurm does not send the signal of slurm.signal_s ({config.slurm.signal_s} s) before "
            "preemption; lower checkpoint.every and checkpoint.every_s, or ask the site for it"
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


def _container_option(config: Config, slurm: Slurm) -> Iterator[Finding]:
    """Check whether srun has the option of a container runtime that is its plugin."""
    runtime = config.site.container.runtime
    option = {"pyxis": "--container-image", "edf": "--environment"}.get(runtime, "")
    if option and option not in slurm.srun_help():
        yield error(
            f"site.container.runtime: found {runtime}, but srun here has no option {option}; "
            "use apptainer, or none"
        )


def _test_only(config: Config, slurm: Slurm) -> Iterator[Finding]:
    """Let `sbatch --test-only` check reservations, constraints and the site's submit plugin."""
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
                message = problem.answer or str(problem)
                options = ("account", "partition", "qos")
                named = [f"site.{option}" for option in options if option in message.lower()]
                settings = ", ".join(named) or "site.options"
                yield error(f"{name}: sbatch --test-only rejects it: {message}; see {settings}")
