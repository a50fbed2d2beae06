"""`python -m relax_hpc.cluster.slurm.rank`: a rank of a role in a Slurm step.

The first rank also cancels its component if the run has no head any more.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from relax_hpc.base.errors import RelaxError
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.commands import Slurm
from relax_hpc.cluster.slurm.orphans import OrphanedComponent
from relax_hpc.cluster.slurm.steps import RANK
from relax_hpc.cluster.supervise.launch_records import read_launch
from relax_hpc.config import load_resolved
from relax_hpc.roles import __main__ as roles

_LOOK_S = 2.0
"""Seconds between two checks."""


def main(argv: list[str] | None = None) -> int:
    """Run the rank. The first rank of a role also watches its component."""
    args = roles.parse(argv)
    first = os.environ.get("SLURM_PROCID", "0") == "0"
    return roles.main(argv, RANK, (lambda: _watch_component(args)) if first else None)


def _watch_component(args: argparse.Namespace) -> None:
    """Watch the component. This runs in the process that watches the rank, while that process
    lives."""
    run, group, incarnation = RunDir(args.run_dir), args.group, args.incarnation
    while args.ahead and read_launch(run, group, incarnation) is None:
        # A rank that was started ahead waits: the working incarnation watches the component.
        time.sleep(_LOOK_S)
    try:
        orphan = OrphanedComponent(run, load_resolved(run.root, group), Slurm(), group, incarnation)
    except (RelaxError, OSError) as error:
        print(f"{group}: its component is not watched: {error}", file=sys.stderr, flush=True)
        return
    while orphan.can_be_orphaned() and not orphan.check(time.monotonic()):
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    # Library threads (gloo, engines) must not keep a finished role alive.
    os._exit(exit_code)
