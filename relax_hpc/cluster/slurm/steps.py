"""A group as Slurm steps inside an allocation: one `srun` for each role, watched like a local
process.

If the node of an srun dies, the step continues, and another supervisor can take it over.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.allocation import Allocation, GroupNodes
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError
from relax_hpc.cluster.slurm.container import (
    container_command,
    container_srun_options,
    role_python,
    write_container_file,
)
from relax_hpc.cluster.slurm.mpi import mpi_defaults, mpi_plugin, mpi_variables
from relax_hpc.cluster.slurm.parsing import parse_release
from relax_hpc.cluster.slurm.srun import changed_srun, placing_options
from relax_hpc.cluster.supervise.command import Command
from relax_hpc.cluster.supervise.group import Incarnation, Member
from relax_hpc.cluster.supervise.launch_records import Launch, read_launch, record_launch
from relax_hpc.cluster.supervise.processes import role_arguments, role_environment, start_members
from relax_hpc.config import Config, load_resolved
from relax_hpc.config.groups import group_environment, group_roles, group_settings, rank_count
from relax_hpc.net.rendezvous.network import library_environment
from relax_hpc.net.rendezvous.process import END_SIGNAL, PARENT, STACKS_SIGNAL

RANK = "relax_hpc.cluster.slurm.rank"
_END_S = 1.0
"""Seconds for a killed step to end, which takes 0.1 s on living nodes."""
_END_OF_JOB_S = 120.0
"""Seconds that are added to slurm.signal_s: if less time is left in the job, a role has stopped
because of the time limit."""
# Slurm 22.05 sends the early signal up to a minute early or late.


class SlurmSteps(Incarnation):
    """The steps of one incarnation."""

    # `kill -9` of both processes of srun 22.05, as in the death of its node, leaves the tasks
    # running. `kill -9` of the parent alone makes the child cancel the step.
    outlives_supervisor = True

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

    def request_end(self) -> None:
        for member in self.members:
            if member.process and member.process.poll() is None:
                # srun passes this signal on to its tasks. SIGTERM would make it kill them.
                member.process.send_signal(END_SIGNAL)
        adopted = {
            step_name(self.name, member.role, self.incarnation)
            for member in self.members
            if not member.process
        }
        if adopted:
            self._signal_steps(adopted, END_SIGNAL)

    def request_stacks(self) -> None:
        """See `Incarnation.request_stacks`."""
        # srun does not pass this signal on to its tasks, so scancel sends it.
        names = {step_name(self.name, member.role, self.incarnation) for member in self.members}
        self._signal_steps(names, STACKS_SIGNAL)

    def _signal_steps(self, names: Collection[str], number: signal.Signals) -> None:
        """Send a signal to the running steps with ``names``, if Slurm answers."""
        with contextlib.suppress(SlurmError):
            for step, name in self.slurm.steps(self.job).items():
                if name in names:
                    self.slurm.cancel(step, signal=number.name.removeprefix("SIG"))

    def kill(self) -> None:
        """Kill the steps, and wait a moment for their end, because the next incarnation needs their
        memory."""
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
        self.detach()

    def _cancel(self) -> None:
        """Cancel steps whose srun is gone, or cannot end them."""
        for member in self.members:
            if member.process and member.process.poll() is None:
                member.process.kill()
                member.process.wait()
        names = {step_name(self.name, member.role, self.incarnation) for member in self.members}
        # If the nodes are dead too, this may fail, and no task runs any more.
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
        """Seconds for nodes to answer, after which they count as lost."""
        self.near_s = config.slurm.signal_s + _END_OF_JOB_S
        self._release: tuple[int, int] | None = None

    def commands(self, name: str, incarnation: int) -> dict[str, Command]:
        """Commands of one step for each role. Their output goes to the group's log directory."""
        config = load_resolved(self.run.root, name)
        logs, variables = self.run.logs(name, incarnation), step_environment(config, name)
        return {
            role: Command(
                arguments=[
                    *self._srun(config, name, role, incarnation),
                    *self._role(config, name, role, incarnation),
                ],
                env=variables,
                log=logs / f"{role}-srun.log",
                config=config,
                late_arguments=self._deadline,
            )
            for role in group_roles(config, name)
        }

    def start(
        self, name: str, incarnation: int, launch: Launch, ahead: Incarnation | None = None
    ) -> SlurmSteps:
        """See `Launcher.start`."""
        if ahead is None:
            self.check_accepts_steps(name)
        commands, nodes = self.commands(name, incarnation), self.allocation.group_nodes[name]
        if ahead and len(ahead.members) < len(commands):
            self.check_accepts_steps(name)
        self.run.logs(name, incarnation).mkdir(parents=True, exist_ok=True)
        steps = {role: step_name(name, role, incarnation) for role in commands}
        launch = replace(launch, job=nodes.job, allocation=self.allocation.name, steps=steps)
        record_launch(self.run, name, incarnation, launch)
        members = start_members(commands, ahead)
        return SlurmSteps(self.run, name, incarnation, members, self.slurm, nodes.job)

    def start_ahead(self, name: str, incarnation: int, roles: Sequence[str]) -> SlurmSteps:
        """See `Launcher.start_ahead`. The new steps share the nodes with the working ones."""
        self.check_accepts_steps(name)
        commands, nodes = self.commands(name, incarnation), self.allocation.group_nodes[name]
        self.run.logs(name, incarnation).mkdir(parents=True, exist_ok=True)
        members = [Member.start(role, commands[role], ahead=True) for role in roles]
        return SlurmSteps(self.run, name, incarnation, members, self.slurm, nodes.job)

    def check_accepts_steps(self, name: str) -> None:
        """Raise SlurmError if the job of ``name`` must not request a new step."""

    def adopt(self, name: str, incarnation: int) -> SlurmSteps | None:
        """The steps of ``incarnation`` in this allocation. None if a step has ended without an exit
        mark, or if they belong to another allocation."""
        launch, nodes = read_launch(self.run, name, incarnation), self.allocation.group_nodes[name]
        if launch is None or launch.allocation != self.allocation.name:
            return None
        members = [Member(role) for role in launch.steps]
        group = SlurmSteps(self.run, name, incarnation, members, self.slurm, nodes.job)
        try:
            running = self.slurm.steps(nodes.job).values()
        except SlurmError:
            # The heartbeats of the group will show whether it lives.
            return group
        ended = group.ended_members()
        is_complete = all(
            member in ended or launch.steps[member.role] in running for member in group.members
        )
        return group if is_complete else None

    def has_all_nodes(self, name: str) -> bool:
        """Whether the group has all its nodes, and each of them answers."""
        nodes = self.allocation.group_nodes[name]
        if self.has_lost_nodes(name):
            return False
        srun = [*self.srun_on_nodes(nodes), "--mpi=none"]
        srun += ["--ntasks-per-node=1", f"--ntasks={nodes.nodes}", "true"]
        # slurmctld notices a dead node only after SlurmdTimeout (300 s by default). A short step
        # notices it sooner.
        with contextlib.suppress(subprocess.TimeoutExpired):
            result = subprocess.run(
                srun,
                env=step_environment(None, name),
                timeout=self.probe_s,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            if result.returncode == 0:
                return True
        # If slurmctld does not answer any more, this raises SlurmError, and the nodes do not count
        # as lost.
        self.has_lost_nodes(name)
        return False

    def has_lost_nodes(self, name: str) -> bool:
        """Whether the group's component has ended, or has lost nodes."""
        # A component with --no-kill stays RUNNING on its remaining nodes (seen on Slurm 22.05).
        nodes = self.allocation.group_nodes[name]
        job = self.slurm.jobs(nodes.job).get(nodes.job)
        return job is None or job.state != "RUNNING" or job.nodes < nodes.nodes

    def is_ending(self) -> bool:
        try:
            job = self.slurm.jobs(self.allocation.job).get(self.allocation.job)
            if job is None or job.state != "RUNNING":
                return True
            if job.time_left_s is not None and job.time_left_s < self.near_s:
                return True
            # Preemption of one component requeues the whole heterogeneous job (Slurm 22.05).
            group_nodes = self.allocation.group_nodes.values()
            jobs = {self.allocation.job, *(nodes.job for nodes in group_nodes if nodes.het)}
            return any(self.slurm.is_preempted(job) for job in sorted(jobs))
        except SlurmError:
            # If the job ends, Slurm sends the signal to this process too.
            return False

    def hand_over(self, name: str, reason: str) -> str:
        return ""

    def nodes_of(self, name: str) -> list[str]:
        """The nodes that a group has now."""
        nodes = self.allocation.group_nodes[name]
        job = self.slurm.jobs(nodes.job).get(nodes.job)
        return self.slurm.hostnames(job.node_list) if job else []

    def srun_on_nodes(self, nodes: GroupNodes) -> list[str]:
        """First arguments of an srun on ``nodes``."""
        # Slurm 22.05 accepts steps of a component only by the leader's job id and --het-group.
        het = [] if nodes.het is None else [f"--het-group={nodes.het}"]
        # Steps share the resources of the job. Without --overlap, a second step waits ("Requested
        # nodes are busy"), even for seconds after the first one has ended. With --overlap alone it
        # fails where Slurm allocates memory ("Memory required by task is not available").
        return [
            "srun",
            f"--jobid={self.allocation.job}",
            *het,
            f"--nodes={nodes.nodes}",
            "--overlap",
            "--mem=0",
        ]

    def _srun(self, config: Config, name: str, role: str, incarnation: int) -> list[str]:
        group_nodes, resources = (
            self.allocation.group_nodes[name],
            group_settings(config, name).resources,
        )
        # --cpus-per-task is left out: it limits a step to so many cores, and overlapping steps
        # would get the same ones.
        ranks = rank_count(config, name, role)
        nodes = min(group_nodes.nodes, ranks)
        srun = self.srun_on_nodes(GroupNodes(group_nodes.job, nodes, group_nodes.het))
        srun += [f"--ntasks={ranks}", f"--ntasks-per-node={ranks // nodes}"]
        srun += [*placing_options(config), "--export=ALL"]
        # Without this option, a step of Slurm 22.05 continues with a missing rank.
        srun.append("--kill-on-bad-exit=1")
        # The site's WaitTime would end the other ranks some time after the first one is done.
        srun.append("--wait=0")
        if resources.gpus_per_node and config.site.gpu_request != "none":
            srun.append(f"--gpus-per-node={resources.gpus_per_node}")
        # A single rank needs no MPI, and works even if the site's MPI plugin is broken.
        srun.append(f"--mpi={mpi_plugin(config) if ranks > 1 else 'none'}")
        srun += [f"--job-name={step_name(name, role, incarnation)}", "--open-mode=append"]
        # With a pattern in the name, each node writes the files of its tasks. Output that srun
        # itself writes is lost with the node of srun.
        logs = escape_patterns(self.run.logs(name, incarnation))
        srun.append(f"--output={logs}/{role}-rank-{self._rank_pattern()}.log")
        write_container_file(config, self.run.root)
        srun += container_srun_options(config, self.run.root)
        return changed_srun(srun, config, name)

    def _rank_pattern(self) -> str:
        """Pattern of srun for the number of a rank in the name of a file."""
        # In a step of one component of a heterogeneous job, %t of Slurm 24.11.5 and 25.11.7 is one
        # less than the rank, and 4294967295 for rank 0. %n is the number of the node in the step,
        # whose first rank it is if each node has one. A rank writes to the file of its number as
        # soon as it runs, so that only its first lines can be in another one.
        if self.allocation.het and self._release is None:
            self._release = (0, 0)
            with contextlib.suppress(SlurmError):
                self._release = parse_release(self.slurm.version())
        return "%n" if self._release and self._release >= (24, 11) else "%t"

    def _role(self, config: Config, name: str, role: str, incarnation: int) -> list[str]:
        # The role is in the arguments, because Slurm 22.05 does not tell a task its component.
        arguments = role_arguments(self.run, name, role, incarnation, RANK)
        container = container_command(config, self.run.root)
        return [*container, role_python(config), *arguments, "--watch"]

    def _deadline(self) -> list[str]:
        deadline = self.deadline()
        return [f"--deadline={deadline:.0f}"] if deadline else []


def step_name(group: str, role: str, incarnation: int) -> str:
    """Name of a step in squeue -s."""
    return f"{group}.{role}.i{incarnation:06d}"


def escape_patterns(path: Path) -> str:
    """``path`` for --output, in which Slurm replaces patterns such as %t."""
    return str(path).replace("%", "%%")


def step_environment(config: Config | None, name: str) -> dict[str, str]:
    """Environment of srun, which its tasks inherit."""
    if config is None:
        from relax_hpc.net.rendezvous.process import clean_environment

        return clean_environment()
    variables = role_environment(config, group_environment(config, name))
    # `die_with_parent` compares this pid with the parent of a process. The parent of a task is
    # slurmstepd, and a step must outlive its supervisor.
    del variables[PARENT]
    return (
        mpi_defaults(config) | library_environment(config, name) | variables | mpi_variables(config)
    )
