"""`relax-hpc profile`: record traces of later steps of a running run, without a restart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import EXIT_DONE, ConfigError
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.job_lookup import load_unfinished_run
from relax_hpc.cluster.supervise.launch_records import members_of
from relax_hpc.commands.resubmit import ResubmitRequest, apply_change, print_progress
from relax_hpc.config.groups import group_roles
from relax_hpc.config.profiling import PROFILED_ROLES, parse_steps


def main(
    root: str,
    steps: str,
    roles: Sequence[str] = ("actor",),
    ranks: Sequence[int] = (0,),
    stacks: bool = False,
    shapes: bool = False,
) -> int:
    """Store the request as a change of the groups that have ``roles``. Their processes read it
    before their next step."""
    run = RunDir(Path(root))
    config = load_unfinished_run(run)
    parse_steps(steps)
    groups = {name: set(group_roles(config, name)) for name in members_of(run, config)}
    present = {role for role in PROFILED_ROLES if any(role in own for own in groups.values())}
    unknown = [role for role in roles if role not in present]
    if unknown:
        allowed = [role for role in PROFILED_ROLES if role in present]
        raise ConfigError(f"--role: found {unknown[0]!r}, allowed: {', '.join(allowed)}")
    settings: dict[str, Any] = {
        "profile.steps": steps,
        "profile.roles": list(roles),
        "profile.ranks": list(ranks),
        "profile.stacks": stacks,
        "profile.shapes": shapes,
    }
    for name, own in groups.items():
        if own & set(roles):
            apply_change(run, config, ResubmitRequest(name, overrides=settings))
    print_progress(
        f"traces of steps {steps} will be in {run.profiles}; steps that have begun are not recorded"
    )
    return EXIT_DONE
