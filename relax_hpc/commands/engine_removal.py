"""`relax-hpc scale --without`: remove single engines of a rollout group, or bring them back, while
the run continues.

The processes of the group apply the change without a restart. Other engines take over the work of a
removed engine.
"""

from __future__ import annotations

from pathlib import Path

from relax_hpc.base.errors import EXIT_DONE, ConfigError
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.job_lookup import load_unfinished_run
from relax_hpc.commands.resubmit import ResubmitRequest, apply_change, print_progress
from relax_hpc.config import load_resolved
from relax_hpc.config.groups import base_name, group_settings


def main(root: str, group: str, numbers: str) -> int:
    """Make all engines of ``group`` serve except those in ``numbers``, such as `3,5`; empty: all of
    them."""
    run = RunDir(Path(root))
    config = load_unfinished_run(run)
    if "rollout" not in group_settings(config, group).roles:
        raise ConfigError(
            f"--group: found {group!r}, whose roles have no engines, allowed: a group with rollout"
        )
    base = base_name(group, config.groups)
    before = load_resolved(run.root, base).rollout.without
    in_other_groups = [name for name in before if name.rpartition("/")[0] != group]
    removed = [f"{group}/{number}" for number in _parse_numbers(numbers)]
    without = [*in_other_groups, *removed]
    if without == before:
        print_progress(f"{group}: its engines are already as requested")
        return EXIT_DONE
    apply_change(run, config, ResubmitRequest(base, overrides={"rollout.without": without}))
    print_progress(
        f"{group}: without {', '.join(removed) or 'none'}; status shows which engines have left"
    )
    return EXIT_DONE


def _parse_numbers(text: str) -> list[int]:
    try:
        return sorted({int(number) for number in text.replace(",", " ").split()})
    except ValueError as error:
        raise ConfigError(
            f"--without: found {text!r}, allowed: numbers of engines, such as 3,5, or '' for none"
        ) from error
