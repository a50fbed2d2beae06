"""Further steps in the jobs of a group: srun commands that run a program on its nodes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.commands import Slurm, SlurmJob
from relax_hpc.cluster.slurm.container import (
    container_command,
    container_srun_options,
    write_container_file,
)
from relax_hpc.cluster.slurm.srun import changed_srun
from relax_hpc.cluster.slurm.steps import step_environment
from relax_hpc.cluster.supervise.launch_records import members_of, read_launch
from relax_hpc.config import Config, load_resolved
from relax_hpc.config.groups import group_settings
from relax_hpc.net.rendezvous.roster import latest_incarnation


@dataclass(frozen=True, slots=True)
class GroupAccess:
    """A group that runs, and the job on whose nodes it runs."""

    run: RunDir
    config: Config
    """Configuration of the run as the group has it."""
    group: str
    incarnation: int
    job: SlurmJob | None
    """None: its processes are children of a supervisor on this machine."""

    def srun(
        self, program: Sequence[str], node: str = "", options: Sequence[str] = ()
    ) -> list[str]:
        """Command that runs ``program`` once on each node of the group, or on ``node`` alone, in
        the container of its roles."""
        assert self.job is not None
        srun = ["srun", *_job_options(self.job)]
        count = 1 if node else self.job.nodes
        srun += [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
        srun += [f"--nodelist={node}"] if node else []
        # The step shares the resources of the working steps, as these share them with each other.
        srun += ["--overlap", "--mem=0", "--export=ALL", "--cpu-bind=none", "--mpi=none"]
        gpus = group_settings(self.config, self.group).resources.gpus_per_node
        if gpus and self.config.site.gpu_request != "none":
            srun.append(f"--gpus-per-node={gpus}")
        srun += options
        write_container_file(self.config, self.run.root)
        srun += container_srun_options(self.config, self.run.root)
        srun = changed_srun(srun, self.config, self.group)
        return [*srun, *container_command(self.config, self.run.root), *program]

    def environment(self) -> dict[str, str]:
        """Environment of the group's roles, with the code that the run was submitted with."""
        variables = step_environment(self.config, self.group)
        if self.run.code.is_dir() and not group_settings(self.config, self.group).code:
            paths = [str(self.run.code), variables.get("PYTHONPATH", "")]
            variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
            variables["PYTHONSAFEPATH"] = "1"
        return variables


def open_group(run: RunDir, group: str) -> GroupAccess:
    """Access to the newest incarnation of ``group``. ConfigError: there is no such group.
    RelaxError: it is not running."""
    config = load_resolved(run.root)
    names = members_of(run, config)
    if group not in names:
        raise ConfigError(f"--group: found {group!r}, allowed: {', '.join(names)}")
    incarnation = latest_incarnation(run, group)
    launch = read_launch(run, group, incarnation)
    if launch is None:
        raise RelaxError(f"{group}: has not started; see relax-hpc status {run.root}")
    config = load_resolved(run.root, group)
    if not launch.job:
        return GroupAccess(run, config, group, incarnation, None)
    job = Slurm().jobs(launch.job).get(launch.job)
    if job is None or job.state != "RUNNING":
        state = job.state.lower() if job else "not in the queue"
        raise RelaxError(
            f"{group}: its job {launch.job} is {state}; see relax-hpc status {run.root}"
        )
    return GroupAccess(run, config, group, incarnation, job)


def _job_options(job: SlurmJob) -> list[str]:
    # Slurm 22.05 accepts steps of a component only by the leader's job id and --het-group.
    if job.het_leader:
        return [f"--jobid={job.het_leader}", f"--het-group={job.het_offset}"]
    return [f"--jobid={job.id}"]
