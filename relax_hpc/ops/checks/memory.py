"""Whether models fit into the memory of their GPUs, by calculation."""

from __future__ import annotations

from collections.abc import Iterator

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.roles import RANKED
from relax_hpc.config.schema import Config
from relax_hpc.ops.checks.model_files import spec_at
from relax_hpc.ops.plan.plan import plan
from relax_hpc.training.models.spec import ModelSpec


def check_memory(config: Config) -> Iterator[str]:
    """Findings on what cannot fit, a line for each place; none for a model that is not in order,
    which others say."""
    if config.model.device != "cuda" or not config.site.gpu_memory_gib:
        return
    try:
        spec = spec_at(config.model)
        places = plan(config, spec) if not any(misfits(config, spec)) else []
    except ConfigError:
        return
    for place in places:
        for lack in place.lacks:
            mend = (
                f"it would fit with {', '.join(place.remedies)}"
                if place.remedies
                else "give it more GPUs"
            )
            yield (
                f"groups.{place.groups[0]}: found {lack} (site.gpu_memory_gib), by calculation; "
                f"{mend}; `relax-hpc plan` tells more"
            )


def misfits(config: Config, spec: ModelSpec) -> Iterator[str]:
    """Findings on roles of the run that cut the model as it cannot be cut, one line each."""
    placed = {role for group in config.groups.values() for role in group.roles}
    # What is of another size was looked at where its files were.
    others = {role for role in RANKED if getattr(config.model, f"{role}_path", "")}
    for role in placed.intersection(RANKED) - others:
        yield from (
            f"{role}.parallel.{misfit}"
            for misfit in spec.split_errors(getattr(config, role).parallel)
        )
