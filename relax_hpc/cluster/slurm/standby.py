"""A second head on the hub's other node, which leads as soon as the first is gone."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.allocation import Allocation
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError
from relax_hpc.cluster.slurm.steps import escaped
from relax_hpc.net.rendezvous.process import clean_environment

_AGAIN_S, _SELDOM_S = 10.0, 600.0
"""Seconds between tries to start it: at first, and at most when its node stays away."""


class Standby:
    """Standby of the head on ``node``, which supervises ``group`` (empty: all of a heterogeneous
    job)."""

    def __init__(
        self,
        run: RunDir,
        slurm: Slurm,
        allocation: Allocation,
        node: str,
        group: str = "",
        safe: Callable[[], bool] = lambda: True,
        limits: Sequence[str] = (),
    ) -> None:
        """``safe``: whether the job may be asked for a step; ``limits``: that it inherits, as srun
        is told."""
        self.run, self.slurm, self.allocation, self.node, self.group = (
            run,
            slurm,
            allocation,
            node,
            group,
        )
        self.safe, self.limits = safe, limits
        self._process: subprocess.Popen | None = None
        self._at, self._pause = 0.0, _AGAIN_S
        self._others: list[str] | None = None
        """Nodes of the hub beside this one; None: Slurm has not said yet."""

    def tick(self) -> None:
        """Start the standby, if there is none and a node for it."""
        now = time.monotonic()
        if (self._process is None or self._process.poll() is not None) and now >= self._at:
            self._at, self._pause = now + self._pause, min(2 * self._pause, _SELDOM_S)
            with contextlib.suppress(SlurmError):
                self._start()

    def _start(self) -> None:
        place = self.allocation.places["hub"]
        if self._others is None and (job := self.slurm.jobs(place.job).get(place.job)):
            self._others = [
                name for name in self.slurm.hostnames(job.node_list) if name != self.node
            ]
        if not self._others or not self.safe():
            return
        words = ["srun", f"--jobid={self.allocation.job}"]
        words += [] if place.het is None else [f"--het-group={place.het}"]
        words += [
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={self._others[0]}",
            "--overlap",
            "--mem=0",
            "--mpi=none",
        ]
        words += [
            "--no-kill",
            "--export=ALL",
            "--job-name=standby",
            "--open-mode=append",
            *self.limits,
        ]
        words.append(f"--output={escaped(self.run.root)}/logs/standby-%N-%t.log")
        words += [
            sys.executable,
            "-m",
            "relax_hpc.commands.head",
            "--standby",
            "--run_dir",
            str(self.run.root),
        ]
        with (self.run.root / "logs" / "standby-srun.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*words, *(["--group", self.group] if self.group else [])],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=clean_environment() | self.allocation.variables(),
                start_new_session=True,
            )
