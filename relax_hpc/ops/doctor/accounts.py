"""Checks against Slurm's accounting database: accounts, qualities of service, limits of jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from relax_hpc.cluster.slurm.commands import Slurm, parse_time
from relax_hpc.cluster.slurm.layout import Component
from relax_hpc.config.schema import Config
from relax_hpc.ops.doctor.finding import Finding, error, warning


def check_accounts(config: Config, components: list[Component], slurm: Slurm) -> Iterator[Finding]:
    """Check account, qos and limits of jobs, if the site uses an accounting database."""
    rows = slurm.associations()
    if not rows:
        yield warning(
            "site.account, site.qos: checked only by sbatch --test-only, which does not check "
            "limits; this Slurm has no accounting database, or sacctmgr is missing"
        )
        return
    accounts = sorted({row["Account"] for row in rows})
    for account in sorted(_option_values(components, "account").difference(accounts)):
        yield error(f"site.account: found {account!r}, allowed for you: {', '.join(accounts)}")
    allowed = sorted(set(",".join(row["QOS"] for row in rows).split(",")) - {""})
    requested_qos = _option_values(components, "qos")
    for name in sorted(requested_qos.difference(allowed)):
        yield error(f"site.qos: found {name!r}, allowed for you: {', '.join(allowed) or 'none'}")
    qos_limits = {row["Name"]: row for row in slurm.qos_limits()}
    for name in sorted(requested_qos & qos_limits.keys()):
        users = [component for component in components if component.options.get("qos") == name]
        yield from _resources(qos_limits[name], users, config)
    yield from _limits(config, components, _job_limits(config, rows, qos_limits))


def _option_values(components: list[Component], option: str) -> set[str]:
    """Values of a Slurm option that the components set."""
    return {component.options.get(option, "") for component in components} - {""}


def _job_limits(
    config: Config, rows: list[dict[str, str]], qos_limits: dict[str, dict[str, str]]
) -> list[tuple[str, str, str]]:
    """Limits of running and of submitted jobs, each with its owner (account, qos or user)."""
    account, qos = config.site.account, config.site.qos
    limits = []
    for row in rows:
        if row["Account"] == account:
            limits.append((row["MaxJobs"], row["MaxSubmit"], f"account {account}"))
    if qos in qos_limits:
        row = qos_limits[qos]
        limits.append((row["MaxJobsPU"], row["MaxSubmitPU"], f"qos {qos}"))
    return limits or [(row["MaxJobs"], row["MaxSubmit"], "you") for row in rows[:1]]


def _limits(
    config: Config, components: list[Component], limits: list[tuple[str, str, str]]
) -> Iterator[Finding]:
    """Check running and submitted jobs; each component of a heterogeneous job counts as one."""
    jobs = len(components)
    submitted = jobs
    if config.layout == "het" and config.site.sbatch_on_nodes:
        submitted += jobs
    elif config.layout == "het":
        spares = sum(group.spares for group in config.groups.values())
        submitted += config.slurm.successors * jobs + spares
    for max_running, max_submitted, owner in limits:
        if jobs > number(max_running, jobs):
            yield error(
                f"layout: found {config.layout} with {jobs} concurrent jobs, allowed for "
                f"{owner}: {max_running} (MaxJobs); merge groups, or ask the site for more"
            )
        if submitted > number(max_submitted, submitted):
            yield error(
                f"layout: found {config.layout} with {submitted} submitted jobs, including "
                f"successors and spares, allowed for {owner}: {max_submitted} (MaxSubmitJobs); "
                "lower slurm.successors, or merge groups"
            )


def _resources(
    row: dict[str, str], components: list[Component], config: Config
) -> Iterator[Finding]:
    """Check time, nodes and GPUs against a qos; a job beyond its limits stays pending for ever."""
    max_wall_s = parse_time(row["MaxWall"])
    for component in components:
        if max_wall_s is not None and component.hours * 3600 > max_wall_s:
            yield error(
                f"slurm.time: found {component.time}, allowed by qos {row['Name']}: "
                f"{row['MaxWall']} (MaxWall)"
            )
    counts_gpus = config.site.gpu_request != "none"
    nodes = [component.nodes for component in components]
    gpus = [
        component.nodes * component.gpus_per_node if counts_gpus else 0 for component in components
    ]
    limits: list[tuple[str, str, Callable[[list[int]], int]]] = [
        ("MaxTRES", "a job", max),
        ("MaxTRESPU", "a user", sum),
        ("GrpTRES", "all users", sum),
    ]
    for limit, scope, combine in limits:
        allowed = dict(item.split("=", 1) for item in row[limit].split(",") if "=" in item)
        for resource, amounts in (("gres/gpu", gpus), ("node", nodes)):
            requested = combine(amounts)
            if requested > number(allowed.get(resource, ""), requested):
                yield error(
                    f"site.qos: found {row['Name']} with {requested} {resource} requested, allowed "
                    f"for {scope}: {allowed[resource]} ({limit}); request less, or use another qos"
                )


def number(text: str, otherwise: Any) -> Any:
    """``text`` as an integer, or ``otherwise`` if Slurm prints UNLIMITED or an empty text."""
    return int(text) if text.isdigit() else otherwise
