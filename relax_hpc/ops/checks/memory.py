"""Checks of GPU memory and parallel layouts, by calculation."""

from __future__ import annotations

from collections.abc import Iterator

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.roles import RANKED
from relax_hpc.config.schema import Config
from relax_hpc.ops.checks.model_files import spec_at
from relax_hpc.ops.plan.plan import plan
from relax_hpc.training.models.spec import ModelSpec


def check_memory(config: Config) -> Iterator[str]:
    """Check that each GPU can hold its models, by calculation.

    Nothing is checked if the model has mistakes, which other checks report.
    """
    if config.model.device != "cuda" or not config.site.gpu_memory_gib:
        return
    try:
        spec = spec_at(config.model)
        devices = plan(config, spec) if not any(misfits(config, spec)) else []
    except ConfigError:
        return
    for device in devices:
        fix = "add GPUs"
        if device.remedies:
            fix = f"it fits with {', '.join(device.remedies)}"
        for lack in device.lacks:
            yield (
                f"groups.{device.groups[0]}: found {lack} (site.gpu_memory_gib), by calculation; "
                f"{fix}; `relax-hpc plan` prints all terms"
            )


def misfits(config: Config, spec: ModelSpec) -> Iterator[str]:
    """Roles whose parallel layout cannot split the model, one line each."""
    roles = set[str]().union(*(group.roles for group in config.groups.values()))
    # `check_files` checks roles that have a model of another size.
    with_other_model = {role for role in RANKED if getattr(config.model, f"{role}_path", "")}
    for role in roles.intersection(RANKED) - with_other_model:
        for misfit in spec.split_errors(getattr(config, role).parallel):
            yield f"{role}.parallel.{misfit}"
