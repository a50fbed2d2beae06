"""A run on a sandbox's Slurm for the recovery benchmark: submit it, break it, and see from its
files what happened."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

from relax_hpc.base.processes import all_processes
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.sandbox import Sandbox
from relax_hpc.cluster.slurm.job_lookup import current_job
from relax_hpc.config import load_resolved
from relax_hpc.net.rendezvous.roster import latest_incarnation
from relax_hpc.ops.observe.status_groups import started_ahead

_LOOK_S, _WAIT_S = 0.02, 0.1
_COMMAND_S = 120.0
_QUEUE_S = 60.0


class Tail:
    """New whole lines of a file that grows, and may be replaced by another."""

    def __init__(self, path: Path) -> None:
        self.path, self.inode, self.offset = path, 0, 0

    def lines(self) -> tuple[bool, list[bytes]]:
        """Whether the file is another than last time, read from its start, and its lines since."""
        try:
            with self.path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                new = inode != self.inode
                if new:
                    self.inode, self.offset = inode, 0
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return False, []
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        return new, whole.splitlines()


class Follower:
    """Notes when the supervisors say something and when samples are accepted, which their files do
    not say."""

    def __init__(self, run: RunDir) -> None:
        self.said: list[tuple[float, str]] = []
        self.accepted: list[float] = []
        self._log, self._events = Tail(run.root / "supervisor.log"), Tail(run.events)
        self._count, self._most = 0, 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._end.wait(_LOOK_S):
            self.said += [
                (time.time(), line.decode(errors="replace")) for line in self._log.lines()[1]
            ]
            # A new controller writes the file anew, with all that was in it before.
            new, lines = self._events.lines()
            self._count = sum(b'"what": "accepted"' in line for line in lines) + (
                0 if new else self._count
            )
            if self._count > self._most:
                self._most = self._count
                self.accepted.append(time.time())


class Run:
    """One run; its jobs and processes are ended by `close`."""

    def __init__(
        self, sandbox: Sandbox, folder: Path, layout: str, settings: dict[str, Any]
    ) -> None:
        self.sandbox, self.layout = sandbox, layout
        self.run = RunDir(folder / "run")
        self.config_file = folder / "run.yaml"
        self.config_file.write_text(yaml.safe_dump(settings))
        self.supervisor = "supervisor" if layout == "het" else "supervisor-hub"
        self.submit()
        self.config = load_resolved(self.run.root)
        self.follower = Follower(self.run)

    # -- commands ----------------------------------------------------------------------------------

    def relax_hpc(self, *words: str) -> str:
        """Standard output of a command; RuntimeError, with what it said, if it fails."""
        done = subprocess.run(
            [sys.executable, "-m", "relax_hpc", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            env=self.sandbox.environment(),
            check=False,
        )
        if done.returncode:
            raise RuntimeError(
                f"relax-hpc {' '.join(words)}: exit code {done.returncode}: {done.stderr.strip()}"
            )
        return done.stdout

    def submit(self, *words: str) -> None:
        files = ["--config", str(self.config_file), "--config", str(self.sandbox.site)]
        self.relax_hpc(
            "submit", *files, "--run_dir", str(self.run.root), "--layout", self.layout, *words
        )

    def close(self) -> None:
        """End what is left of it."""
        self.follower.close()
        for job in self.sandbox.client("squeue", "--noheader", "--format=%A").split():
            self.sandbox.client("scancel", job, check=False)
        with contextlib.suppress(TimeoutError):
            self.wait(
                lambda: not self.sandbox.client("squeue", "--noheader"),
                "its jobs have ended",
                _QUEUE_S,
            )
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                process.kill()

    # -- looking -----------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], Any], what: str, seconds: float) -> Any:
        """The first true value of ``condition``; TimeoutError at the deadline."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {seconds:g} s")
            time.sleep(_WAIT_S)
        return value

    def trained(self) -> list[tuple[float, int]]:
        """(moment, step) of every step in the order of training, also of those that were rolled
        back."""
        if not self.run.metrics.exists():
            return []
        found = []
        for text in self.run.metrics.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                if "reward/mean" in line:
                    found.append((line["time"], line["step"]))
        return found

    def step(self) -> int:
        """The step that was trained last; -1 before the first."""
        return (self.trained() or [(0.0, -1)])[-1][1]

    def first(self, name: str, pattern: str, since: float) -> tuple[float, int]:
        """When the first file of a group's rendezvous that fits ``pattern`` was written, and its
        incarnation.

        (inf, 0) if none was since.
        """
        found = []
        for path in self.run.rendezvous(name).glob(pattern):
            with contextlib.suppress(FileNotFoundError, ValueError):
                found.append((path.stat().st_mtime, int(path.name.removeprefix("inc-")[:6])))
        return min((entry for entry in found if entry[0] > since), default=(float("inf"), 0))

    def said(self, name: str, since: float) -> float:
        """When a supervisor first said something of a group; inf: not yet."""
        found = (
            moment
            for moment, text in list(self.follower.said)
            if moment > since and f"] {name}: " in text
        )
        return min(found, default=float("inf"))

    def job(self, group: str) -> str:
        """Slurm job, or component, that a group lives in."""
        return current_job(self.run, group)

    def runs(self, job: str) -> bool:
        """Whether Slurm shows a job as running; true if it does not answer."""
        state = self.sandbox.client(
            "squeue", "--noheader", f"--jobs={job}", "--format=%T", check=False
        ).strip()
        return state in ("", "RUNNING")

    def job_times(self, job: str) -> tuple[float, float]:
        """When a job was first queued, and when it was last started; whole seconds, 0 is
        unknown."""
        words = self.sandbox.client("scontrol", "show", "job", job, check=False).split()
        found = dict(
            word.split("=", 1) for word in words if word.startswith(("SubmitTime=", "StartTime="))
        )
        return moment(found.get("SubmitTime", "")), moment(found.get("StartTime", ""))

    def story(self) -> str:
        """For whoever has to find out why a run does not come back."""
        queue = self.sandbox.client("squeue", "--format=%i %A %j %T %D %N %r").strip()
        lines = [line for _, line in self.follower.said[-20:]]
        return "\n".join([queue, *lines])

    def lease(self) -> dict[str, Any]:
        """Who supervises the hub."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.run.rendezvous(self.supervisor) / "lease").read_text())
        return {}

    def standbys(self) -> list[psutil.Process]:
        """Of the hub's supervisor, but not the processes that watch them."""
        return [
            p
            for p in self._processes()
            if "--standby" in p.cmdline() and "srun" not in p.cmdline() and _works(p)
        ]

    def waits_ahead(self, group: str) -> bool:
        """Whether a next incarnation of it has been started, and has imported what it needs."""
        return bool(started_ahead(self.run, group, latest_incarnation(self.run, group)))

    def workers(self, role: str) -> list[psutil.Process]:
        """Processes that do a role's work, by rank, but not those that wait to be the next
        incarnation."""
        group = next(
            name for name, group in self.config.groups.items() if role in [*group.roles, name]
        )
        words = f"--role {role} --incarnation {latest_incarnation(self.run, group)} "
        found = [p for p in self._processes() if words in " ".join(p.cmdline()) + " " and _works(p)]
        found = [p for p in found if p.cmdline()[0] != "srun"]
        return sorted(found, key=lambda p: int(p.environ().get("SLURM_PROCID", 0)))

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in all_processes():
            with contextlib.suppress(psutil.Error):
                if (
                    str(self.run.root) in process.cmdline()
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
        return found

    # -- breaking ----------------------------------------------------------------------------------

    def inflict(self, kind: str, what: str) -> str:
        """Do what a fault is named after; the node that was lost, or empty."""
        if kind == "kill":
            victim = self.lease()["pid"] if what == "supervisor" else self.workers(what)[-1].pid
            psutil.Process(victim).kill()
        elif kind == "scancel":
            self.sandbox.client("scancel", self._printed(self.job(what)))
        else:
            node = (
                self.lease()["node"]
                if what == "hub"
                else self.workers(what)[-1].environ()["SLURMD_NODENAME"]
            )
            self.sandbox.kill_node(node, down=kind == "down")
            return node
        return ""

    def _printed(self, job: str) -> str:
        """A component as scancel takes it: 8+1."""
        lines = self.sandbox.client("squeue", "--noheader", "--format=%A %i").splitlines()
        return dict(line.split() for line in lines)[job]


def moment(text: str) -> float:
    """Seconds since 1970 of one of Slurm's local times; 0 of "Unknown" and the like."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return 0.0


def _works(process: psutil.Process) -> bool:
    """Whether this is no process that only watches one like itself, as those under Slurm have."""
    words, parent = process.cmdline(), process.parent()
    watched = "--watch" in words or "relax_hpc.commands.head" in words
    return watched == (parent is not None and parent.cmdline() == words)
