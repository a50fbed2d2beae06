"""The roles, in the order in which people read of them. A new one is an entry here, a section of
the configuration if it has settings, and its module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Role:
    """Facts on a role for the launcher, the queue and the reports."""

    module: str
    """Path of the module whose ``run(context)`` serves until the run is finished."""
    ranked: bool = False
    """Whether its processes split one model, as section <role>.parallel says."""
    sections: tuple[str, ...] = ()
    """Sections of the configuration that concern it alone: a group of it may change them while the
    others go on."""
    finishes_first: bool = False
    """Whether it completes what it is doing when it is asked to stop."""
    needs: tuple[str, ...] = ()
    """Fields of rows without which it cannot work. What it gives is declared in
    `relax_hpc.base.fields`."""
    trains: bool = False
    """Whether it learns from rows, and checkpoints: a step is trained when all such roles of a run
    have trained it."""
    scores: str = ""
    """Task of the queue under which a role that trains gives fields too, before it trains; empty:
    it gives none."""
    serves: bool = False
    """Whether it starts servers, in processes on each of its nodes that know nothing of each
    other."""


ROLES = {
    "rollout": Role("relax_hpc.roles.rollout", sections=("rollout", "reward"), serves=True),
    "genrm": Role("relax_hpc.roles.genrm", sections=("genrm",), serves=True),
    "data": Role("relax_hpc.roles.data"),
    "gateway": Role("relax_hpc.roles.gateway"),
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
    "advantages": Role("relax_hpc.roles.advantages", needs=("reward",)),
}
MAKERS = ("rollout", "data")
"""Roles that make rows, of which a run has one: engines draw them, or files have them."""
OF_DRAWN_ROWS = ("rollout", "actor_fwd", "advantages")
"""Roles without work in a run whose rows are those of files."""
ON_CPUS = ("data", "gateway", "advantages")
"""Roles that compute no model."""
POLICY = "actor"
"""The role that trains what engines generate with: versions and their lineage are of its
incarnations."""
RANKED = tuple(name for name, role in ROLES.items() if role.ranked)
"""Roles whose ranks split one model."""
