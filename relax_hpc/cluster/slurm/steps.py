"""A group as Slurm steps inside an allocation: one `srun` a role, watched like a local process.

A step outlives the srun that started it when the node of that srun dies, so another supervisor can
take it over.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.allocation import Allocation, Place
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError
from relax_hpc.cluster.slurm.container import container_command, container_srun_options, role_python
from relax_hpc.cluster.slurm.mpi import mpi_defaults, mpi_plugin, mpi_variables
from relax_hpc.cluster.slurm.srun import srun_options
from relax_hpc.cluster.supervise.command import Command
from relax_hpc.cluster.supervise.group import Incarnation, Member
from relax_hpc.cluster.supervise.launch_records import Launch, read_launch, record
from relax_hpc.cluster.supervise.processes import begin_members, environment, role_words
from relax_hpc.config import Config, load_resolved
from relax_hpc.config.groups import group_of, ranks_of, roles_of, variables_of
from relax_hpc.net.rendezvous.network import library_environment
from relax_hpc.net.rendezvous.process import END_SIGNAL, PARENT, STACKS_SIGNAL

RANK = "relax_hpc.cluster.slurm.rank"
_END_S = 1.0
"""Seconds for a killed step to end before the next one is started anyway; on living nodes it takes
0.1 s."""
_END_OF_JOB_S = 120.0
"""Seconds to the time limit, beyond the early signal, below which that limit is what roles were
stopped for."""


class Steps(Incarnation):
    """The steps of one incarnation."""

    outlives = True

    def __init__(
        self,
        run: RunDir,
        name: str,
        incarnation: int,
        members: list[Member],
        slurm: Slurm,
        job: str,
    ) -> None:
        super().__init__(run, name, incarnation, members)
        self.slurm, self.job = slurm, job

    def ask_to_end(self) -> None:
        for member in self.members:
            if member.process and member.process.poll() is None:
                # srun passes it on to its tasks; TERM it would take as an order to kill them.
                member.process.send_signal(END_SIGNAL)
        adopted = {
            step_name(self.name, member.role, self.incarnation)
            for member in self.members
            if not member.process
        }
        # What cannot be asked is killed at the deadline.
        with contextlib.suppress(SlurmError):
            for step, name in self.slurm.steps(self.job).items() if adopted else ():
                if name in adopted:
                    self.slurm.cancel(step, signal=END_SIGNAL.name.removeprefix("SIG"))

    def ask_for_stacks(self) -> None:
        """See `Incarnation.ask_for_stacks`; srun would not pass this signal on."""
        names = {step_name(self.name, member.role, self.incarnation) for member in self.members}
        with contextlib.suppress(SlurmError):
            for step, name in self.slurm.steps(self.job).items():
                if name in names:
                    self.slurm.cancel(step, signal=STACKS_SIGNAL.name.removeprefix("SIG"))

    def kill(self) -> None:
        """End the steps, and wait a moment for it: the next incarnation needs their memory."""
        for member in self.members:
            if member.process and member.process.poll() is None:
                member.process.terminate()
        deadline = time.monotonic() + _END_S
        for member in self.members:
            if member.process:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    member.process.wait(max(0.0, deadline - time.monotonic()))
        if any(member.process is None or member.process.poll() is None for member in self.members):
            self._cancel()
        self.leave()

    def _cancel(self) -> None:
        """Cancel steps whose srun is gone, or does not get through."""
        for member in self.members:
            if member.process and member.process.poll() is None:
                member.process.kill()
                member.process.wait()
        names = {step_name(self.name, member.role, self.incarnation) for member in self.members}
        # The nodes may be as dead as the step; then there is nothing to end.
        with contextlib.suppress(SlurmError):
            for step, name in self.slurm.steps(self.job).items():
                if name in names:
                    self.slurm.cancel(step)


class StepLauncher:
    """Launcher of groups as steps on their nodes of one allocation."""

    def __init__(
        self,
        run: RunDir,
        config: Config,
        slurm: Slurm,
        allocation: Allocation,
        deadline: Callable[[], float | None],
    ) -> None:
        self.run, self.slurm, self.allocation, self.deadline = run, slurm, allocation, deadline
        self.probe_s = min(15.0, max(2.0, config.liveness.lease_s / 2))
        """Seconds for nodes to answer before they are taken for lost."""
        self.near_s = config.slurm.signal_s + _END_OF_JOB_S

    def commands(self, name: str, incarnation: int) -> dict[str, Command]:
        """Commands of one step a role, output to the group's log directory."""
        config = load_resolved(self.run.root, name)
        logs, variables = self.run.logs(name, incarnation), step_environment(config, name)
        return {
            role: Command(
                words=[
                    *self._srun(config, name, role, incarnation),
                    *self._role(config, name, role, incarnation),
                ],
                env=variables,
                log=logs / f"{role}-srun.log",
                config=config,
                last_words=self._deadline,
            )
            for role in roles_of(config, name)
        }

    def start(
        self, name: str, incarnation: int, launch: Launch, ahead: Incarnation | None = None
    ) -> Steps:
        """See `Launcher.start`."""
        if ahead is None:
            self.check_takes_steps(name)
        commands, place = self.commands(name, incarnation), self.allocation.places[name]
        if ahead and len(ahead.members) < len(commands):
            self.check_takes_steps(name)
        self.run.logs(name, incarnation).mkdir(parents=True, exist_ok=True)
        steps = {role: step_name(name, role, incarnation) for role in commands}
        life = self.allocation.name
        record(
            self.run,
            name,
            incarnation,
            replace(launch, job=place.job, allocation=life, steps=steps),
        )
        return Steps(
            self.run, name, incarnation, begin_members(commands, ahead), self.slurm, place.job
        )

    def start_ahead(self, name: str, incarnation: int, roles: Sequence[str]) -> Steps:
        """See `Launcher.start_ahead`: steps of their own, which share the nodes with those at
        work."""
        self.check_takes_steps(name)
        commands, place = self.commands(name, incarnation), self.allocation.places[name]
        self.run.logs(name, incarnation).mkdir(parents=True, exist_ok=True)
        begun = [Member.begin(role, commands[role], ahead=True) for role in roles]
        return Steps(self.run, name, incarnation, begun, self.slurm, place.job)

    def check_takes_steps(self, name: str) -> None:
        """SlurmError while the job of ``name`` must not be asked for a new step."""

    def adopt(self, name: str, incarnation: int) -> Steps | None:
        """The steps of ``incarnation`` that this life of this allocation still has; None if one
        went without a word."""
        launch, place = read_launch(self.run, name, incarnation), self.allocation.places[name]
        if launch is None or launch.allocation != self.allocation.name:
            return None
        group = Steps(
            self.run,
            name,
            incarnation,
            [Member(role) for role in launch.steps],
            self.slurm,
            place.job,
        )
        try:
            running = self.slurm.steps(place.job).values()
        except SlurmError:
            # Its beats will show whether it lives.
            return group
        alive = all(
            member in group.ended() or launch.steps[member.role] in running
            for member in group.members
        )
        return group if alive else None

    def whole(self, name: str) -> bool:
        """Whether the group has all its nodes, and each answers."""
        place = self.allocation.places[name]
        if self.lost(name):
            return False
        words = [
            *self.place_words(place),
            "--mpi=none",
            "--ntasks-per-node=1",
            f"--ntasks={place.nodes}",
            "true",
        ]
        quiet = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.DEVNULL,
        }
        with contextlib.suppress(subprocess.TimeoutExpired):
            if not subprocess.run(
                words, env=step_environment(None, name), timeout=self.probe_s, **quiet
            ).returncode:
                return True
        # Where slurmctld has gone meanwhile, that is what there is to say, and not that nodes are
        # lost.
        self.lost(name)
        return False

    def lost(self, name: str) -> bool:
        """Whether the group's component has ended, or lost nodes."""
        place = self.allocation.places[name]
        job = self.slurm.jobs(place.job).get(place.job)
        return job is None or job.state != "RUNNING" or job.nodes < place.nodes

    def ending(self) -> bool:
        try:
            job = self.slurm.jobs(self.allocation.job).get(self.allocation.job)
            if job is None or job.state != "RUNNING":
                return True
            if job.time_left_s is not None and job.time_left_s < self.near_s:
                return True
            components = {place.job for place in self.allocation.places.values() if place.het}
            return any(map(self.slurm.is_preempted, sorted({self.allocation.job, *components})))
        except SlurmError:
            # If it ends, the signals come here as well.
            return False

    def hand_over(self, name: str, reason: str) -> str:
        return ""

    def nodes_of(self, name: str) -> list[str]:
        """The nodes that a group has now."""
        place = self.allocation.places[name]
        job = self.slurm.jobs(place.job).get(place.job)
        return self.slurm.hostnames(job.node_list) if job else []

    def place_words(self, place: Place) -> list[str]:
        """First words of an srun on the nodes of ``place``."""
        het = [] if place.het is None else [f"--het-group={place.het}"]
        # Steps share what the job has: an ended step's nodes count as busy for seconds.
        return [
            "srun",
            f"--jobid={self.allocation.job}",
            *het,
            f"--nodes={place.nodes}",
            "--overlap",
            "--mem=0",
        ]

    def _srun(self, config: Config, name: str, role: str, incarnation: int) -> list[str]:
        place, resources = self.allocation.places[name], group_of(config, name).resources
        # Not --cpus-per-task: it gives a step as few cores as it names, and overlapping steps the
        # same ones.
        ranks = ranks_of(config, name, role)
        nodes = min(place.nodes, ranks)
        place = Place(place.job, nodes, place.het)
        words = [
            *self.place_words(place),
            f"--ntasks={ranks}",
            f"--ntasks-per-node={ranks // nodes}",
        ]
        words += [*srun_options(config), "--export=ALL", "--kill-on-bad-exit=1"]
        # A rank that is done must not have the others ended, whatever the site's WaitTime.
        words.append("--wait=0")
        if resources.gpus_per_node and config.site.gpu_request != "none":
            words.append(f"--gpus-per-node={resources.gpus_per_node}")
        # A rank alone needs no MPI, and the plugin may be the one thing that is wrong with a site.
        words.append(f"--mpi={mpi_plugin(config) if ranks > 1 else 'none'}")
        words += [f"--job-name={step_name(name, role, incarnation)}", "--open-mode=append"]
        # By rank, so that the nodes write them: what srun writes is lost with the node of srun.
        words.append(f"--output={escaped(self.run.logs(name, incarnation))}/{role}-rank-%t.log")
        return [*words, *container_srun_options(config, self.run.root)]

    def _role(self, config: Config, name: str, role: str, incarnation: int) -> list[str]:
        words = [
            role_python(config),
            *role_words(self.run, name, role, incarnation, RANK),
            "--watch",
        ]
        return [*container_command(config, self.run.root), *words]

    def _deadline(self) -> list[str]:
        end = self.deadline()
        return [f"--deadline={end:.0f}"] if end else []


def step_name(group: str, role: str, incarnation: int) -> str:
    """Name of a step in squeue -s."""
    return f"{group}.{role}.i{incarnation:06d}"


def escaped(path: Path) -> str:
    """``path`` for --output, where Slurm replaces patterns."""
    return str(path).replace("%", "%%")


def step_environment(config: Config | None, name: str) -> dict[str, str]:
    """Environment of srun, which its tasks inherit."""
    if config is None:
        from relax_hpc.net.rendezvous.process import clean_environment

        return clean_environment()
    variables = environment(config, variables_of(config, name))
    del variables[PARENT]
    return (
        mpi_defaults(config) | library_environment(config, name) | variables | mpi_variables(config)
    )
