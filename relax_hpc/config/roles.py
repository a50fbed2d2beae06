"""The roles, in the order in which reports list them.

A new role is an entry here, a section of the configuration if it has settings, and its module. The
module may be in any package that all processes of a run can import.
"""

from __future__ import annotations

from dataclasses import dataclass

from relax_hpc.base.fields import FieldSpec, declare_role_fields


@dataclass(frozen=True, slots=True)
class Role:
    """Properties of a role for the launcher, the queue and the reports."""

    module: str
    """Import path of the module whose ``run(context)`` serves until the run is finished."""
    ranked: bool = False
    """Whether its processes share one model, as section <role>.parallel defines."""
    sections: tuple[str, ...] = ()
    """Sections of the configuration that concern only this role. A group with the role may change
    them while other groups continue."""
    finishes_first: bool = False
    """Whether it finishes its current work when it is asked to stop."""
    needs: tuple[str, ...] = ()
    """Fields of rows that it requires."""
    fields: tuple[FieldSpec, ...] = ()
    """Fields that it gives to rows, unless the table of `relax_hpc.base.fields` has them. The name
    of the role becomes their producer. A role that does not train can claim rows only if it gives
    a field that is not optional."""
    trains: bool = False
    """Whether it learns from rows and writes checkpoints. A step is trained when all such roles of
    a run have trained it."""
    scores: str = ""
    """Queue task under which a role that trains also gives fields, before it trains; empty:
    none."""
    serves: bool = False
    """Whether it starts servers, in independent processes on each of its nodes."""
    on_cpus: bool = False
    """Whether it computes no model, so that its group needs no GPU."""
    mostly_waits: bool = False
    """Whether its processes need little CPU time, so that no CPU is requested or reserved for
    them."""


ROLES = {
    "rollout": Role("relax_hpc.roles.rollout", sections=("rollout", "reward"), serves=True),
    "genrm": Role("relax_hpc.roles.genrm", sections=("genrm",), serves=True),
    "data": Role("relax_hpc.roles.data", on_cpus=True),
    "exported_rows": Role("relax_hpc.roles.exported_rows", on_cpus=True),
    "collector": Role("relax_hpc.roles.collector", on_cpus=True),
    "gateway": Role("relax_hpc.roles.gateway", on_cpus=True),
    "api": Role("relax_hpc.service.role", sections=("service",), on_cpus=True, mostly_waits=True),
    "actor": Role(
        "relax_hpc.roles.actor",
        ranked=True,
        sections=("actor", "checkpoint"),
        finishes_first=True,
        needs=("token_ids", "reward"),
        trains=True,
    ),
    "actor_fwd": Role(
        "relax_hpc.roles.forward",
        ranked=True,
        sections=("actor_fwd",),
        needs=("token_ids",),
    ),
    "reference": Role(
        "relax_hpc.roles.forward",
        ranked=True,
        sections=("reference",),
        needs=("token_ids",),
    ),
    "teacher": Role(
        "relax_hpc.roles.forward",
        ranked=True,
        sections=("teacher",),
        needs=("token_ids",),
    ),
    "critic": Role(
        "relax_hpc.roles.critic",
        ranked=True,
        sections=("critic",),
        finishes_first=True,
        needs=("token_ids",),
        trains=True,
        scores="critic_values",
    ),
    "advantages": Role("relax_hpc.roles.advantages", needs=("reward",), on_cpus=True),
}
for _name, _role in ROLES.items():
    declare_role_fields(_name, _role.fields)
MAKERS = ("rollout", "data", "exported_rows")
"""Roles that create rows. A run has one of them: engines generate rows, or files contain them."""
FOR_TRAINING = ("actor", "actor_fwd", "reference", "teacher", "critic", "advantages")
"""Roles that have no work in a run with `only: rollout`."""
FOR_GENERATION = ("rollout", "genrm", "gateway")
"""Roles that have no work in a run with `only: train`."""
FOR_GENERATED_ROWS = ("rollout", "actor_fwd", "advantages")
"""Roles that have no work in a run whose rows come from files."""
POLICY = "actor"
"""The role that trains the model of the engines. Versions and their lineage belong to its
incarnations."""
RANKED = tuple(name for name, role in ROLES.items() if role.ranked)
"""Roles whose ranks share one model."""
