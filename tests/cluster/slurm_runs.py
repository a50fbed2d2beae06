"""Whole runs on the sandbox's Slurm: submit a run as a user does, observe it, inject faults, audit.

Nothing here sleeps for a fixed time. A wait ends when its condition holds. At its deadline the test
fails with the ends of the run's logs.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any

import msgpack
import psutil

from relax_hpc.base.metrics.read import read_metrics
from relax_hpc.base.processes import all_processes
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.sandbox import Sandbox, processes
from relax_hpc.cluster.sandbox.processes import command_line
from relax_hpc.cluster.slurm.job_lookup import current_job
from relax_hpc.cluster.supervise.launch_records import read_mark
from relax_hpc.cluster.supervise.requests import read_stop_request
from relax_hpc.config.schema import TinyModelConfig
from relax_hpc.ops.observe.status import status
from relax_hpc.training.models.tiny_model import make_tiny_model
from relax_hpc.training.weights.node_cache import staging_root
from tests import fault_table
from tests.helpers.audit import audit
from tests.helpers.failure_reports import describe_process, environment, log_end
from tests.helpers.run_helpers import (
    ALL,
    SMALL,
    engine_of,
    merged,
    trained_steps,
    waits,
    with_engine,
    write_config,
)
from tests.runs.late_writes import late_writes

POLL_S = 0.1
"""Listing all processes takes some milliseconds of CPU time, which the run itself needs."""
BEAT_S = 1.0
LEASE_S = 4.0
OVER: dict[str, Any] = {
    "max_staleness": 1,
    "service": {"enabled": True},
    "checkpoint": {"every": 5},
    "liveness": {
        "beat_s": BEAT_S,
        "lease_s": LEASE_S,
        "start_timeout_s": 120.0,
        "stop_timeout_s": 20.0,
        # With --all, most groups restart from processes that were started ahead.
        "start_ahead_s": 1.0 if ALL else 0.0,
    },
    "actor": {"parallel": {"data": 2}},
    "rollout": {"replicas": 2},
    "slurm": {"time": "60", "signal_s": 60},
    # Options that relax_hpc writes; some are replaced and some removed, as sites need it.
    "site": {
        "options": {"exclusive": "", "ntasks-per-node": None, "open-mode": "truncate"},
        "srun_options": {"wait": "60", "mem": None},
    },
    # Each process has a node, so that the loss of a node concerns one group.
    "groups": {
        "reference": None,
        "hub": {"resources": {"nodes": 2}},
        "rollout": {"resources": {"nodes": 2}},
        "actor": {"resources": {"nodes": 2}},
    },
}
"""Overrides of SMALL: seven nodes, two ranks of the actor, two engines on two nodes."""
JOBS: dict[str, Any] = {"groups": {"hub": {"resources": {"nodes": 1}}}}
TWO_GROUPS: dict[str, Any] = {"actor": {"forward": ["actor_fwd"]}, "groups": {"actor_fwd": None}}
"""Groups in addition to the hub, for tests of a run's end or processes and not of its roles."""
GROUPS = {
    "hub": ("controller", "advantages"),
    "rollout": ("rollout",),
    "actor": ("actor",),
    "actor_fwd": ("actor_fwd",),
}
START_S = 180.0
"""Limit of a wait that usually takes seconds: a busy machine can pause for a minute."""
PACE_S = 1.0
"""Duration of a response of the simulated engine. A step takes 0.16 CPU seconds, so that a run
leaves most CPU time to processes that start."""
ENDLESS = 2000
"""More steps than a test has time for. `SlurmRun.finish_soon` finishes such a run."""
ENGINE_START_S = 180.0
UNFINISHED: dict[str, tuple[str, str]] = {
    "weight publish": ("weights", ".i*"),
    "checkpoint": ("checkpoints", ".i*.partial"),
}
"""Folder of a run, and the pattern of files that exist in it only during that work."""
JOURNALED: dict[str, bytes] = {
    "generation": msgpack.packb("op") + msgpack.packb("admit"),
    "training": msgpack.packb("task") + msgpack.packb("actor"),
}
"""Bytes of the journal record that starts that work."""


