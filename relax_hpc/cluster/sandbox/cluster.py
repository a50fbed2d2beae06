"""The sandbox: Slurm's real daemons, with one slurmd for each node, on 127.0.0.1 and with all files
in one folder."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import ConfigError, DeadlineError, RelaxError
from relax_hpc.cluster.sandbox import config_files, machine, options, processes
from relax_hpc.cluster.sandbox.installation import SlurmInstallation, check_state
from relax_hpc.cluster.sandbox.options import Options

_START_S, _STOP_S, _COMMAND_S = 60.0, 10.0, 30.0
"""Deadlines in seconds: for a start, for the end of a daemon after SIGTERM, and for one Slurm
command."""


def up(folder: Path | str, wanted: Options | None = None) -> Sandbox:
    """Start all daemons of the sandbox in `folder` that do not run, and wait until all nodes except
    declared ones accept jobs.

    Without `wanted` it has its previous options, or the defaults. ConfigError if this machine
    cannot run a sandbox (programs, host name, folder, ports), or if it runs already with other
    options. DeadlineError if a daemon does not answer.
    """
    folder = Path(folder).expanduser().resolve()
    options.check_folder(folder)
    machine.check_owner(folder)
    saved, running = options.load(folder / "options.json"), processes.daemons(folder)
    wanted = wanted or saved or Options()
    machine.check(wanted.slurm)
    if not running:
        version = SlurmInstallation(wanted.slurm).version()
        check_state(folder / config_files.VERSION_FILE, version, folder)
        machine.check_binding(wanted)
        wanted = machine.with_port(folder, wanted, saved)
        # The folder is created after all checks. Another user may have created it meanwhile.
        folder.mkdir(parents=True, exist_ok=True)
        machine.check_owner(folder)
        config_files.write(folder, wanted)
        options.save(wanted, folder / "options.json")
    elif saved is None or replace(wanted, port=wanted.port or saved.port) != saved:
        raise ConfigError(
            f"sandbox: {folder}: already runs with other options ({saved}), call down first"
        )
    sandbox = Sandbox(folder, saved if running and saved else wanted)
    sandbox.start()
    if not (folder / "site.yaml").exists() or not running:
        config_files.write_site(folder, sandbox.options, sandbox.has_pmix())
    return sandbox


def down(folder: Path | str) -> None:
    """End the sandbox in `folder` and all its jobs. Its files stay. No error if it does not run."""
    folder = Path(folder).expanduser().resolve()
    Sandbox(folder, options.load(folder / "options.json") or Options()).stop()


def load(folder: Path | str) -> Sandbox:
    """The sandbox that was started in `folder`, even if it does not run now. ConfigError if there
    was none."""
    folder = Path(folder).expanduser().resolve()
    saved = options.load(folder / "options.json")
    if saved is None:
        raise ConfigError(f"sandbox: folder: found no sandbox in {folder}, start one with up")
    return Sandbox(folder, saved)


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A sandbox that `up` has started or `load` has read."""

    folder: Path
    options: Options

    @property
    def conf(self) -> Path:
        """Path that SLURM_CONF names."""
        return self.folder / "etc/slurm.conf"

    @property
    def site(self) -> Path:
        """The site file for `relax-hpc ... --config`."""
        return self.folder / "site.yaml"

    @property
    def nodes(self) -> tuple[str, ...]:
        return self.options.node_names

    def environment(self) -> dict[str, str]:
        """Environment of this process, in which Slurm's commands use this sandbox."""
        # Without SLURM_CONF, clients of Slurm 22.05 search DNS for a controller and fail with
        # "Could not establish a configuration source".
        return self.installation.environment() | {"SLURM_CONF": str(self.conf)}

    @property
    def installation(self) -> SlurmInstallation:
        """The Slurm whose programs it runs."""
        return SlurmInstallation(self.options.slurm)

    def client(self, *arguments: str, check: bool = True) -> str:
        """Standard output of a Slurm command. If it fails and `check` is set, raise RelaxError with
        its message."""
        try:
            done = subprocess.run(
                arguments,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_COMMAND_S,
            )
        except subprocess.TimeoutExpired:
            raise DeadlineError(
                f"sandbox: {' '.join(arguments)}: no answer in {_COMMAND_S:g} s{self._see_log()}"
            ) from None
        if check and done.returncode:
            raise RelaxError(
                f"sandbox: {' '.join(arguments)}: "
                f"{done.stderr.strip() or f'exit code {done.returncode}'}"
            )
        return done.stdout

    def daemons(self) -> dict[str, int]:
        """Pid of each daemon of a complete sandbox; 0: it does not run."""
        running = processes.daemons(self.folder)
        names = ("munged", "slurmctld", *(f"slurmd-{node}" for node in self.nodes))
        return {name: running[name][0].pid if name in running else 0 for name in names}

    def node_states(self) -> dict[str, str]:
        """State of each node as slurmctld reports it, such as `idle` or `down*`. Empty if slurmctld
        does not answer."""
        if not self.daemons()["slurmctld"]:
            # sinfo would try to connect for ten seconds.
            return {}
        lines = self.client(
            "sinfo", "--noheader", "--Node", "--format=%N %T", check=False
        ).splitlines()
        return dict(line.split()[:2] for line in lines)

    def is_up(self) -> bool:
        """Whether all daemons run and all nodes accept jobs."""
        return all(self.daemons().values()) and all(map(_accepts_jobs, self._states_of(self.nodes)))

    def start(self) -> None:
        """Start every daemon that does not run, and wait until all nodes accept jobs."""
        self._start_munge()
        self.start_controller()
        self._start_nodes(self.nodes)

    def stop(self) -> None:
        """Cancel all jobs and end all daemons. Daemons that do not end are killed."""
        running = processes.daemons(self.folder)
        if "slurmctld" in running and "munged" in running:
            self._cancel_all()
        # The controller ends first, while its nodes can still answer. munged ends last, because all
        # daemons need it to authenticate.
        self.stop_controller()
        running = processes.daemons(self.folder)
        munge = running.pop("munged", [])
        slurmds: list[Any] = []
        for daemon_processes in running.values():
            slurmds += daemon_processes
        processes.terminate(slurmds, _STOP_S)
        self._kill_steps()
        processes.terminate(munge, _STOP_S)
        for path in self.folder.glob("spool/node*/*"):
            if path.is_socket():
                path.unlink(missing_ok=True)

    def kill_node(self, node: str, down: bool = False) -> list[int]:
        """Simulate a power loss of `node`: kill its slurmd and all of its processes. Returns the
        killed pids.

        `down` reports the loss to slurmctld immediately. Otherwise slurmctld notices it after
        slurmd_timeout.
        """
        self._check_node(node)
        frozen: dict[int, Any] = {}

        def freeze_new_processes() -> bool:
            new = [process for process in self._processes_of(node) if process.pid not in frozen]
            processes.freeze(new)
            frozen.update({process.pid: process for process in new})
            return not new

        # All processes are stopped before the first one is killed, because in a real power loss no
        # process can react to the death of another one.
        processes.until(
            freeze_new_processes,
            _STOP_S,
            f"{node}: new processes start all the time{self._see_log(f'slurmd-{node}')}",
        )
        try:
            if down:
                # Before the deaths become visible and a job requests other nodes.
                self._set_down(node)
        finally:
            processes.kill(frozen.values())
        processes.until_gone(list(frozen.values()), _STOP_S)
        return sorted(frozen)

    def _set_down(self, node: str) -> None:
        self.client("scontrol", "update", f"nodename={node}", "state=down", "reason=power loss")

    def start_node(self, node: str, rebooted: bool = False) -> None:
        """Power `node` on, and wait until it accepts jobs.

        `rebooted` reports to slurmctld that earlier processes of the node have ended, as the boot
        of a real node does.
        """
        self._check_node(node)
        if rebooted:
            # Without this, a job that was ending on the node may stay COMPLETING (Slurm 22.05).
            self._set_down(node)
        self._start_nodes((node,))

    def stop_controller(self, kill: bool = False) -> None:
        """End slurmctld, or `kill` it. Jobs continue. A killed slurmctld may lose changes of its
        last 5 s, because it saves its state at that interval."""
        controller = processes.families(processes.daemons(self.folder).get("slurmctld", []))
        if kill:
            processes.kill(controller)
        processes.terminate(controller, _STOP_S)

    def start_controller(self) -> None:
        """Start slurmctld with its saved state, and wait until it answers."""
        if "slurmctld" not in processes.daemons(self.folder):
            self._daemon("slurmctld", "slurmctld", "-f", str(self.conf))
        self._wait(
            lambda: "UP" in self.client("scontrol", "ping", check=False),
            "slurmctld",
            "does not answer",
        )

    def restart(self) -> None:
        """Kill slurmctld and every slurmd, and start them again. Steps of running jobs continue.

        As on any Slurm cluster, jobs that were submitted or changed in the last 5 s may be lost.
        """
        slurmds: list[Any] = []
        for name, daemon_processes in processes.daemons(self.folder).items():
            if name.startswith("slurmd-"):
                slurmds += daemon_processes
        self.stop_controller(kill=True)
        processes.kill(slurmds)
        processes.until_gone(slurmds, _STOP_S)
        self.start()

    def has_pmix(self) -> bool:
        """Whether srun can start the system's Open MPI with PMIx. Debian 12 needs the package
        libpmix-dev for that."""
        if not self.nodes:
            return False
        command = (
            "srun",
            "--mpi=pmix",
            "--nodes=1",
            "--ntasks=1",
            "--immediate=5",
            "echo",
            "works",
        )
        return bool(config_files.open_mpi()) and "works" in self.client(*command, check=False)

    def _processes_of(self, node: str) -> list[Any]:
        slurmd = processes.daemons(self.folder).get(f"slurmd-{node}", [])
        steps, tasks = processes.steps(self.folder, node), processes.tasks(self.folder, node)
        return processes.families((*slurmd, *steps, *tasks))

    def _cancel_all(self) -> None:
        jobs = self.client("squeue", "--noheader", "--format=%A", check=False).split()
        if jobs:
            # A component that ended with its leader is no error.
            self.client("scancel", "--quiet", *jobs, check=False)
        processes.until_gone(processes.steps(self.folder), self.options.kill_wait + 2.0)

    def _kill_steps(self) -> None:
        steps, tasks = processes.steps(self.folder), processes.tasks(self.folder)
        remaining = processes.families((*steps, *tasks))
        processes.kill(remaining)
        processes.until_gone(remaining, _STOP_S)

    def _start_munge(self) -> None:
        run = self.folder / "run"
        if "munged" in processes.daemons(self.folder):
            return
        for stale in run.glob("munge.sock*"):
            stale.unlink()
        # Without --force, munged 0.5.15 requires that all users can enter every folder above its
        # socket, which home directories seldom allow.
        self._daemon(
            "munged", "munged", "--force",
            f"--key-file={self.folder}/etc/munge.key", f"--socket={run}/munge.sock",
            f"--pid-file={run}/munged.pid", f"--log-file={self.folder}/log/munged.log",
            f"--seed-file={run}/munge.seed", "--num-threads=2",
        )  # fmt: skip

    def _start_nodes(self, names: tuple[str, ...]) -> None:
        if not names:
            return
        running = processes.daemons(self.folder)
        for node in names:
            if f"slurmd-{node}" not in running:
                stepd = self.installation.slurmd_options()
                self._daemon(f"slurmd-{node}", "slurmd", *stepd, "-N", node, "-f", str(self.conf))
        self._wait(
            lambda: all(map(_accepts_jobs, self._states_of(names))),
            f"slurmd-{names[0]}",
            "does not accept jobs",
        )

    def _states_of(self, names: tuple[str, ...]) -> list[str]:
        states = self.node_states()
        return [states.get(name, "") for name in names]

    def _daemon(self, name: str, program: str, *arguments: str) -> None:
        """Start a program that puts itself into the background. It inherits no open files."""
        log = self.folder / f"log/{name}.out"
        with log.open("ab") as out:
            command, variables = [self._program(program), *arguments], self.environment()
            done = subprocess.run(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd="/",
                start_new_session=True, timeout=_START_S,
            )  # fmt: skip
        if done.returncode:
            raise RelaxError(
                f"sandbox: {name}: did not start, its last output: {_tail(log)}"
                f"{self._see_log(name)}"
            )

    def _program(self, name: str) -> str:
        # munged belongs to the system, not to the Slurm of a prefix.
        return self.installation.find(name) or machine.find(name) or name

    def _wait(self, done: Callable[[], bool], name: str, failure: str) -> None:
        processes.until(done, _START_S, f"{name} {failure}{self._see_log(name)}")

    def _see_log(self, name: str = "slurmctld") -> str:
        return f", see {self.folder}/log/{name}.log"

    def _check_node(self, node: str) -> None:
        if node not in self.nodes:
            allowed = (
                f"{self.nodes[0]} to {self.nodes[-1]}"
                if self.nodes
                else "none, as they are only declared"
            )
            raise ConfigError(f"sandbox: node: found {node!r}, allowed {allowed}")


def _accepts_jobs(state: str) -> bool:
    """Whether a node in this state runs jobs, or can run one after its present jobs end."""
    return state in (
        "idle",
        "mixed",
        "allocated",
        "completing",
        "planned",
        "reserved",
        "drained",
        "draining",
    )


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return " ".join(line.strip() for line in lines[-4:]).strip() or "none"
