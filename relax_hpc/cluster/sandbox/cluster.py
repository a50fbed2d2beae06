"""The sandbox itself: Slurm's real daemons, one slurmd a node, all on 127.0.0.1 and all below one
folder."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import ConfigError, DeadlineError, RelaxError
from relax_hpc.cluster.sandbox import config_files, machine, options, processes
from relax_hpc.cluster.sandbox.options import Options
from relax_hpc.net.rendezvous.process import clean_environment

_START_S, _STOP_S, _COMMAND_S = 60.0, 10.0, 30.0
"""Deadlines of a start, of a daemon's orderly end, and of one Slurm command."""


def up(folder: Path | str, wanted: Options | None = None) -> Sandbox:
    """Start what does not run of the sandbox in `folder`, and return when all its nodes but
    declared ones serve.

    Without `wanted` it is as it was last time, or as Options' defaults. ConfigError: this machine
    cannot have one (programs, host name, folder, ports), or it runs already with other options.
    DeadlineError: a daemon does not come.
    """
    folder = Path(folder).expanduser().resolve()
    machine.check(folder)
    machine.check_owner(folder)
    saved, running = options.load(folder / "options.json"), processes.daemons(folder)
    wanted = wanted or saved or Options()
    if not running:
        machine.check_binding(wanted)
        wanted = machine.with_port(folder, wanted, saved)
        # What is refused leaves no folder behind; somebody else may have made it by now.
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
    """End the sandbox in `folder` with all its jobs; its files stay. Nothing happens where none
    runs."""
    folder = Path(folder).expanduser().resolve()
    Sandbox(folder, options.load(folder / "options.json") or Options()).stop()


