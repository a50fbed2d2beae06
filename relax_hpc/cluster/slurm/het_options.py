"""sbatch options that a component of a heterogeneous job takes from the one before it, unless it
states its own.

sbatch resets most options at `#SBATCH hetjob`, not these: they are all in the table of options of
22.05 (src/common/slurm_opt.c) without `reset_each_pass`. So what was meant for the hub alone, such
as 16 GB of memory or CPU hours, would silently apply to the nodes with GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relax_hpc.base.errors import ConfigError, Mistakes

INHERITED: dict[str, str | None] = {
    "account": None,
    "acctg-freq": "",
    "batch": None,
    "bbf": None,
    "begin": "now",
    "cluster-constraint": None,
    "clusters": None,
    "comment": "",
    "container": "",
    "context": None,
    "deadline": None,
    "delay-boot": "0",
    "exclude": "",
    "get-user-env": None,
    "gid": None,
    "hold": None,
    "input": "/dev/null",
    "kill-on-invalid-dep": "no",
    "mcs-label": None,
    "mem": None,
    "nice": "0",
    "prefer": "",
    "priority": None,
    "profile": "none",
    "propagate": None,
    "qos": None,
    "reboot": None,
    "reservation": "",
    "time-min": None,
    "uid": None,
    "wait-all-nodes": "0",
    "wckey": None,
}
"""Option -> the value that undoes it, None where there is none. Those that relax_hpc makes from
other settings, and states in each component or for the first alone, are not here."""


def undone(components: Sequence[tuple[str, Mapping[str, str]]]) -> list[dict[str, str]]:
    """Options that each component (its name, the options that it states) has to state besides, lest
    it takes them from the ones before.

    ConfigError where one before states what this one does not and nothing can undo.
    """
    before: dict[str, str] = {}
    found: list[dict[str, str]] = []
    mistakes = Mistakes()
    for name, options in components:
        found.append({})
        for option, first in before.items():
            if option not in options:
                with mistakes:
                    found[-1][option] = _neutral(name, option, first, options)
        before |= {option: name for option in options if option in INHERITED}
    mistakes.raise_if_any()
    return found


def _neutral(name: str, option: str, first: str, options: Mapping[str, str]) -> str:
    if (value := INHERITED[option]) is not None:
        return value
    key, found, advice = f"options.{option}", "none", "or in site.options, for all"
    if option == "mem":
        other = next(
            (f"{way} {options[way]}" for way in ("mem-per-cpu", "mem-per-gpu") if way in options),
            "",
        )
        key, advice = "memory", "0 is all of a node"
        found = f"none beside {other}, with which sbatch takes no memory a node" if other else found
    raise ConfigError(
        f"groups.{name}.resources.{key}: found {found}, but groups.{first} states one, which "
        "sbatch passes on to the "
        f"components after it; state it for {name} too ({advice}), or take layout: jobs"
    )
