"""`python -m relax_hpc.cluster.slurm.rank`: a rank of a role as Slurm starts it, which knows when
nobody needs it."""

from __future__ import annotations

import argparse
import os
import sys
import time

from relax_hpc.base.errors import RelaxError
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.commands import Slurm
from relax_hpc.cluster.slurm.orphans import Orphan
from relax_hpc.cluster.slurm.steps import RANK
from relax_hpc.cluster.supervise.launch_records import read_launch
from relax_hpc.config import load_resolved
from relax_hpc.roles import __main__ as roles

_LOOK_S = 2.0


def main(argv: list[str] | None = None) -> int:
    """Be the rank; the first one of its role also sees that its component does not outlive the
    run."""
    args = roles.parse(argv)
    first = os.environ.get("SLURM_PROCID", "0") == "0"
    return roles.main(argv, RANK, (lambda: _look_after(args)) if first else None)


def _look_after(args: argparse.Namespace) -> None:
    """Look after the component, in the process that watches the rank, as long as that lives."""
    run, group, incarnation = RunDir(args.run_dir), args.group, args.incarnation
    while args.ahead and read_launch(run, group, incarnation) is None:
        # The incarnation at work looks after the nodes.
        time.sleep(_LOOK_S)
    try:
        orphan = Orphan(run, load_resolved(run.root, group), Slurm(), group, incarnation)
    except (RelaxError, OSError) as error:
        print(f"{group}: its component is not looked after: {error}", file=sys.stderr, flush=True)
        return
    while orphan.possible() and not orphan.look(time.monotonic()):
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    # Library threads (gloo, engines) must not keep a finished role alive.
    os._exit(exit_code)
