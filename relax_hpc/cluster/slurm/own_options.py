"""Options that relax_hpc itself writes for sbatch and srun, and what a user may do to each.

Sites differ in what they accept: some forbid --mem, others want no --ntasks-per-node. So a user may
replace an option by a value or remove it with null, except where the run would break without a
word: options that have a setting of their own, options by which the run finds its jobs, steps and
files, and options on which recovery depends. The latter can be replaced, not removed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from relax_hpc.base.errors import Mistakes


@dataclass(frozen=True, slots=True)
class Rule:
    """Changes of an option that a user may make."""

    kind: Literal["free", "recovery", "fixed"]
    """`free`: replace and remove it; `recovery`: only replace it; `fixed`: neither."""
    advice: str = ""
    """Text that says what to do instead."""
    allowed: re.Pattern[str] | None = None
    """Pattern of the values that may replace it. None: any value."""


FREE = Rule("free")
_FIXED = Rule("fixed", "it cannot be changed")


def _setting(key: str) -> Rule:
    return Rule("fixed", f"set {key} instead")


SBATCH: Mapping[str, Rule] = {
    "nodes": _setting("groups.<group>.resources.nodes"),
    "ntasks": _setting("the sizes of the group's roles"),
    "ntasks-per-node": FREE,
    "cpus-per-task": FREE,
    "time": _setting("slurm.time"),
    "mem": FREE,
    "gpus": FREE,
    "gpus-per-node": FREE,
    "gres": FREE,
    # The run stops and saves at this signal, see `relax_hpc.net.rendezvous.process.END_SIGNAL`.
    "signal": Rule(
        "recovery",
        "or set slurm.signal_s; allowed: B:USR2@SECONDS",
        re.compile(r"(R?B:)(SIG)?USR2@\d+"),
    ),
    # A requeued job continues the run. In layout `het` a requeue would end the run (Slurm 22.05),
    # so there the option is `no-requeue`; see `relax_hpc.cluster.slurm.render`.
    "requeue": Rule("recovery", "allowed: a way of requeueing, such as expedite"),
    "no-requeue": _setting("layout"),
    "no-kill": Rule("recovery", "allowed: off", re.compile("off")),
    "output": FREE,
    "error": FREE,
    "open-mode": FREE,
    "export": FREE,
    # The run finds its jobs by their names.
    "job-name": _setting("name"),
    "array": _FIXED,
    "dependency": _FIXED,
    "chdir": _FIXED,
    "wrap": _FIXED,
}
SRUN: Mapping[str, Rule] = {
    "jobid": _FIXED,
    "het-group": _FIXED,
    "nodes": _setting("groups.<group>.resources.nodes"),
    "ntasks": _setting("the sizes of the group's roles"),
    "nodelist": _FIXED,
    # The run finds its steps and their logs by these.
    "job-name": _FIXED,
    "output": _FIXED,
    "error": _FIXED,
    "mpi": _setting("site.mpi.launcher"),
    "container-image": _setting("site.container.image"),
    "container-mounts": _setting("site.container.mounts"),
    # Slurm 22.05 continues a step with a missing rank unless it is told to end the step.
    "kill-on-bad-exit": Rule("recovery", "allowed: 1", re.compile("1")),
    "wait": Rule("recovery", "allowed: seconds", re.compile(r"\d+")),
    "no-kill": Rule("recovery", "allowed: off", re.compile("off")),
}
"""Rules of srun options; all others are free."""


def check_changes(
    key: str, changes: Mapping[str, str | None], rules: Mapping[str, Rule], mistakes: Mistakes
) -> None:
    """Add a mistake for each of ``changes`` that ``rules`` do not allow. ``changes``: values by the
    long names of options, None to remove one; ``key``: the setting that has them."""
    for name, value in changes.items():
        rule = rules.get(name, FREE)
        if rule.kind == "fixed":
            mistakes.add(
                f"{key}.{name}: found {value!r}, but it is set by relax_hpc; {rule.advice}"
            )
        elif rule.kind == "recovery" and value is None:
            mistakes.add(
                f"{key}.{name}: found null, but recovery needs this option; replace it by another "
                f"value, {rule.advice}"
            )
        elif rule.allowed is not None and value is not None and not rule.allowed.fullmatch(value):
            mistakes.add(f"{key}.{name}: found {value!r}; {rule.advice}")
