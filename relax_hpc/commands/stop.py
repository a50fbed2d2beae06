"""`relax-hpc stop`: end a run in good order, and leave nothing of it behind."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Collection
from itertools import pairwise

import psutil

from relax_hpc.base.errors import EXIT_DONE, ConfigError, DeadlineError
from relax_hpc.base.path_errors import check_may_change
from relax_hpc.base.rundir import RunDir, check_owner
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError
from relax_hpc.cluster.slurm.job_lookup import ENDED, known_jobs, resume_command
from relax_hpc.cluster.slurm.submissions import Ledger
from relax_hpc.cluster.supervise.processes import kill_processes
from relax_hpc.cluster.supervise.requests import request_stop
from relax_hpc.config import Config, load_resolved
from relax_hpc.config.roles import RANKED
from relax_hpc.ops.observe.status import last_checkpoint, status

_LOOK_S = 1.0
_PHASES = 3
"""Phases of a stop: the actor, the others, the hub; each may take liveness.stop_timeout_s."""
_MARGIN_S = 30.0
_ANSWER_S = 1.0
_HURRY_S = 10.0
_COMPLETING_S = 15.0
"""Seconds for a job with dead nodes, which completes only when Slurm has given them up."""


def main(root: str, now: bool) -> int:
    """Stop a run and say what was saved; DeadlineError if something of it cannot be ended."""
    run = RunDir(root)
    if not run.config.exists():
        raise ConfigError(f"{run.root}: no run here (config.yaml is missing); name a run directory")
    check_may_change(run.root)
    # Its records name the jobs and processes that would be ended, which might be others of this
    # user.
    check_owner(run.root, "stop")
    config = load_resolved(run.root)
    if run.finished.exists():
        tell(f"{run.root}: finished already")
    elif not any(run.submit.glob("jobs/*.json")):
        _stop_processes(run, config, now)
    else:
        slurm = Slurm()
        here = config.layout == "local" and not _left(run, config, slurm)
        _stop_processes(run, config, now) if here else _stop_jobs(run, config, slurm, now)
    _say_what_is_saved(run, config)
    return EXIT_DONE


def _stop_jobs(run: RunDir, config: Config, slurm: Slurm, now: bool) -> None:
    """Stop the run's jobs, queued ones first, successors and spares before all: the end of a job
    must not start one."""
    kinds = {entry.job: entry.kind for entry in Ledger(run).entries()}
    try:
        queued = _left(run, config, slurm, ("PENDING",))
    except SlurmError:
        # The hub needs no Slurm to save and to end the run, and a successor that starts finds the
        # request.
        request_stop(run)
        tell(
            f"{run.root}: asked to stop, and saves; call stop again once Slurm answers, to "
            "withdraw what is queued"
        )
        raise
    for job in sorted(queued, key=lambda job: kinds.get(job) not in ("successor", "spare")):
        slurm.cancel(job)
        tell(f"withdrew job {job} ({kinds.get(job, 'component')})")
    request_stop(run)
    if not now:
        _wait(run, config, lambda: not _left(run, config, slurm))
    for job in _left(run, config, slurm):
        slurm.cancel(job)
        tell(f"ended job {job}")
    _until(time.monotonic() + _MARGIN_S, lambda: not _left(run, config, slurm))
    # Roles of a job that is completing still hold its memory, and the hub's place.
    _until(time.monotonic() + _COMPLETING_S, lambda: not known_jobs(run, config, slurm))
    if left := _left(run, config, slurm):
        raise DeadlineError(
            f"jobs {', '.join(left)} do not end; see scontrol show job {left[0]}, and run stop "
            "again"
        )


def _left(run: RunDir, config: Config, slurm: Slurm, states: Collection[str] = ()) -> list[str]:
    """Jobs of the run that hold nodes or may start; of a het job the leader alone, with which all
    of it ends."""
    jobs = {
        job.id: job for job in known_jobs(run, config, slurm).values() if job.state not in ENDED
    }
    whole = [job for job in jobs.values() if not job.het_offset or job.het_leader not in jobs]
    return [job.id for job in whole if not states or job.state in states]


def _stop_processes(run: RunDir, config: Config, now: bool) -> None:
    """A run of this machine: its supervisor ends it, with ``now`` at once, or dies, and its
    processes with it."""
    supervisor = _supervisor(run)
    if supervisor is None and not _answers(run):
        tell(f"{run.root}: nothing of it runs on this machine")
        return
    # Not by the marks of its roles: one that had to be killed leaves none.
    lives = (lambda: _alive(supervisor)) if supervisor else (lambda: _answers(run))
    request_stop(run, now=now)
    if not now:
        _wait(run, config, lambda: not lives())
    elif supervisor:
        _hurry(supervisor)
    if supervisor and _alive(supervisor):
        kill_processes([supervisor])
        tell(f"killed supervisor {supervisor.pid}")
    elif lives():
        raise DeadlineError(
            f"{run.root}: has not ended, and its supervisor is not to be seen here; call stop "
            "where relax-hpc run is"
        )


def _hurry(supervisor: psutil.Process) -> None:
    """Give it a moment to end its groups, as it was asked to, and to say so. The signal is for one
    that prepares."""
    with contextlib.suppress(psutil.Error):
        supervisor.send_signal(signal.SIGTERM)
    _until(time.monotonic() + _HURRY_S, lambda: not _alive(supervisor))


def _answers(run: RunDir) -> bool:
    return status(run, _ANSWER_S)["hub"]


def _supervisor(run: RunDir) -> psutil.Process | None:
    """`relax-hpc run`, the parent of what it prepares with and of roles without ranks; when it
    dies, they do."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words[1:2] == ["-m"] and words[3:5] == ["--run_dir", str(run.root)] and _is_child(words):
            with contextlib.suppress(psutil.Error):
                return process.parent()
    return None


def _is_child(words: list[str]) -> bool:
    """Whether a process of a run was started by its supervisor itself rather than by an MPI
    launcher."""
    if words[2] != "relax_hpc.roles":
        return words[2] == "relax_hpc.roles.prepare"
    return not any(a == "--role" and b in RANKED for a, b in pairwise(words))


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _wait(run: RunDir, config: Config, ended: Callable[[], bool]) -> None:
    seconds = _PHASES * config.liveness.stop_timeout_s + _MARGIN_S
    tell(f"{run.root}: asked to stop; the actor saves at its next step (up to {seconds:.0f} s)")
    if not _until(time.monotonic() + seconds, ended):
        tell("it has not ended in good order; ending what is left")


def _until(deadline: float, condition: Callable[[], bool]) -> bool:
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True


def _say_what_is_saved(run: RunDir, config: Config) -> None:
    saved = last_checkpoint(run, config)
    what = (
        f"step {saved['step']} is saved in {saved['path']}" if saved else "no checkpoint was made"
    )
    print(f"stopped: {what}")
    if not run.finished.exists():
        print(f"go on with: {resume_command(run)}")
    sys.stdout.flush()


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
