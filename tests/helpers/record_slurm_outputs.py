"""Records what Slurm's commands print in every state of a job that the project reads:

    python -m tests.helpers.record_slurm_outputs PREFIX > tests/cluster/slurm_outputs/VERSION.json

PREFIX: a Slurm that was built from source; an empty argument takes the one on PATH. It starts a
sandbox, runs jobs that end in different ways, and takes about two minutes. A file of answers names
its source and the command behind each answer.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from relax_hpc.cluster.sandbox import Options, Sandbox, cluster
from relax_hpc.cluster.sandbox.processes import until
from relax_hpc.cluster.slurm import commands
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError, SlurmJob

_WAIT_S = 90.0
_OPTIONS = Options(
    nodes=6,
    slurmd_timeout=10,
    kill_wait=4,
    cred_expire=5,
    extra=(
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "PartitionName=urgent Nodes=ALL PriorityTier=9",
        "SlurmctldParameters=enable_expedited_requeue",
    ),
)
HET = """\
#SBATCH --job-name=hub-run --nodes=2 --ntasks-per-node=1 --no-requeue --no-kill
#SBATCH hetjob
#SBATCH --job-name=actor-run --nodes=2 --ntasks-per-node=2
#SBATCH hetjob
#SBATCH --job-name=rollout-run --nodes=1 --ntasks-per-node=1 --gpus-per-node=1
env > batch.env
srun --het-group=1 --overlap --mem=0 --nodes=1 --ntasks=1 env > task.env
srun --het-group=1 --overlap --mem=0 --job-name=actor.actor.i000001 sleep 300 &
srun --het-group=2 --overlap --mem=0 --job-name=rollout.rollout.i000001 sleep 300 &
touch ready
wait
"""
STUBBORN = "trap '' TERM; touch ready; while :; do sleep 1; done"
"""A batch script that outlives SIGTERM, so that its job is COMPLETING for KillWait."""


class Recorder:
    """Stores the answers of Slurm's commands by the names of situations. ``sandbox``: its folder
    and its host are replaced by other words in the answers."""

    def __init__(self, sandbox: Sandbox, scratch: Path) -> None:
        self.sandbox, self.scratch, self.slurm = sandbox, scratch, Slurm()
        self.answers: dict[str, dict[str, Any]] = {}
        self._situation = ""
        self._run_program = commands.run_program
        commands.run_program = self._run_and_store

    def store(self, situation: str, ask: Callable[[], object]) -> object:
        """Call ``ask`` and store the answer of the command that it starts."""
        self._situation = situation
        try:
            return ask()
        except SlurmError as error:
            return error
        finally:
            self._situation = ""

    def submit(self, text: str, *options: str) -> str:
        """Submit a batch script in a new folder and wait until it has created the file `ready`."""
        folder = Path(tempfile.mkdtemp(dir=self.scratch))
        script = folder / "job.sh"
        script.write_text(f"#!/bin/bash\n{text}\n")
        job = self.slurm.submit(script, f"--chdir={folder}", "--output=%j.out", *options)
        if "touch ready" in text:
            until((folder / "ready").exists, _WAIT_S, f"job {job} does not start")
        return job

    def folder(self, job: str) -> Path:
        """Folder of a job."""
        return Path(self.slurm.describe(job)["WorkDir"])

    def await_state(self, job: str, *states: str) -> None:
        """Wait until a job is in one of these states."""

        def has_state() -> bool:
            return self.slurm.describe(job).get("JobState", "") in states

        until(has_state, _WAIT_S, f"job {job} is not {' or '.join(states)}")

    def _run_and_store(
        self, argv: Any, timeout_s: float, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        done = self._run_program(argv, timeout_s, environment)
        if self._situation:
            self.answers[self._situation] = {
                "command": [self._clean(word) for word in argv],
                "code": done.returncode,
                "stdout": self._clean(done.stdout),
                "stderr": self._clean(done.stderr),
            }
        return done

    def _clean(self, text: str) -> str:
        names = {
            str(self.scratch): "/home/user",
            str(self.sandbox.folder): "/sandbox",
            self.sandbox.options.slurm or "no prefix": "/opt/slurm",
            socket.gethostname(): "login1",
            str(Path.cwd()): "/work",
        }
        for name, replacement in names.items():
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", replacement, text)
        return text


def record(recorder: Recorder) -> dict[str, Any]:
    """Bring jobs into all states. Returns the SLURM_ variables of a batch script and of a task."""
    slurm = recorder.slurm
    limited = recorder.submit(STUBBORN, "--time=1", "--job-name=limited")
    _record_cluster(recorder)
    variables = _record_het(recorder)
    _record_waiting(recorder)
    _record_endings(recorder)
    recorder.await_state(limited, "COMPLETING", "TIMEOUT")
    recorder.store("time limit", lambda: slurm.describe(limited))
    recorder.await_state(limited, "TIMEOUT")
    recorder.store("time limit, afterwards", lambda: slurm.describe(limited))
    _record_lost_node(recorder)
    _record_errors(recorder)
    return variables


def _record_cluster(recorder: Recorder) -> None:
    slurm = recorder.slurm
    for situation, ask in {
        "version": slurm.version,
        "config": slurm.config,
        "partitions": slurm.partitions,
        "nodes": slurm.nodes,
        "mpi plugins": slurm.mpi_plugins,
        "hostnames": lambda: slurm.hostnames("node[1-3,5]"),
    }.items():
        recorder.store(situation, ask)


def _record_het(recorder: Recorder) -> dict[str, Any]:
    slurm = recorder.slurm
    leader = recorder.submit(HET)
    component = str(int(leader) + 1)

    def runs(name: str, job: str) -> bool:
        return name in slurm.steps(job).values()

    until(lambda: runs("actor.actor.i000001", component), _WAIT_S, "the step does not start")
    folder = recorder.folder(leader)
    variables = {name: _slurm_variables(folder / f"{name}.env") for name in ("batch", "task")}
    recorder.store("het, components", lambda: slurm.jobs(leader, components=True))
    recorder.store("het, described", lambda: slurm.describe(component))
    recorder.store("het, steps", lambda: slurm.steps(component))
    recorder.store("own jobs", slurm.own_jobs)
    slurm.cancel(component)
    recorder.await_state(component, "CANCELLED")
    recorder.store("het, component cancelled", lambda: slurm.describe(component))
    recorder.store("het, others", lambda: slurm.jobs(leader, components=True))
    slurm.cancel(leader)
    recorder.await_state(leader, "CANCELLED")
    return variables


def _slurm_variables(path: Path) -> dict[str, str]:
    lines = path.read_text().splitlines()
    pairs = dict(line.split("=", 1) for line in lines if line.startswith("SLURM"))
    private = ("SLURM_SUBMIT_DIR", "SLURM_CONF", "SLURM_SUBMIT_HOST", "SLURM_TOPOLOGY_ADDR")
    return {
        name: "" if name in private or "HOST" in name or "ADDR" in name else value
        for name, value in sorted(pairs.items())
    }


def _record_waiting(recorder: Recorder) -> None:
    """Jobs that wait: held, for ever, for another job, after a requeue."""
    slurm = recorder.slurm
    done = recorder.submit("touch ready")
    recorder.await_state(done, "COMPLETED")
    never = recorder.submit("true", f"--dependency=afternotok:{done}")

    def job(number: str) -> Callable[[], dict[str, SlurmJob]]:
        return lambda: slurm.jobs(number)

    until(
        lambda: slurm.jobs(never)[never].reason == "DependencyNeverSatisfied", _WAIT_S, "dependency"
    )
    recorder.store("never starts", job(never))
    held = recorder.submit("true", "--hold")
    recorder.store("held", job(held))
    for number in (never, held):
        slurm.cancel(number)
    requeued = recorder.submit("touch ready; sleep 300", "--requeue", "--job-name=a|b c")
    recorder.store("requeue accepted", lambda: slurm.requeue(requeued))
    recorder.store("requeue", lambda: slurm.describe(requeued))
    recorder.await_state(requeued, "PENDING")
    recorder.store("requeue, afterwards", lambda: slurm.describe(requeued))
    recorder.store("requeued job", job(requeued))
    slurm.cancel(requeued)


def _record_endings(recorder: Recorder) -> None:
    """Jobs that end: cancelled, failed, killed, preempted."""
    slurm = recorder.slurm
    cancelled = recorder.submit(STUBBORN)
    slurm.cancel(cancelled)
    recorder.store("scancel", lambda: slurm.describe(cancelled))
    recorder.store("scancel, in squeue", lambda: slurm.jobs(cancelled))
    recorder.await_state(cancelled, "CANCELLED")
    recorder.store("scancel, afterwards", lambda: slurm.describe(cancelled))
    recorder.store("scancel again", lambda: slurm.cancel(cancelled))
    failed = recorder.submit("touch ready; exit 75")
    recorder.await_state(failed, "FAILED")
    recorder.store("exit 75, afterwards", lambda: slurm.describe(failed))
    killed = recorder.submit("touch ready; kill -9 $$")
    recorder.await_state(killed, "FAILED")
    recorder.store("killed script, afterwards", lambda: slurm.describe(killed))
    urgent = ("srun", "--partition=urgent", "--exclusive", "--nodelist=node6", "true")
    recorder.sandbox.client("scontrol", "update", "PartitionName=main", "GraceTime=20")
    preempted = recorder.submit("touch ready; exec sleep 300", "--nodelist=node6", "--requeue")
    with suppress(subprocess.TimeoutExpired):
        waiting = subprocess.Popen(
            urgent, env=recorder.sandbox.environment(), stdin=subprocess.DEVNULL
        )
        until(lambda: slurm.is_preempted(preempted), _WAIT_S, "no preemption")
        recorder.store("preemption", lambda: slurm.describe(preempted))
        slurm.cancel(preempted)
        waiting.wait(timeout=_WAIT_S)
    recorder.sandbox.client("scontrol", "update", "PartitionName=main", "GraceTime=0")


def _record_lost_node(recorder: Recorder) -> None:
    slurm, sandbox = recorder.slurm, recorder.sandbox
    job = recorder.submit("touch ready; exec sleep 300", "--nodelist=node5", "--no-requeue")
    sandbox.kill_node("node5", down=True)
    recorder.await_state(job, "NODE_FAIL", "COMPLETING")
    recorder.store("loss of a node", lambda: slurm.describe(job))
    recorder.store("nodes, one down", slurm.nodes)
    sandbox.start_node("node5", rebooted=True)
    recorder.await_state(job, "NODE_FAIL")
    recorder.store("loss of a node, afterwards", lambda: slurm.describe(job))


def _record_errors(recorder: Recorder) -> None:
    slurm = recorder.slurm
    slurm.tries = 1
    script = recorder.scratch / "job.sh"
    script.write_text("#!/bin/bash\ntrue\n")
    recorder.store("unknown job in squeue", lambda: slurm.jobs("99999999"))
    recorder.store("unknown job in scontrol", lambda: slurm.describe("99999999"))
    recorder.store("unknown job in scancel", lambda: slurm.cancel("99999999"))
    recorder.store("steps of an unknown job", lambda: slurm.steps("99999999"))
    recorder.store("unknown partition", lambda: slurm.submit(script, "--partition=none"))
    recorder.store("test only", lambda: slurm.test_only(script))
    recorder.store("expedite", lambda: slurm.test_only(script, "--requeue=expedite"))
    recorder.store("unknown option", lambda: slurm.test_only(script, "--no-such-option"))
    recorder.store("accounting", slurm.associations)
    recorder.sandbox.stop_controller()
    recorder.store("no controller", slurm.own_jobs)
    recorder.store("no controller for sbatch", lambda: slurm.submit(script))


def main(prefix: str) -> int:
    """Print the answers of the Slurm in ``prefix`` as JSON."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        folder = Path(name).resolve()
        scratch = folder / "jobs"
        scratch.mkdir()
        sandbox = cluster.up(folder / "c", replace_prefix(prefix))
        os.environ.update(sandbox.environment())
        try:
            recorder = Recorder(sandbox, scratch)
            variables = record(recorder)
        finally:
            cluster.down(sandbox.folder)
        source = "a build from source" if prefix else "the package of the system"
        table = {
            "source": f"Slurm {sandbox.installation.version()}, {source}, in relax-hpc's sandbox; "
            "recorded by tests/helpers/record_slurm_outputs.py",
            "variables": variables,
            "answers": recorder.answers,
        }
    print(json.dumps(table, indent=1, sort_keys=True))
    return 0


def replace_prefix(prefix: str) -> Options:
    """Options of the sandbox with the Slurm in ``prefix``."""
    from dataclasses import replace

    return replace(_OPTIONS, slurm=prefix)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
