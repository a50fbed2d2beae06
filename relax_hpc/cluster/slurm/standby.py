"""Standby: a second head on the hub's other node, which leads when the first head is gone."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.allocation import Allocation
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError
from relax_hpc.cluster.slurm.steps import escape_patterns
from relax_hpc.net.rendezvous.process import clean_environment

_AGAIN_S, _SELDOM_S = 10.0, 600.0
"""Seconds between two attempts to start it: at first, and at most if its node does not return."""


class Standby:
    """Standby of the head on ``node``, which supervises ``group`` (empty: all groups of a
    heterogeneous job)."""

    def __init__(
        self,
        run: RunDir,
        slurm: Slurm,
        allocation: Allocation,
        node: str,
        group: str = "",
        safe: Callable[[], bool] = lambda: True,
        limits: Sequence[str] = (),
        change: Callable[[list[str]], list[str]] = list,
    ) -> None:
        """``safe`` returns whether the job may request a step. ``limits``: options of srun for the
        resource limits that the standby inherits. ``change``: changes that users make to the
        command of srun."""
        self.run, self.slurm, self.allocation = run, slurm, allocation
        self.node, self.group = node, group
        self.safe, self.limits, self.change = safe, limits, change
        self._process: subprocess.Popen | None = None
        self._next_attempt, self._pause = 0.0, _AGAIN_S
        self._other_nodes: list[str] | None = None
        """Nodes of the hub except ``node``; None: Slurm has not answered yet."""

    def tick(self) -> None:
        """Start the standby if it does not run."""
        now = time.monotonic()
        is_running = self._process is not None and self._process.poll() is None
        if is_running or now < self._next_attempt:
            return
        self._next_attempt, self._pause = now + self._pause, min(2 * self._pause, _SELDOM_S)
        with contextlib.suppress(SlurmError):
            self._start()

    def _start(self) -> None:
        hub = self.allocation.group_nodes["hub"]
        if self._other_nodes is None:
            job = self.slurm.jobs(hub.job).get(hub.job)
            if job:
                nodes = self.slurm.hostnames(job.node_list)
                self._other_nodes = [name for name in nodes if name != self.node]
        if not self._other_nodes or not self.safe():
            return
        with (self.run.root / "logs" / "standby-srun.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._srun(self._other_nodes[0]), *self._head()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=clean_environment() | self.allocation.variables(),
                start_new_session=True,
            )

    def _srun(self, node: str) -> list[str]:
        """Arguments of srun for one task on ``node``."""
        het = self.allocation.group_nodes["hub"].het
        own = [
            "srun",
            f"--jobid={self.allocation.job}",
            *([] if het is None else [f"--het-group={het}"]),
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={node}",
            # Where Slurm 22.05 allocates memory, --overlap alone fails with "Memory required by
            # task is not available"; --mem=0 shares the memory of the job.
            "--overlap",
            "--mem=0",
            "--mpi=none",
            # Without --no-kill the step ends when the other node of the hub dies.
            "--no-kill",
            "--export=ALL",
            "--job-name=standby",
            "--open-mode=append",
            *self.limits,
            f"--output={escape_patterns(self.run.root)}/logs/standby-%N-%n.log",
        ]
        return self.change(own)

    def _head(self) -> list[str]:
        """Command of the standby."""
        group = ["--group", self.group] if self.group else []
        head = [sys.executable, "-m", "relax_hpc.commands.head", "--standby"]
        return [*head, "--run_dir", str(self.run.root), *group]
