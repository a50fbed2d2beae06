"""Findings in the accounting database: the user's accounts, qualities of service, and limits of
jobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from relax_hpc.cluster.slurm.commands import Slurm, parse_time
from relax_hpc.cluster.slurm.layout import Component
from relax_hpc.config.schema import Config
from relax_hpc.ops.doctor.finding import Finding, error, warning


def check_accounts(config: Config, parts: list[Component], slurm: Slurm) -> Iterator[Finding]:
    """Account, qos and limits of jobs, as far as the site keeps them."""
    rows = slurm.associations()
    if not rows:
        yield warning(
            "site.account, site.qos: not checked but by sbatch --test-only, which says nothing of "
            "limits, as this Slurm keeps no accounts or sacctmgr is missing"
        )
        return
    accounts = sorted({row["Account"] for row in rows})
    for account in sorted({part.options.get("account", "") for part in parts} - {"", *accounts}):
        yield error(f"site.account: found {account!r}, allowed for you: {', '.join(accounts)}")
    allowed = sorted({name for row in rows for name in row["QOS"].split(",") if name})
    for qos in sorted({part.options.get("qos", "") for part in parts} - {"", *allowed}):
        yield error(f"site.qos: found {qos!r}, allowed for you: {', '.join(allowed) or 'none'}")
    account, qos = config.site.account, config.site.qos
    limits = [
        (row["MaxJobs"], row["MaxSubmit"], f"account {row['Account']}")
        for row in rows
        if row["Account"] == account
    ]
    qualities = {row["Name"]: row for row in slurm.qualities()}
    for name in sorted({part.options.get("qos", "") for part in parts} & qualities.keys()):
        yield from _resources(
            qualities[name], [part for part in parts if part.options.get("qos") == name], config
        )
    quality = [qualities[qos]] if qos in qualities else []
    limits += [(row["MaxJobsPU"], row["MaxSubmitPU"], f"qos {qos}") for row in quality]
    yield from _limits(
        config, parts, limits or [(row["MaxJobs"], row["MaxSubmit"], "you") for row in rows[:1]]
    )


def _limits(
    config: Config, parts: list[Component], limits: list[tuple[str, str, str]]
) -> Iterator[Finding]:
    """Jobs at once and in the queue; every component of a heterogeneous job counts as one."""
    ahead = 0
    if config.layout == "het":
        spares = sum(group.spares for group in config.groups.values())
        ahead = (
            config.slurm.successors * len(parts) + spares
            if not config.site.sbatch_on_nodes
            else len(parts)
        )
    for most_running, most_queued, who in limits:
        if len(parts) > number(most_running, len(parts)):
            yield error(
                f"layout: found {config.layout} with {len(parts)} jobs at once, allowed for "
                f"{who}: {most_running} (MaxJobs); merge groups, or ask the site for more"
            )
        if len(parts) + ahead > number(most_queued, len(parts) + ahead):
            yield error(
                f"layout: found {config.layout} with {len(parts) + ahead} jobs submitted, "
                "successors and spares "
                f"included, allowed for {who}: {most_queued} (MaxSubmitJobs); lower "
                "slurm.successors, or merge groups"
            )


def _resources(row: dict[str, str], parts: list[Component], config: Config) -> Iterator[Finding]:
    """Time, nodes and GPUs against a qos: beyond its limits jobs wait for ever."""
    most = parse_time(row["MaxWall"])
    for part in parts:
        if most is not None and part.hours * 3600 > most:
            yield error(
                f"slurm.time: found {part.time}, allowed by qos {row['Name']}: {row['MaxWall']} "
                "(MaxWall)"
            )
    gpus = [
        0 if config.site.gpu_request == "none" else part.nodes * part.gpus_per_node
        for part in parts
    ]
    nodes = [part.nodes for part in parts]
    for limit, whose, of in (
        ("MaxTRES", "a job", max),
        ("MaxTRESPU", "a user", sum),
        ("GrpTRES", "all users", sum),
    ):
        allowed = dict(word.split("=", 1) for word in row[limit].split(",") if "=" in word)
        for what, wanted in (("gres/gpu", of(gpus)), ("node", of(nodes))):
            if wanted > number(allowed.get(what, ""), wanted):
                yield error(
                    f"site.qos: found {row['Name']}, which allows {whose} {allowed[what]} of "
                    f"{what} ({limit}), but "
                    f"{wanted} are asked for; take a smaller size, or another qos"
                )


def number(text: str, otherwise: Any) -> Any:
    """``text`` as a whole number, or ``otherwise`` where Slurm says UNLIMITED or nothing."""
    return int(text) if text.isdigit() else otherwise