def load(folder: Path | str) -> Sandbox:
    """The sandbox that was started in `folder`, running or not. ConfigError: there is none."""
    folder = Path(folder).expanduser().resolve()
    saved = options.load(folder / "options.json")
    if saved is None:
        raise ConfigError(f"sandbox: folder: found no sandbox in {folder}, start one with up")
    return Sandbox(folder, saved)


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A sandbox that `up` has started or `load` has found."""

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
        """Environment of this process, with this Slurm in place of any other."""
        return clean_environment() | {"SLURM_CONF": str(self.conf)}

    def client(self, *words: str, check: bool = True) -> str:
        """Standard output of a Slurm command. RelaxError with its own words if it fails, unless
        `check` is off."""
        try:
            done = subprocess.run(
                words,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_COMMAND_S,
            )
        except subprocess.TimeoutExpired:
            raise DeadlineError(
                f"sandbox: {' '.join(words)}: no answer in {_COMMAND_S:g} s{self._see()}"
            ) from None
        if check and done.returncode:
            raise RelaxError(
                f"sandbox: {' '.join(words)}: "
                f"{done.stderr.strip() or f'exit code {done.returncode}'}"
            )
        return done.stdout

    def daemons(self) -> dict[str, int]:
        """Pid of each daemon that a whole sandbox has; 0: it does not run."""
        found = processes.daemons(self.folder)
        names = ("munged", "slurmctld", *(f"slurmd-{node}" for node in self.nodes))
        return {name: found[name][0].pid if name in found else 0 for name in names}

    def node_states(self) -> dict[str, str]:
        """State of each node in slurmctld's words, such as `idle` or `down*`; empty when slurmctld
        does not answer."""
        if not self.daemons()["slurmctld"]:
            return {}  # sinfo would try for ten seconds
        lines = self.client(
            "sinfo", "--noheader", "--Node", "--format=%N %T", check=False
        ).splitlines()
        return dict(line.split()[:2] for line in lines)

    def is_up(self) -> bool:
        """Whether all daemons run and all nodes serve."""
        return all(self.daemons().values()) and all(map(_serves, self._states_of(self.nodes)))

    def start(self) -> None:
        """Start every daemon that does not run, and wait for the nodes."""
        self._start_munge()
        self.start_controller()
        self._start_nodes(self.nodes)

    def stop(self) -> None:
        """Cancel the jobs and end the daemons; what does not end when asked is killed."""
        if "slurmctld" in (found := processes.daemons(self.folder)) and "munged" in found:
            self._cancel_all()
        # The controller first, while its nodes can still answer; munged, which all of them need,
        # last.
        self.stop_controller()
        found = processes.daemons(self.folder)
        munge = found.pop("munged", [])
        processes.terminate([process for group in found.values() for process in group], _STOP_S)
        self._kill_steps()
        processes.terminate(munge, _STOP_S)
        for path in self.folder.glob("spool/node*/*"):
            if path.is_socket():
                path.unlink(missing_ok=True)

    def kill_node(self, node: str, down: bool = False) -> list[int]:
        """Power loss of `node`: SIGKILL to its slurmd and to all that runs on it. Returns the
        killed pids.

        `down` tells slurmctld at once; else it finds out by itself, after slurmd_timeout.
        """
        self._check_node(node)
        found: dict[int, Any] = {}

        def all_stand_still() -> bool:
            new = [process for process in self._processes_of(node) if process.pid not in found]
            processes.freeze(new)
            found.update({process.pid: process for process in new})
            return not new

        # First all stop, then all die: no process shall see another's death, as it would not when
        # power is lost.
        processes.until(
            all_stand_still,
            _STOP_S,
            f"{node}: new processes keep coming{self._see(f'slurmd-{node}')}",
        )
        try:
            if down:
                # Before anybody sees the deaths, and asks for other nodes.
                self._set_down(node)
        finally:
            processes.kill(found.values())
        processes.until_gone(list(found.values()), _STOP_S)
        return sorted(found)

    def _set_down(self, node: str) -> None:
        self.client("scontrol", "update", f"nodename={node}", "state=down", "reason=power loss")

    def start_node(self, node: str, rebooted: bool = False) -> None:
        """Power `node` on, and wait until it serves.

        `rebooted` tells slurmctld that what ran there before has ended, as a real node's boot does:
        else a job that was being ended there may stay COMPLETING.
        """
        self._check_node(node)
        if rebooted:
            self._set_down(node)
        self._start_nodes((node,))

    def stop_controller(self, kill: bool = False) -> None:
        """End slurmctld in order, or `kill` it: what it learned in its last 5 s may then be lost.
        Jobs go on."""
        found = processes.families(processes.daemons(self.folder).get("slurmctld", []))
        if kill:
            processes.kill(found)
        processes.terminate(found, _STOP_S)

    def start_controller(self) -> None:
        """Start slurmctld with the state it left, and wait until it answers."""
        if "slurmctld" not in processes.daemons(self.folder):
            self._daemon("slurmctld", "slurmctld", "-f", str(self.conf))
        self._wait(
            lambda: "UP" in self.client("scontrol", "ping", check=False),
            "slurmctld",
            "does not answer",
        )

    def restart(self) -> None:
        """Kill slurmctld and every slurmd, and start them again: the steps of running jobs are not
        touched.

        A job that was submitted or changed in the last 5 s may be forgotten, as on any Slurm.
        """
        found = processes.daemons(self.folder)
        slurmds = [
            process
            for name, group in found.items()
            if name.startswith("slurmd-")
            for process in group
        ]
        self.stop_controller(kill=True)
        processes.kill(slurmds)
        processes.until_gone(slurmds, _STOP_S)
        self.start()

    def has_pmix(self) -> bool:
        """Whether srun can start the system's Open MPI through PMIx; on Debian that takes the
        package libpmix-dev."""
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
            # Components of a job that went with its leader are no error.
            self.client("scancel", "--quiet", *jobs, check=False)
        processes.until_gone(processes.steps(self.folder), self.options.kill_wait + 2.0)

    def _kill_steps(self) -> None:
        left = processes.families((*processes.steps(self.folder), *processes.tasks(self.folder)))
        processes.kill(left)
        processes.until_gone(left, _STOP_S)

    def _start_munge(self) -> None:
        run = self.folder / "run"
        if "munged" in processes.daemons(self.folder):
            return
        for stale in run.glob("munge.sock*"):
            stale.unlink()
        # --force: munged wants every folder above its socket open to all users, and homes seldom
        # are.
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
                self._daemon(f"slurmd-{node}", "slurmd", "-N", node, "-f", str(self.conf))
        self._wait(
            lambda: all(map(_serves, self._states_of(names))),
            f"slurmd-{names[0]}",
            "does not serve",
        )

    def _states_of(self, names: tuple[str, ...]) -> list[str]:
        states = self.node_states()
        return [states.get(name, "") for name in names]

    def _daemon(self, name: str, program: str, *words: str) -> None:
        """Start a program that puts itself into the background, with nothing of ours open."""
        log = self.folder / f"log/{name}.out"
        with log.open("ab") as out:
            command, variables = [machine.find(program) or program, *words], self.environment()
            done = subprocess.run(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd="/",
                start_new_session=True, timeout=_START_S,
            )  # fmt: skip
        if done.returncode:
            raise RelaxError(
                f"sandbox: {name}: did not start, its last words: {_tail(log)}{self._see(name)}"
            )

    def _wait(self, done: Callable[[], bool], name: str, what: str) -> None:
        processes.until(done, _START_S, f"{name} {what}{self._see(name)}")

    def _see(self, name: str = "slurmctld") -> str:
        return f", see {self.folder}/log/{name}.log"

    def _check_node(self, node: str) -> None:
        if node not in self.nodes:
            allowed = (
                f"{self.nodes[0]} to {self.nodes[-1]}"
                if self.nodes
                else "none, as they are only declared"
            )
            raise ConfigError(f"sandbox: node: found {node!r}, allowed {allowed}")


def _serves(state: str) -> bool:
    """Whether a node in this state runs jobs, or could when its present ones are done."""
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
