"""Whole runs on the sandbox's Slurm for tests: submit one as a user does, watch it, break it, audit
what it left.

Nothing here sleeps for a fixed time: every wait ends with its condition, or at a deadline with the
run's story.
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
"""A look at all processes takes some milliseconds, which the run itself needs."""
BEAT_S = 1.0
LEASE_S = 4.0
OVER: dict[str, Any] = {
    "max_staleness": 1,
    "checkpoint": {"every": 5},
    "liveness": {
        "beat_s": BEAT_S,
        "lease_s": LEASE_S,
        "start_timeout_s": 120.0,
        "stop_timeout_s": 20.0,
        # Where every fault is tried, most groups come back from what waits.
        "start_ahead_s": 1.0 if ALL else 0.0,
    },
    "actor": {"parallel": {"data": 2}},
    "rollout": {"replicas": 2},
    "slurm": {"time": "60", "signal_s": 60},
    # A node for each, so that the death of one concerns one group.
    # Options that relax_hpc writes, some replaced and some removed, as sites need it.
    "site": {
        "options": {"exclusive": "", "ntasks-per-node": None, "open-mode": "truncate"},
        "srun_options": {"wait": "60", "mem": None},
    },
    "groups": {
        "reference": None,
        "hub": {"resources": {"nodes": 2}},
        "rollout": {"resources": {"nodes": 2}},
        "actor": {"resources": {"nodes": 2}},
    },
}
"""Over SMALL: seven nodes, two ranks of the actor, two engines on two nodes."""
JOBS: dict[str, Any] = {"groups": {"hub": {"resources": {"nodes": 1}}}}
TWO_GROUPS: dict[str, Any] = {"actor": {"forward": ["actor_fwd"]}, "groups": {"actor_fwd": None}}
"""Beside the hub; for a run whose end or whose processes are looked at, not its roles."""
GROUPS = {
    "hub": ("controller", "advantages"),
    "rollout": ("rollout",),
    "actor": ("actor",),
    "actor_fwd": ("actor_fwd",),
}
START_S = 180.0
"""Patience of a wait that takes seconds, as a busy machine may stand still for a minute."""
PACE_S = 1.0
"""Seconds of a response of the simulated engine. A step takes 0.16 CPU seconds, so a run that is
only watched leaves the processors to starting processes."""
ENDLESS = 2000
"""More steps than a test has time for; `SlurmRun.finish_soon` ends such a run."""
ENGINE_START_S = 180.0
UNFINISHED: dict[str, tuple[str, str]] = {
    "weight publish": ("weights", ".i*"),
    "checkpoint": ("checkpoints", ".i*.partial"),
}
"""A folder of the run, and what lies in it for just as long as the run is at that."""
JOURNALED: dict[str, bytes] = {
    "generation": msgpack.packb("op") + msgpack.packb("admit"),
    "training": msgpack.packb("task") + msgpack.packb("actor"),
}
"""With what record of the journal that begins."""


@dataclass(slots=True)
class SlurmRun:
    """A run that was submitted to `sandbox`."""

    sandbox: Sandbox
    run: RunDir
    jobs: list[str]
    layout: str
    engine: str
    patience_s: float = START_S
    """How long training may pause while a group starts again."""
    broken: str = ""
    """What did not come of it in time; whatever else is tried with it says nothing any more."""
    faults: list[str] = field(default_factory=list)
    """What it has survived by its own account, which the audit has yet to confirm."""

    # -- waiting -----------------------------------------------------------------------------------

    def wait_until(self, condition: Callable[[], Any], what: str, seconds: float) -> Any:
        """The first true value of `condition`. AssertionError, with the run's story, at the
        deadline."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if value := condition():
                return value
            # Between two looks; what ends the wait is the condition or the deadline.
            time.sleep(POLL_S)
        self.broken = what
        raise AssertionError(f"{what}: not within {seconds} s\n{self.story()}")

    def step(self) -> int:
        """The newest training step in the metrics; -1 before the first."""
        return max(
            (row["step"] for row in read_metrics(self.run.root) if "reward/mean" in row), default=-1
        )

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: self.step() >= step, f"step {step} trained", self.patience_s)

    def goes_on(self, steps: int = 2) -> None:
        """Some more steps are trained."""
        self.wait_for_step(self.step() + steps)

    def finish(self) -> None:
        """The run comes to its end, and its jobs leave the queue with everything of theirs."""
        self.wait_until(self.run.finished.exists, "the run finished", self.patience_s)
        self.wait_until(lambda: not self.queued(), "its jobs left the queue", 60.0)
        self.wait_until(lambda: not self.processes(), "its processes are gone", 30.0)
        assert [row["step"] for row in trained_steps(self.run)] == list(
            range(self.status()["steps"])
        )
        problems = [*audit(self.run).problems, *late_writes(self.run)]
        assert not problems, problems

    def stop(self) -> None:
        """End it as a user does, which leaves nothing of it but what is saved."""
        assert "is saved in" in self.call("stop")
        self.assert_nothing_left()

    def cancel(self) -> None:
        """End it as users of Slurm do: after scancel of the hub's job, which all others need,
        nothing comes."""
        job = self.job("hub")
        self.sandbox.client("scancel", job)
        asked = self.wait_until(lambda: read_stop_request(self.run), "it stops", START_S)
        assert asked == {"code": 0, "reason": f"job {job} was cancelled"}
        self.assert_nothing_left()

    def finish_soon(self, *words: str, steps: int = 8) -> None:
        """Stop an endless run, and have it finish after some more steps; `words`: what else is to
        change then."""
        self.stop()
        more = self.step() + steps
        self.resume(more, *words)
        self.finish()
        assert self.status()["trained_steps"] == more
        self.assert_nothing_left()

    def resume(self, steps: int, *words: str) -> None:
        """Submit the run again as a user does, to end with `steps`."""
        words = (
            "--run_dir",
            str(self.run.root),
            "--resume",
            "--steps",
            str(steps),
            "--parsable",
            *words,
        )
        self.jobs = _call(self.sandbox, "submit", *words).split()

    # -- looking -----------------------------------------------------------------------------------

    def queued(self) -> str:
        """What squeue shows; empty when no job is left."""
        return self.sandbox.client("squeue", "--noheader", "--format=%i %j %t %D %N %r").strip()

    def call(self, verb: str, *words: str) -> str:
        """What a command about the run prints; it succeeds."""
        return _call(self.sandbox, verb, str(self.run.root), *words)

    def status(self) -> dict[str, Any]:
        return status(self.run)

    def beats(self) -> dict[str, dict[str, Any]]:
        """What the hub knows of every role: its incarnation, and the longest gap between its beats
        on its own clock."""
        return self.wait_until(lambda: self.status().get("beats"), "the hub answers", 60.0)

    def processes(self, role: str = "", group: str = "") -> list[psutil.Process]:
        """Processes of the run by rank; of a role: those that do its work, not those that watch
        them."""
        return sorted(
            (p for p in all_processes() if self._is(p, role, group)),
            key=lambda p: (int(environment(p).get("SLURM_PROCID", 0)), p.pid),
        )

    def _is(self, process: psutil.Process, role: str, group: str) -> bool:
        try:
            words = process.cmdline()
            if str(self.run.root) not in words or process.status() == psutil.STATUS_ZOMBIE:
                return False
            if not role:
                return True
            if words[-1:] == [role] or f"--role {role} " not in " ".join(words) + " ":
                return False
            of_group = not group or f"--group {group} " in " ".join(words)
            of_group = of_group and not waits(self.run, process)
            return (
                of_group
                and words[0] != "srun"
                and (process.parent().cmdline() == words) == ("--watch" in words)
            )
        except (psutil.Error, AttributeError):
            return False

    def supervisors(self) -> list[psutil.Process]:
        """Heads that do the work, not those that watch them."""
        heads = [p for p in self.processes() if "relax_hpc.commands.head" in command_line(p)]
        return [p for p in heads if p.parent() and command_line(p.parent()) == command_line(p)]

    def incarnations(self, group: str) -> int:
        """Incarnations of `group` so far."""
        return len(list(self.run.rendezvous(group).glob("inc-*.launch.json")))

    def newest(self, group: str) -> int:
        """Number of the newest incarnation of `group`; what was started ahead in vain has taken
        numbers too."""
        return max(
            int(path.name[4:10]) for path in self.run.rendezvous(group).glob("inc-*.launch.json")
        )

    def job(self, group: str) -> str:
        """Plain id of the job, or of the component, that holds a group."""
        return current_job(self.run, group)

    def mark(self, group: str, incarnation: int, role: str) -> dict[str, Any]:
        """How a role said that it ended; empty: it has said nothing."""
        return read_mark(self.run, group, incarnation, role)

    def log(self) -> str:
        """What the supervisors of the run have said."""
        return "".join(path.read_text() for path in sorted((self.run.root / "logs").glob("s*.log")))

    def assert_trained_once(self) -> None:
        """Nothing is trained twice and nothing of an ended incarnation was taken, as far as the run
        has got."""
        whole = ("trained 0 times", "beyond the last step", "events.jsonl has")
        found = [
            text for text in audit(self.run).problems if not any(words in text for words in whole)
        ]
        found += late_writes(self.run)
        assert not found, f"{found}\n{self.story()}"

    def assert_nothing_left(self) -> None:
        """No job, process, shared memory or socket of the run."""
        self.wait_until(lambda: not self.queued(), "its jobs left the queue", 60.0)
        self.wait_until(lambda: not self.processes(), "its processes are gone", 30.0)
        assert not staging_root(self.run).exists(), list(staging_root(self.run).iterdir())
        assert not [path for path in self.run.root.rglob("*") if path.is_socket()]

    def nodes_of(self, role: str) -> list[str]:
        return [environment(process)["SLURMD_NODENAME"] for process in self.processes(role)]

    def lease_holder(self, name: str = "supervisor") -> dict[str, Any]:
        """Who supervises now: node, pid, incarnation."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.run.rendezvous(name) / "lease").read_text())
        return {}

    def story(self) -> str:
        """The ends of all logs but their lines of progress, for a failure's message."""
        logs = sorted(
            path for path in (self.run.root / "logs").rglob("*.log") if path.stat().st_size
        )
        texts = [f"--- {path.relative_to(self.run.root)}\n{told(path)}" for path in logs]
        alive = [described(process) for process in self.processes()]
        return "\n".join(
            [f"{self.run.root}, queue:\n{self.queued()}", "processes:", *alive, *texts]
        )

    # -- breaking ----------------------------------------------------------------------------------

    @contextmanager
    def only(self, group: str, fault: str, steps: int = 2) -> Iterator[None]:
        """In the block `fault` breaks `group`: it comes back under a new incarnation, the others do
        not notice.

        Their processes stay the same, and no gap between two of their beats is over twice the beat.
        """
        self.wait_until(lambda: all(self._members().values()), "all roles run", START_S)
        incarnations = self.incarnations(group)
        with self.nobody_notices(fault, but=group, steps=steps):
            yield
            self.wait_until(
                lambda: self.incarnations(group) > incarnations,
                f"{group} has a new incarnation",
                90.0,
            )

    @contextmanager
    def nobody_notices(self, fault: str, but: str = "", steps: int = 2) -> Iterator[None]:
        """After the block training goes on, by the same processes, but those of one group, and no
        beat was late."""
        before, gaps = self._members(), self._gaps(but)
        yield
        self.goes_on(steps)
        after = self._members()
        touched = [
            role
            for role in before
            if role not in GROUPS.get(but, ()) and before[role] != after[role]
        ]
        assert not touched, (
            f"{touched} were touched by what happened to {but or 'Slurm'}\n{self.story()}"
        )
        late = {
            name: gap
            for name, gap in self._gaps(but).items()
            if gap > max(2 * BEAT_S, gaps.get(name, 0.0))
        }
        assert not late, f"beats of other groups paused: {late}\n{self.story()}"
        self.survived(fault)

    def _gaps(self, but: str) -> dict[str, float]:
        """The longest gap between two beats of each process so far, in seconds, but of one group
        and the hub."""
        return {
            name: beat["gap_s"]
            for name, beat in self.beats().items()
            if beat["group"] not in (but, "hub")
        }

    def survived(self, fault: str) -> None:
        """To be audited, which takes a second of a processor: at the end, or at once by env/test.sh
        --all."""
        self.faults.append(fault)
        if ALL:
            self.audited()

    def audited(self) -> None:
        """Of all that it survived nothing was trained twice, and nothing of what had ended was
        taken."""
        self.assert_trained_once()
        for fault in self.faults:
            fault_table.add(fault, self.layout, self.engine)
        self.faults.clear()

    def _members(self) -> dict[str, list[int]]:
        """Pids by role."""
        found = self.processes()
        roles = [role for roles in GROUPS.values() for role in roles]
        return {
            role: [process.pid for process in found if self._is(process, role, "")]
            for role in roles
        }

    def at(self, moment: str) -> None:
        """Wait until the run is in the middle of a piece of work (UNFINISHED, JOURNALED)."""
        begun, deadline = self._begun(moment), time.monotonic() + START_S
        while not begun():
            # Milliseconds long, so there is no time to sleep.
            assert time.monotonic() < deadline, f"no {moment} within {START_S} s\n{self.story()}"

    def _begun(self, moment: str) -> Callable[[], bool]:
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
        """Power loss of nodes, of which Slurm is told; all before the first comes back."""
        for node in nodes:
            self.sandbox.kill_node(node, down=True)
        for node in nodes:
            self.sandbox.start_node(node)

    @contextmanager
    def frozen(self, node: str) -> Iterator[None]:
        """In the block all jobs on `node` stand still, and so do their stepds: Slurm cannot end
        them either."""
        folder = self.sandbox.folder
        found = processes.families([*processes.steps(folder, node), *processes.tasks(folder, node)])
        processes.freeze(found)
        try:
            yield
        finally:
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()

    def restart_slurm(self) -> None:
        """slurmctld and every slurmd are killed and come again, once slurmctld has saved the jobs
        that it started."""
        started = self.sandbox.client(
            "squeue", "--noheader", "--state=RUNNING", "--format=%S"
        ).split()
        newest = max(datetime.fromisoformat(text).timestamp() for text in started)
        saved = self.sandbox.folder / "state" / "job_state"
        self.wait_until(
            lambda: saved.stat().st_mtime > newest + 1.0, "slurmctld has saved its state", START_S
        )
        self.sandbox.restart()

    def supervised_anew(self, incarnation: int, name: str = "supervisor") -> None:
        """Another supervisor than that of `incarnation` leads."""
        self.wait_until(
            lambda: self.lease_holder(name).get("incarnation", 0) > incarnation,
            "a new supervisor",
            START_S,
        )

    def cancel_all(self) -> str:
        """Cancel what is in the queue, again and again: the end of a job may start another. What
        there was."""
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
        """What Slurm does some time before a job's limit."""
        if moment:
            self.at(moment)
        # Of a heterogeneous job scancel signals what is left, and complains of components that have
        # gone.
        self.sandbox.client("scancel", "--batch", "--signal=USR2", job, check=False)