@dataclass(slots=True)
class SlurmRun:
    """A run that was submitted to `sandbox`."""

    sandbox: Sandbox
    run: RunDir
    jobs: list[str]
    layout: str
    engine: str
    patience_s: float = START_S
    """How long training may pause while a group restarts."""
    broken: str = ""
    """The event that did not happen in time. Later tests with this run prove nothing."""
    faults: list[str] = field(default_factory=list)
    """Faults after which training continued; the audit has not confirmed them yet."""

    # -- waiting -----------------------------------------------------------------------------------

    def wait_until(self, condition: Callable[[], Any], event: str, seconds: float) -> Any:
        """Return the first true value of `condition`. Raise AssertionError at the deadline."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if value := condition():
                return value
            # An interval of polling. The condition or the deadline ends the wait.
            time.sleep(POLL_S)
        self.broken = event
        raise AssertionError(f"{event}: not within {seconds} s\n{self.story()}")

    def step(self) -> int:
        """The newest training step in the metrics; -1 before the first."""
        return max(
            (row["step"] for row in read_metrics(self.run.root) if "reward/mean" in row), default=-1
        )

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: self.step() >= step, f"step {step} trained", self.patience_s)

    def train_steps(self, steps: int = 2) -> None:
        """Wait until the run has trained `steps` more steps."""
        self.wait_for_step(self.step() + steps)

    def finish(self) -> None:
        """Wait until the run has finished, its jobs and processes have ended; audit it."""
        self.wait_until(self.run.finished.exists, "the run finished", self.patience_s)
        self.wait_until(lambda: not self.queued(), "its jobs left the queue", 60.0)
        self.wait_until(lambda: not self.processes(), "its processes are gone", 30.0)
        assert [row["step"] for row in trained_steps(self.run)] == list(
            range(self.status()["steps"])
        )
        problems = [*audit(self.run).problems, *late_writes(self.run)]
        assert not problems, problems

    def stop(self) -> None:
        """Stop the run as a user does. Only saved files may remain."""
        assert "is saved in" in self.call("stop")
        self.assert_nothing_left()

    def cancel(self) -> None:
        """Cancel the hub's job with scancel. All other groups need the hub, so the run must end."""
        job = self.job("hub")
        self.sandbox.client("scancel", job)
        stop_request = self.wait_until(lambda: read_stop_request(self.run), "it stops", START_S)
        assert stop_request == {"code": 0, "reason": f"job {job} was cancelled"}
        self.assert_nothing_left()

    def finish_soon(self, *options: str, steps: int = 8) -> None:
        """Stop an endless run, and resume it to finish after `steps` more steps.

        `options` are further options of the submission.
        """
        self.stop()
        last_step = self.step() + steps
        self.resume(last_step, *options)
        self.finish()
        assert self.status()["trained_steps"] == last_step
        self.assert_nothing_left()

    def resume(self, steps: int, *options: str) -> None:
        """Submit the run again as a user does, to finish at step `steps`."""
        options = (
            "--run_dir",
            str(self.run.root),
            "--resume",
            "--steps",
            str(steps),
            "--parsable",
            *options,
        )
        self.jobs = _call(self.sandbox, "submit", *options).split()

    # -- observing ---------------------------------------------------------------------------------

    def queued(self) -> str:
        """Output of squeue; empty if no job is left."""
        return self.sandbox.client("squeue", "--noheader", "--format=%i %j %t %D %N %r").strip()

    def call(self, verb: str, *arguments: str) -> str:
        """Run a command on the run, which must succeed, and return its output."""
        return _call(self.sandbox, verb, str(self.run.root), *arguments)

    def last_value(self, tag: str) -> float | None:
        """Newest value of a metric; None: there is none."""
        values = [row[tag] for row in read_metrics(self.run.root) if tag in row]
        return values[-1] if values else None

    def status(self) -> dict[str, Any]:
        return status(self.run)

    def beats(self) -> dict[str, dict[str, Any]]:
        """The hub's record of every role: incarnation, and longest gap between its beats in seconds
        of the role's clock."""
        return self.wait_until(lambda: self.status().get("beats"), "the hub answers", 60.0)

    def processes(self, role: str = "", group: str = "") -> list[psutil.Process]:
        """Processes of the run in the order of ranks.

        With `role`, only processes that work for the role, without their watchers.
        """
        return sorted(
            (process for process in all_processes() if self._is(process, role, group)),
            key=lambda process: (int(environment(process).get("SLURM_PROCID", 0)), process.pid),
        )

    def _is(self, process: psutil.Process, role: str, group: str) -> bool:
        try:
            command = process.cmdline()
            if str(self.run.root) not in command or process.status() == psutil.STATUS_ZOMBIE:
                return False
            if not role:
                return True
            if command[-1:] == [role] or f"--role {role} " not in " ".join(command) + " ":
                return False
            of_group = not group or f"--group {group} " in " ".join(command)
            of_group = of_group and not waits(self.run, process)
            return (
                of_group
                and command[0] != "srun"
                and (process.parent().cmdline() == command) == ("--watch" in command)
            )
        except (psutil.Error, AttributeError):
            return False

    def supervisors(self) -> list[psutil.Process]:
        """Working head processes, without their watchers."""
        heads = [
            process
            for process in self.processes()
            if "relax_hpc.commands.head" in command_line(process)
        ]
        return [
            process
            for process in heads
            if process.parent() and command_line(process.parent()) == command_line(process)
        ]

    def incarnations(self, group: str) -> int:
        """Incarnations of `group` so far."""
        return len(list(self.run.rendezvous(group).glob("inc-*.launch.json")))

    def newest(self, group: str) -> int:
        """Number of the newest incarnation of `group`. Unused incarnations that were started ahead
        have numbers too."""
        return max(
            int(path.name[4:10]) for path in self.run.rendezvous(group).glob("inc-*.launch.json")
        )

    def job(self, group: str) -> str:
        """Id of the job, or of the component of a heterogeneous job, that runs `group`."""
        return current_job(self.run, group)

    def mark(self, group: str, incarnation: int, role: str) -> dict[str, Any]:
        """Exit record of a role; empty if the role wrote none."""
        return read_mark(self.run, group, incarnation, role)

    def log(self) -> str:
        """Logs of the run's supervisors."""
        return "".join(path.read_text() for path in sorted((self.run.root / "logs").glob("s*.log")))

    def assert_trained_once(self) -> None:
        """Assert that no row is trained twice and no late write of an old incarnation accepted."""
        unfinished_run = ("trained 0 times", "beyond the last step", "events.jsonl has")
        problems = late_writes(self.run)
        for text in audit(self.run).problems:
            if not any(excuse in text for excuse in unfinished_run):
                problems.append(text)
        assert not problems, f"{problems}\n{self.story()}"

    def assert_nothing_left(self) -> None:
        """Assert that no job, process, staged weights or socket of the run exists."""
        self.wait_until(lambda: not self.queued(), "its jobs left the queue", 60.0)
        self.wait_until(lambda: not self.processes(), "its processes are gone", 30.0)
        assert not staging_root(self.run).exists(), list(staging_root(self.run).iterdir())
        assert not [path for path in self.run.root.rglob("*") if path.is_socket()]

    def nodes_of(self, role: str) -> list[str]:
        return [environment(process)["SLURMD_NODENAME"] for process in self.processes(role)]

    def lease_holder(self, name: str = "supervisor") -> dict[str, Any]:
        """Node, pid and incarnation of the current holder of a lease."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.run.rendezvous(name) / "lease").read_text())
        return {}

    def story(self) -> str:
        """Queue, processes and the ends of all logs, for the message of a failure."""
        logs = sorted(
            path for path in (self.run.root / "logs").rglob("*.log") if path.stat().st_size
        )
        texts = [f"--- {path.relative_to(self.run.root)}\n{log_end(path)}" for path in logs]
        alive = [describe_process(process) for process in self.processes()]
        return "\n".join(
            [f"{self.run.root}, queue:\n{self.queued()}", "processes:", *alive, *texts]
        )

    # -- faults ------------------------------------------------------------------------------------

    @contextmanager
    def only(self, group: str, fault: str, steps: int = 2) -> Iterator[None]:
        """Assert that `fault`, which the block causes, restarts `group` and no other group.

        Processes of other groups stay the same. A gap between two of their beats is at most twice
        the interval of beats.
        """
        self.wait_until(lambda: all(self._members().values()), "all roles run", START_S)
        incarnations = self.incarnations(group)
        with self.no_group_restarts(fault, except_group=group, steps=steps):
            yield
            self.wait_until(
                lambda: self.incarnations(group) > incarnations,
                f"{group} has a new incarnation",
                90.0,
            )

    @contextmanager
    def no_group_restarts(
        self, fault: str, except_group: str = "", steps: int = 2
    ) -> Iterator[None]:
        """Assert that training continues after the block, with the same processes and no late beat.

        The group `except_group` is not checked.
        """
        pids_before, gaps_before = self._members(), self._gaps(except_group)
        yield
        self.train_steps(steps)
        pids_after = self._members()
        restarted_roles = [
            role
            for role in pids_before
            if role not in GROUPS.get(except_group, ()) and pids_before[role] != pids_after[role]
        ]
        assert not restarted_roles, (
            f"{restarted_roles} restarted after a fault of {except_group or 'Slurm'}\n"
            f"{self.story()}"
        )
        late = {
            name: gap
            for name, gap in self._gaps(except_group).items()
            if gap > max(2 * BEAT_S, gaps_before.get(name, 0.0))
        }
        assert not late, f"beats of other groups paused: {late}\n{self.story()}"
        self.survived(fault)

    def _gaps(self, except_group: str) -> dict[str, float]:
        """Longest gap between beats of each process, in seconds, without the hub and one group."""
        return {
            name: beat["gap_s"]
            for name, beat in self.beats().items()
            if beat["group"] not in (except_group, "hub")
        }

    def survived(self, fault: str) -> None:
        """Record `fault` for the audit.

        The audit takes a CPU second. It runs at the end, or immediately with env/test.sh --all.
        """
        self.faults.append(fault)
        if ALL:
            self.audited()

    def audited(self) -> None:
        """Audit the run, then add the recorded faults to the table of survived faults."""
        self.assert_trained_once()
        for fault in self.faults:
            fault_table.add(fault, self.layout, self.engine)
        self.faults.clear()

    def _members(self) -> dict[str, list[int]]:
        """Pids by role."""
        run_processes = self.processes()
        members: dict[str, list[int]] = {}
        for role in chain.from_iterable(GROUPS.values()):
            members[role] = [
                process.pid for process in run_processes if self._is(process, role, "")
            ]
        return members

    def at(self, moment: str) -> None:
        """Wait until the run is doing the work `moment` (UNFINISHED, JOURNALED)."""
        begun, deadline = self._work_started(moment), time.monotonic() + START_S
        while not begun():
            # The work takes milliseconds, so this loop must not sleep.
            assert time.monotonic() < deadline, f"no {moment} within {START_S} s\n{self.story()}"

    def _work_started(self, moment: str) -> Callable[[], bool]:
        if moment in UNFINISHED:
            folder, pattern = UNFINISHED[moment]
            return lambda: any((self.run.root / folder).glob(pattern))
        journal = max(self.run.journal.glob("*.journal"))
        former = journal.read_bytes().count(JOURNALED[moment])
        return lambda: journal.read_bytes().count(JOURNALED[moment]) > former

    def kill(self, role: str, rank: int = 0, moment: str = "") -> None:
        """SIGKILL to one rank of a role."""
        victim = self.wait_until(lambda: self.processes(role)[rank:], f"{role} runs", START_S)[0]
        if moment:
            self.at(moment)
        victim.kill()
        psutil.wait_procs([victim], timeout=10.0)

    def lose_and_bring_back(self, *nodes: str) -> None:
        """Cut the power of all `nodes`, set them down in Slurm, then start them again."""
        for node in nodes:
            self.sandbox.kill_node(node, down=True)
        for node in nodes:
            self.sandbox.start_node(node)

    @contextmanager
    def frozen(self, node: str) -> Iterator[None]:
        """Suspend all jobs on `node` and their slurmstepd in the block, so that Slurm cannot end
        them."""
        folder = self.sandbox.folder
        stopped_processes = processes.families(
            [*processes.steps(folder, node), *processes.tasks(folder, node)]
        )
        processes.freeze(stopped_processes)
        try:
            yield
        finally:
            for process in stopped_processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()

    def restart_slurm(self) -> None:
        """Kill and restart slurmctld and every slurmd after slurmctld has saved its jobs."""
        started = self.sandbox.client(
            "squeue", "--noheader", "--state=RUNNING", "--format=%S"
        ).split()
        newest = max(datetime.fromisoformat(text).timestamp() for text in started)
        saved = self.sandbox.folder / "state" / "job_state"
        self.wait_until(
            lambda: saved.stat().st_mtime > newest + 1.0, "slurmctld has saved its state", START_S
        )
        self.sandbox.restart()

    def await_new_supervisor(self, incarnation: int, name: str = "supervisor") -> None:
        """Wait until a supervisor with a later incarnation than `incarnation` holds the lease."""
        self.wait_until(
            lambda: self.lease_holder(name).get("incarnation", 0) > incarnation,
            "a new supervisor",
            START_S,
        )

    def cancel_all(self) -> str:
        """Cancel all jobs in the queue and return its former content.

        Callers repeat this until the queue is empty, because the end of a job can start another.
        """
        queued = self.queued()
        jobs = {
            line.split()[0].partition("+")[0]
            for line in queued.splitlines()
            if line.split()[2] != "CG"
        }
        if jobs:
            self.sandbox.client("scancel", *sorted(jobs), check=False)
        return queued

    def signal_job(self, job: str, moment: str = "") -> None:
        """Send the signal that Slurm sends some time before a job's time limit."""
        if moment:
            self.at(moment)
        # For a heterogeneous job scancel signals the remaining components, and reports an error for
        # components that have ended.
        self.sandbox.client("scancel", "--batch", "--signal=USR2", job, check=False)


