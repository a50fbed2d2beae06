"""sbatch options that a component of a heterogeneous job inherits from the component before it.

sbatch resets most options at `#SBATCH hetjob`, but not the options in `INHERITED`. Options of the
hub, such as 16 GB of memory, would then silently apply to the GPU nodes. Each component therefore
states these options itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relax_hpc.base.errors import ConfigError, Mistakes

# The options that lack `reset_each_pass` in the option table of sbatch 22.05, 24.11 or 25.11
# (src/common/slurm_opt.c).
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
    "container-id": None,
    "context": None,
    "deadline": None,
    "delay-boot": "0",
    "exclude": "",
    "external": None,
    "extra": "",
    "get-user-env": None,
    "gid": None,
    "hold": None,
    "input": "/dev/null",
    "kill-on-invalid-dep": "no",
    "mcs-label": None,
    "mem": None,
    "nice": "0",
    "oom-kill-step": None,
    "prefer": "",
    "priority": None,
    "profile": "none",
    "propagate": None,
    "qos": None,
    "reboot": None,
    "reservation": "",
    "stepmgr": None,
    "time-min": None,
    "uid": None,
    "wait-all-nodes": "0",
    "wckey": None,
}
"""Option -> the value that neutralises it, or None if no value does. Options that relax_hpc derives
from other settings are not in this table."""


def neutral_options(components: Sequence[tuple[str, Mapping[str, str]]]) -> list[dict[str, str]]:
    """Options that each component must state in addition, so that it does not inherit them.
    ``components``: the name of each component and the options that it states.

    ConfigError if an earlier component states an option that this one does not state and that no
    value neutralises.
    """
    first_user: dict[str, str] = {}
    additions: list[dict[str, str]] = []
    mistakes = Mistakes()
    for name, options in components:
        additions.append({})
        for option, first in first_user.items():
            if option not in options:
                with mistakes:
                    additions[-1][option] = _neutral_value(name, option, first, options)
        first_user |= {option: name for option in options if option in INHERITED}
    mistakes.raise_if_any()
    return additions


def _neutral_value(name: str, option: str, first: str, options: Mapping[str, str]) -> str:
    value = INHERITED[option]
    if value is not None:
        return value
    key, present, advice = f"options.{option}", "none", "or in site.options, for all"
    if option == "mem":
        key, advice = "memory", "0 is all of a node"
        for memory_option in ("mem-per-cpu", "mem-per-gpu"):
            if memory_option in options:
                present = (
                    f"none, but {memory_option} {options[memory_option]}, with which sbatch "
                    "accepts no memory of a node"
                )
                break
    raise ConfigError(
        f"groups.{name}.resources.{key}: found {present}, but groups.{first} states one, which "
        "sbatch passes on to the "
        f"components after it; state it for {name} too ({advice}), or take layout: jobs"
    )