def killing(role: str, moment: str = "") -> str:
    """What a fault is called that kills a rank."""
    return f"kill -9 of a rank of {role}" + (f" during a {moment}" if moment else "")


def told(path: Path, lines: int = 25) -> str:
    """The last lines of a log."""
    found = [
        line
        for line in path.read_text(errors="replace").splitlines()
        if not line.startswith("eta ")
    ]
    return "\n".join(line[:300] for line in found[-lines:])


def environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def described(process: psutil.Process) -> str:
    """What a process is and whether it gets on: state, seconds of a processor, seconds since it
    began."""
    try:
        used, age = sum(process.cpu_times()[:2]), time.time() - process.create_time()
        return (
            f"{process.pid} {process.status()}, {used:.1f} of {age:.1f} s, "
            f"{' '.join(command_line(process))[:200]}"
        )
    except psutil.Error as error:
        return str(error)


def _call(sandbox: Sandbox, *words: str) -> str:
    """Standard output of `relax-hpc`."""
    done = subprocess.run(
        [sys.executable, "-m", "relax_hpc", *words],
        capture_output=True,
        text=True,
        # More than any command waits by itself, so that it can say what for.
        timeout=180,
        env=os.environ | sandbox.environment(),
        check=False,
    )
    assert done.returncode == 0, (
        f"relax-hpc {' '.join(words)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    )
    return done.stdout


def _model(sandbox: Sandbox) -> Path:
    """A model that SGLang can serve too, made once a sandbox: a run that makes its own takes three
    seconds more to start."""
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
    over: dict[str, Any] | None = None,
    engine: str = "simulated",
) -> Iterator[SlurmRun]:
    """Submit a run of SMALL, OVER and `over` in `layout`; its jobs and processes are ended when the
    block is left."""
    # Only the seeded one can be compared with another run.
    engine = engine if engine == "transformers" else engine_of(engine)
    simulated = {
        "model": {"path": str(_model(sandbox))},
        "rollout": {"engine": {"simulated": {"response_s": PACE_S}}},
    }
    engines = (with_engine(engine), simulated if engine == "simulated" else {})
    sections = (JOBS if layout == "jobs" else {}, *engines, over or {})
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
        # The next test finds all nodes up, and slurmctld too.
        sandbox.start()
        live.wait_until(lambda: not live.cancel_all(), "its jobs left the queue", 60.0)
        processes.kill(live.processes())
