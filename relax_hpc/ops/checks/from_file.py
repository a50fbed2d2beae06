"""Checks of algorithms that learn from files (such as sft), and of those that generate rows."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from relax_hpc.config.schema import Config

_GENERATION = (
    "colocate",
    "max_staleness",
    "model.routing_replay",
    "rollout.reward",
    "rollout.filter",
    "rollout.temperature",
    "rollout.over_sampling",
    "rollout.without",
)
"""Settings of generation, which a run that learns from files would ignore."""


def check_from_file(config: Config) -> Iterator[str]:
    """Check the settings of generation and of data files against the kind of the algorithm."""
    if config.algorithm.from_file:
        yield from _check_file_run(config)
    else:
        yield from _check_generating_run(config)


def _check_file_run(config: Config) -> Iterator[str]:
    """Check an algorithm that learns from files: settings of generation must have their default."""
    name, sequences = config.algorithm.name, config.algorithm.sequences
    reasons = dict.fromkeys(_GENERATION, f"{name} learns from files, and nothing is generated")
    reasons["data.truncate"] = "a truncated sequence is another sequence"
    for key, reason in reasons.items():
        value, default = _setting(config, key), _setting(Config(), key)
        if value != default:
            yield f"{key}: found {value!r}, allowed with {name}: {default!r}; {reason}"
    if config.samples_per_prompt != sequences:
        yield (
            f"samples_per_prompt: found {config.samples_per_prompt}, allowed with {name}: "
            f"{sequences}; remove the setting"
        )
    roles = set[str]().union(*(group.roles for group in config.groups.values()))
    scorers = roles.union(config.actor.forward)
    if "ref_logprobs" in config.algorithm.loss_needs() and "reference" not in scorers:
        yield (
            f"algorithm.name: found {name}, but role reference is in no group; the algorithm "
            "needs it: add it to the roles of a group, or to actor.forward"
        )


def _setting(config: Config, key: str) -> object:
    """Value of the setting with the dotted name ``key``."""
    return functools.reduce(getattr, key.split("."), config)


def _check_generating_run(config: Config) -> Iterator[str]:
    """Check an algorithm that learns from generated rows."""
    name = config.algorithm.name
    samples, fewest = config.samples_per_prompt, config.algorithm.fewest_samples
    if samples < fewest:
        yield (
            f"samples_per_prompt: found {samples}, allowed with {name}: at least {fewest}; the "
            "rewards of a prompt's episodes are compared"
        )
    elif samples == 1 and config.rollout.filter == "rewards_differ":
        yield (
            "rollout.filter: found rewards_differ with samples_per_prompt 1, which drops every "
            "prompt group; remove it, or raise samples_per_prompt"
        )
    if any("data" in group.roles for group in config.groups.values()):
        yield (
            f"groups: found role data with algorithm {name}, which does not learn from files; "
            "remove it"
        )
