"""Checks of runs whose rows are those of files, and of what only they have; a line for each
mistake."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from relax_hpc.config.schema import Config

_NOTHING_DRAWN = (
    "colocate",
    "max_staleness",
    "model.routing_replay",
    "rollout.reward",
    "rollout.filter",
    "rollout.temperature",
    "rollout.over_sampling",
    "rollout.without",
)
"""Settings of what is drawn that a run would not notice."""


def check_from_file(config: Config) -> Iterator[str]:
    """Check that what speaks of drawn rows is left alone where there are none, and the reverse."""
    yield from _of_files(config) if config.algorithm.from_file else _of_drawn_rows(config)


def _of_files(config: Config) -> Iterator[str]:
    name, sequences, found = (
        config.algorithm.name,
        config.algorithm.sequences,
        config.samples_per_prompt,
    )
    why = dict.fromkeys(_NOTHING_DRAWN, f"{name} learns from files, and nothing is drawn")
    for key, reason in {**why, "data.truncate": "a sequence that is cut would be another"}.items():
        value, allowed = (
            functools.reduce(getattr, key.split("."), one) for one in (config, Config())
        )
        if value != allowed:
            yield f"{key}: found {value!r}, allowed with {name}: {allowed!r}; {reason}"
    if found != sequences:
        yield (
            f"samples_per_prompt: found {found}, allowed with {name}: {sequences}, which is set "
            "by itself"
        )
    roles = {role for group in config.groups.values() for role in group.roles}
    if "ref_logprobs" in config.algorithm.loss_needs() and "reference" not in roles.union(
        config.actor.forward
    ):
        yield (
            f"algorithm.name: found {name}, but role reference is in no group; it compares with "
            "the reference: add it to the roles of a group, or to actor.forward"
        )


def _of_drawn_rows(config: Config) -> Iterator[str]:
    name = config.algorithm.name
    samples, fewest = config.samples_per_prompt, config.algorithm.fewest_samples
    if samples < fewest:
        yield (
            f"samples_per_prompt: found {samples}, allowed with {name}: at least {fewest}; the "
            "rewards of a prompt's episodes are compared"
        )
    elif samples == 1 and config.rollout.filter == "rewards_differ":
        yield (
            "rollout.filter: found rewards_differ with samples_per_prompt 1, of which it drops "
            "every prompt group; leave it out, or draw more samples"
        )
    if any("data" in group.roles for group in config.groups.values()):
        yield f"groups: found role data with algorithm {name}, which learns from no file; remove it"
