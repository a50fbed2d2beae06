"""Checks of groups: the roles in them, the fields that roles produce, and GPUs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.fields import FIELDS, fields_by
from relax_hpc.base.machine.gpu_vendors import VENDORS, find_vendor
from relax_hpc.config.gpus import device_setting
from relax_hpc.config.groups import base_name, groups_that_train, rank_count
from relax_hpc.config.load import declare_run_fields
from relax_hpc.config.roles import ROLES
from relax_hpc.config.schema import Config
from relax_hpc.net.rendezvous.visible_gpus import find_device_mistakes
from relax_hpc.ops.checks.machine import runs_here


def check_groups(config: Config) -> Iterator[str]:
    """Check that each role that the run needs is in one group."""
    try:
        declare_run_fields(config)
    except ConfigError as error:
        yield from error.mistakes
    if "hub" not in config.groups:
        yield (
            f"groups: found {', '.join(config.groups) or 'none'}, but no hub; add hub: {{roles: "
            f"[advantages]}}"
        )
    placed: Counter[str] = Counter()
    for group in config.groups.values():
        placed.update(group.roles)
    for role, count in placed.items():
        if count > 1:
            groups = [name for name, group in config.groups.items() if role in group.roles]
            yield (
                f"groups: found role {role} {count} times (in {', '.join(groups)}), allowed: "
                "once; remove the others"
            )
    for role in _always_needed(config):
        if role not in placed:
            yield (
                f"groups: found role {role} in no group; every run needs it, add it to the "
                "roles of one"
            )
    yield from _check_training_roles(config, placed)
    for name, group in config.groups.items():
        if not group.roles and name != "hub":
            yield (
                f"groups.{name}.roles: found none; give it a role, or remove the group (groups: "
                f"{{{name}: null}})"
            )


def _check_training_roles(config: Config, placed: Collection[str]) -> Iterator[str]:
    """Check roles that give fields to the loss; ``placed``: roles in groups."""
    if config.only == "rollout":
        return
    coefficient = config.algorithm.kl.coefficient
    if coefficient and "reference" not in {*placed, *config.actor.forward}:
        yield (
            f"algorithm.kl.coefficient: found {coefficient}, but role reference is in no group; "
            "set it to 0, or add reference to the roles of a group, or to actor.forward"
        )
    yield from _check_actor_forward(config, placed)


def _always_needed(config: Config) -> tuple[str, ...]:
    """Roles that a run with this kind of algorithm always has.

    Other checks report a missing `reference` (for the loss) or `actor_fwd` (for several updates
    per step).
    """
    if config.algorithm.from_file:
        return ("data", "actor")
    parts = {"rollout": ("rollout", "collector"), "train": ("exported_rows", "actor", "advantages")}
    return parts.get(config.only, ("rollout", "actor", "advantages"))


def _check_actor_forward(config: Config, placed: Collection[str]) -> Iterator[str]:
    """Check roles that score inside of the actor; ``placed``: roles in groups."""
    for role in sorted({*placed}.intersection(config.actor.forward)):
        yield (
            f"actor.forward: found {role}, which is also in a group, allowed: one of them; remove "
            "it here or there"
        )
    if config.algorithm.uses_old and "actor_fwd" not in {*placed, *config.actor.forward}:
        for name in ("passes", "mini_batches"):
            value = getattr(config.algorithm, name)
            if value > 1:
                yield (
                    f"algorithm.{name}: found {value} without role actor_fwd, allowed: 1; the "
                    "ratio to the policy before the step would always be 1, so nothing is "
                    "clipped; add actor_fwd to the roles of a group, or to actor.forward"
                )
    refresh_every = config.algorithm.kl.refresh_every
    if "reference" in config.actor.forward and refresh_every:
        yield (
            f"algorithm.kl.refresh_every: found {refresh_every} with reference in actor.forward, "
            "allowed: 0; checkpoints do not hold the refreshed weights, so a restart would lose "
            "them; put reference into a group"
        )


def check_parts(config: Config) -> Iterator[str]:
    """Check the settings of a run that only generates, or only trains."""
    if config.only and config.algorithm.from_file:
        yield (
            f"only: found {config.only!r} with algorithm {config.algorithm.name}, allowed: '', "
            "because its rows come from data.train"
        )
    elif config.only == "train" and not config.rows:
        yield (
            "rows: found '' with only: train, give a file of rows (relax-hpc queue export RUN "
            "--steps A-B --output FILE)"
        )
    elif config.only == "train" and not Path(config.rows).is_file():
        yield f"rows: found {config.rows!r}, allowed: a file of rows; there is no such file"
    if config.rows and config.only != "train":
        yield f"rows: found {config.rows!r} without only: train; set it, or remove rows"


def check_colocation(config: Config) -> Iterator[str]:
    """Check that rollout and actor can share devices if `colocate` is set."""
    if not config.colocate:
        return
    if config.max_staleness:
        yield (
            f"colocate: found true with max_staleness {config.max_staleness}, allowed: 0; engines "
            "that generate stale rows while the actor trains need other devices"
        )
    roles = next((group.roles for group in config.groups.values() if "actor" in group.roles), [])
    if "rollout" not in roles:
        yield (
            "colocate: found true with rollout and actor in different groups, allowed: one group "
            "(groups: {rollout: null, actor: {roles: [rollout, actor]}}); groups do not share "
            "devices"
        )


def check_fields(config: Config) -> Iterator[str]:
    """Check that a role of the run produces each field that the algorithm needs.

    `check_groups` reports the roles that most losses need with a better message.
    """
    trainers = groups_that_train(config.groups)
    for role in trainers:
        produced = fields_by(role)
        if produced and not ROLES[role].scores:
            yield (
                f"groups: found role {role}, which trains and produces {', '.join(produced)}, "
                "allowed: one of both, because rows that it claims count as trained; let a role "
                "that does not train produce them"
            )
    yield from _check_claimants(config)
    if config.only == "rollout":
        return
    algorithm = config.algorithm
    if "critic" in trainers and "returns" not in algorithm.gives:
        yield (
            f"groups: found role critic with algorithm {algorithm.name}, which has none; remove "
            "it, or name ppo"
        )
    roles = set(_always_needed(config))
    if config.only == "train":
        # Exported rows have the fields of rollout.
        roles.add("rollout")
    for group in config.groups.values():
        roles.update(group.roles)
    for field in algorithm.needs:
        reason = "; inside of the actor it would come too late"
        yield from _check_producer(config, field, roles, reason)
    # `check_groups` reports the roles of these two.
    for field in set(algorithm.loss_needs()) - {"old_logprobs", "ref_logprobs"}:
        yield from _check_producer(config, field, roles.union(config.actor.forward), "")


def _check_claimants(config: Config) -> Iterator[str]:
    """Check that each role that needs fields can claim rows: the queue has no task for a role that
    neither trains nor gives a field."""
    for group_name, group in config.groups.items():
        for name in group.roles:
            role = ROLES[name]
            if role.needs and not role.trains and not fields_by(name):
                yield (
                    f"groups.{group_name}.roles: found {name}, which needs {', '.join(role.needs)} "
                    "and gives no field, allowed: a role that gives every row a field, because "
                    "the queue has no rows to claim for others; add a field that is not optional "
                    f"to `fields` of {name} in relax_hpc.config.roles.ROLES"
                )


def _check_producer(config: Config, field: str, roles: set[str], reason: str) -> Iterator[str]:
    """Check that the role that produces ``field`` is one of ``roles``."""
    role = FIELDS[field].by if field in FIELDS else ""
    if role in roles:
        return
    problem = "which no role produces, see relax_hpc.base.fields"
    if role:
        problem = f"but its role {role} is in no group{reason}"
    yield f"algorithm.name: found {config.algorithm.name}, which needs field {field}, {problem}"


def check_removed_engines(config: Config) -> Iterator[str]:
    """Check the engines in `rollout.without`, which the run does not start."""
    rollout = config.rollout
    names = ", ".join(rollout.without)
    bases = [name for name, group in config.groups.items() if "rollout" in group.roles]
    if config.colocate and rollout.without:
        yield (
            f"rollout.without: found {names} with colocate, allowed: none; the "
            "actor takes turns with all of rollout.replicas engines"
        )
    removed: dict[tuple[str, int], set[str]] = defaultdict(set)
    for name in rollout.without:
        group, _, number = name.rpartition("/")
        is_number = number.isdecimal() and int(number) < rollout.replicas
        if not base_name(group, bases) or not is_number:
            first = f"{bases[0] if bases else 'rollout'}/0"
            yield (
                f"rollout.without: found {name!r}, allowed: {first} to {rollout.replicas - 1} "
                "(rollout.replicas), or of its members such as rollout-2"
            )
            continue
        engines_per_process = max(1, rollout.replicas // rank_count(config, group, "rollout"))
        process = int(number) // engines_per_process
        removed[group, process].add(number)
        if len(removed[group, process]) == engines_per_process:
            yield (
                f"rollout.without: found {names}, which are all engines of process {process} of "
                f"{group}, allowed: all but one; to end whole jobs use relax-hpc scale --replicas"
            )


def check_devices(config: Config, starts_here: bool = False) -> Iterator[str]:
    """Check that groups request GPUs if, and only if, the run uses them. ``starts_here``: see
    `runs_here`."""
    if config.model.device != "cuda":
        yield from _check_unused_gpus(config)
        return
    if config.layout == "local":
        # With a site, layout `local` runs in a job; its node counts, not the submitting machine.
        if runs_here(config, starts_here) and not find_vendor():
            files = " or ".join(vendor.device_file for vendor in VENDORS.values())
            yield f"model.device: found cuda, but this machine has no GPU ({files}); set cpu"
        yield from find_device_mistakes(config)
        return
    for name, group in config.groups.items():
        needs_gpu = not all(ROLES[role].on_cpus for role in group.roles)
        if needs_gpu and not group.resources.gpus_per_node:
            yield (
                f"groups.{name}.resources.gpus_per_node: found 0 with model.device cuda; request "
                "GPUs, or add its roles to a group that has some"
            )


def _check_unused_gpus(config: Config) -> Iterator[str]:
    """Check that a run on CPUs, which is the default, requests no GPUs: they would be idle."""
    requests: dict[str, object] = {"site.options.gres": _gpu_gres(config.site.options)}
    for name, group in config.groups.items():
        key, resources = f"groups.{name}", group.resources
        requests[f"{key}.resources.gpus_per_node"] = resources.gpus_per_node
        requests[f"{key}.resources.options.gres"] = _gpu_gres(resources.options)
        setting, devices = device_setting(group)
        requests[f"{key}.{setting}"] = devices
    for key, value in requests.items():
        # The number -1 in a variable hides all GPUs.
        if value and value != "-1":
            yield (
                f"{key}: found {value!r} with model.device cpu, which uses no GPU; set "
                "model.device: cuda, or remove it"
            )


def _gpu_gres(options: Mapping[str, str | None]) -> str:
    """Option gres among sbatch ``options`` if it requests GPUs, else an empty text."""
    gres = options.get("gres") or ""
    return gres if "gpu" in gres else ""
