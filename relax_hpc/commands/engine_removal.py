"""`relax-hpc scale --without`: single engines of a rollout group leave, or come back, while the run
goes on.

The processes of the group follow the change by themselves: nothing is started again, and what their
engines were at is handed on to others.
"""

from __future__ import annotations

from relax_hpc.base.errors import EXIT_DONE, ConfigError
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.job_lookup import load_unfinished_run
from relax_hpc.commands.resubmit import Wish, change, tell
from relax_hpc.config import load_resolved
from relax_hpc.config.groups import base_name, group_of


def main(root: str, group: str, numbers: str) -> int:
    """Have all engines of ``group`` serve but those of ``numbers``, such as `3,5`; empty: all of
    them."""
    run = RunDir(root)
    config = load_unfinished_run(run)
    if "rollout" not in group_of(config, group).roles:
        raise ConfigError(
            f"--group: found {group!r}, whose roles have no engines, allowed: a group with rollout"
        )
    base = base_name(group, config.groups)
    before = load_resolved(run.root, base).rollout.without
    others = [name for name in before if name.rpartition("/")[0] != group]
    without = [*others, *(f"{group}/{number}" for number in _numbers(numbers))]
    if without == before:
        tell(f"{group}: its engines are as asked already")
        return EXIT_DONE
    change(run, config, Wish(base, overrides={"rollout.without": without}))
    tell(
        f"{group}: without {', '.join(without[len(others) :]) or 'none'}; status shows who has left"
    )
    return EXIT_DONE


def _numbers(text: str) -> list[int]:
    try:
        return sorted({int(word) for word in text.replace(",", " ").split()})
    except ValueError as error:
        raise ConfigError(
            f"--without: found {text!r}, allowed: numbers of engines, such as 3,5, or '' for none"
        ) from error