def kill_fault(role: str, moment: str = "") -> str:
    """Name of the fault that kills a rank of `role`."""
    return f"kill -9 of a rank of {role}" + (f" during a {moment}" if moment else "")


def _call(sandbox: Sandbox, *arguments: str) -> str:
    """Run `relax-hpc`, which must succeed, and return its standard output."""
    result = subprocess.run(
        [sys.executable, "-m", "relax_hpc", *arguments],
        capture_output=True,
        text=True,
        # Longer than any command waits, so that the command can report its own timeout.
        timeout=180,
        env=os.environ | sandbox.environment(),
        check=False,
    )
    assert result.returncode == 0, (
        f"relax-hpc {' '.join(arguments)}: exit {result.returncode}\n"
        f"{result.stdout}\n{result.stderr}"
    )
    return result.stdout


def _model(sandbox: Sandbox) -> Path:
    """Write a model that SGLang can serve too.

    A run that writes its own model takes three seconds more to start.
    """
    directory = sandbox.folder / "model"
    make_tiny_model(
        directory, TinyModelConfig(**with_engine("sglang")["model"]["tiny"]), SMALL["seed"]
    )
    return directory


@contextmanager
def submitted(
    sandbox: Sandbox,
    directory: Path,
    layout: str,
    overrides: dict[str, Any] | None = None,
    engine: str = "simulated",
) -> Iterator[SlurmRun]:
    """Submit a run of SMALL, OVER and `overrides` in `layout`.

    Jobs and processes of the run end with the block.
    """
    # Only the seeded engine `transformers` makes runs comparable.
    engine = engine if engine == "transformers" else engine_of(engine)
    simulated = {
        "model": {"path": str(_model(sandbox))},
        "rollout": {"engine": {"simulated": {"response_s": PACE_S}}},
    }
    engines = (with_engine(engine), simulated if engine == "simulated" else {})
    sections = (JOBS if layout == "jobs" else {}, *engines, overrides or {})
    config = write_config(directory / "run.yaml", reduce(merged, sections, OVER))
    root = directory / "run"
    files = [
        "--config",
        str(sandbox.site),
        "--config",
        str(config),
        "--run_dir",
        str(root),
        "--layout",
        layout,
    ]
    jobs = _call(sandbox, "submit", *files, "--parsable").split()
    patience_s = START_S if engine == "simulated" else ENGINE_START_S
    live = SlurmRun(sandbox, RunDir(root), jobs, layout, engine, patience_s)
    try:
        yield live
        if not live.broken:
            live.audited()
    finally:
        # The next test needs slurmctld and all nodes.
        sandbox.start()
        live.wait_until(lambda: not live.cancel_all(), "its jobs left the queue", 60.0)
        processes.kill(live.processes())
