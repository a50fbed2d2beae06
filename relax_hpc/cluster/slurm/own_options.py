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
from relax_hpc.config.schema import Config


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


_SBATCH_RULES: Mapping[str, Rule] = {
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
        "allowed: B:USR2@SECONDS, or set slurm.signal_s",
        re.compile(r"(R?B:)(SIG)?USR2@\d+"),
    ),
    # A requeued job continues the run. In layout `het` a requeue would end the run (Slurm 22.05),
    # so there the option is `no-requeue`; see `relax_hpc.cluster.slurm.render`.
    # sbatch 25.11 ignores other values.
    "requeue": Rule("recovery", "allowed: expedite (Slurm 25.11), or ''", re.compile("expedite")),
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
_SRUN_RULES: Mapping[str, Rule] = {
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


_SBATCH_FLAGS = frozenset(
    (
        "consolidate-segments",
        "contiguous",
        "exclusive",
        "external",
        "get-user-env",
        "hold",
        "ignore-pbs",
        "nice",
        "oom-kill-step",
        "overcommit",
        "oversubscribe",
        "propagate",
        "reboot",
        "resv-ports",
        "spread-job",
        "spread-segments",
        "stepmgr",
        "no-kill",
        "no-requeue",
        "requeue",
        "use-min-nodes",
        "verbose",
        "x11",
    )
)
_SRUN_FLAGS = frozenset(
    (
        "consolidate-segments",
        "contiguous",
        "disable-status",
        "exact",
        "exclusive",
        "external-launcher",
        "label",
        "mpi-combine",
        "no-allocate",
        "no-container-mount-home",
        "no-kill",
        "oom-kill-step",
        "overcommit",
        "overlap",
        "oversubscribe",
        "preserve-env",
        "propagate",
        "quiet",
        "reboot",
        "resv-ports",
        "spread-job",
        "spread-segments",
        "stepmgr",
        "unbuffered",
        "use-min-nodes",
        "verbose",
        "wait-for-children",
        "whole",
        "x11",
    )
)


@dataclass(frozen=True, slots=True)
class Program:
    """A program of Slurm and its options."""

    name: str
    rules: Mapping[str, Rule]
    """Rules of options that relax_hpc writes; all others are free."""
    flags: frozenset[str]
    """Options that may stand without a value, in Slurm 22.05 to 25.11."""
    setting: Literal["options", "srun_options"]
    """Setting of a group that changes options. The site's have this name too, with a prefix for one
    kind of nodes."""


SBATCH = Program("sbatch", _SBATCH_RULES, _SBATCH_FLAGS, "options")
SRUN = Program("srun", _SRUN_RULES, _SRUN_FLAGS, "srun_options")
_LONG_NAME = re.compile(r"[a-z][a-z0-9-]*")


def changes_by_setting(program: Program, config: Config) -> dict[str, dict[str, str | None]]:
    """Changes of the options of ``program``, by the setting that has them."""
    changes = dict[str, dict[str, str | None]]()
    for prefix in ("", "cpu_", "gpu_"):
        name = f"{prefix}{program.setting}"
        changes[f"site.{name}"] = getattr(config.site, name)
    for group, settings in config.groups.items():
        key = f"groups.{group}.resources.{program.setting}"
        changes[key] = getattr(settings.resources, program.setting)
    return changes


def check_changes(
    program: Program, key: str, changes: Mapping[str, str | None], mistakes: Mistakes
) -> None:
    """Add a mistake for each of ``changes`` that is not allowed. ``changes``: values by the long
    names of options, None to remove one; ``key``: the setting that has them."""
    for name, value in changes.items():
        rule = program.rules.get(name, FREE)
        option = f"{key}.{name}: found {'null' if value is None else repr(value)}"
        if not _LONG_NAME.fullmatch(name) or not (value or "").isprintable():
            mistakes.add(
                f"{key}: found {name!r}: {value!r}, allowed: the long name of an option of "
                f"{program.name}, without dashes before, and a value without line breaks"
            )
        elif rule.kind == "fixed":
            mistakes.add(f"{option}, but it is set by relax_hpc; {rule.advice}")
        elif rule.kind == "recovery" and value is None:
            mistakes.add(f"{option}, but recovery needs this option; {rule.advice}")
        elif value == "" and name not in program.flags:
            mistakes.add(
                f"{key}.{name}: found nothing, allowed: a value, or null to remove the option"
            )
        elif rule.allowed is not None and value and not rule.allowed.fullmatch(value):
            mistakes.add(f"{option}; {rule.advice}")
