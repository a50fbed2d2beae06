"""`relax-hpc stop`: stop a run cleanly, and end all of its jobs and processes."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Collection
from itertools import pairwise
from pathlib import Path

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
"""Seconds for a job with dead nodes, which stays COMPLETING until Slurm marks the nodes down."""


def main(root: str, now: bool) -> int:
    """Stop a run and print its last checkpoint. DeadlineError if a job or process does not end."""
    run = RunDir(Path(root))
    if not run.config.exists():
        raise ConfigError(f"{run.root}: no run here (config.yaml is missing); name a run directory")
    check_may_change(run.root)
    # The records in the run directory name the jobs and processes to end. In a run directory of
    # another user they could name other jobs and processes of this user.
    check_owner(run.root, "stop")
    config = load_resolved(run.root)
    if run.finished.exists():
        print_progress(f"{run.root}: finished already")
    elif not any(run.submit.glob("jobs/*.json")):
        _stop_processes(run, config, now)
    else:
        slurm = Slurm()
        if config.layout == "local" and not _remaining_jobs(run, config, slurm):
            _stop_processes(run, config, now)
        else:
            _stop_jobs(run, config, slurm, now)
    _print_last_checkpoint(run, config)
    return EXIT_DONE


def _stop_jobs(run: RunDir, config: Config, slurm: Slurm, now: bool) -> None:
    """Stop the jobs of the run. Successors and spare jobs are cancelled first, then other queued
    jobs, so that the end of a job does not start another one."""
    kinds = {entry.job: entry.kind for entry in Ledger(run).entries()}
    try:
        queued = _remaining_jobs(run, config, slurm, ("PENDING",))
    except SlurmError:
        # The hub can save and end the run without Slurm, and a successor that starts finds the
        # request.
        request_stop(run)
        print_progress(
            f"{run.root}: asked to stop, and saves; call stop again when Slurm answers, to cancel "
            "queued jobs"
        )
        raise
    for job in sorted(queued, key=lambda job: kinds.get(job) not in ("successor", "spare")):
        slurm.cancel(job)
        print_progress(f"cancelled queued job {job} ({kinds.get(job, 'component')})")
    request_stop(run)
    if not now:
        _wait(run, config, lambda: not _remaining_jobs(run, config, slurm))
    for job in _remaining_jobs(run, config, slurm):
        slurm.cancel(job)
        print_progress(f"cancelled job {job}")
    _wait_until(time.monotonic() + _MARGIN_S, lambda: not _remaining_jobs(run, config, slurm))
    # Roles of a COMPLETING job still hold memory and the address of the hub.
    _wait_until(time.monotonic() + _COMPLETING_S, lambda: not known_jobs(run, config, slurm))
    remaining = _remaining_jobs(run, config, slurm)
    if remaining:
        raise DeadlineError(
            f"jobs {', '.join(remaining)} do not end; see scontrol show job {remaining[0]}, and "
            "run stop again"
        )


def _remaining_jobs(
    run: RunDir, config: Config, slurm: Slurm, states: Collection[str] = ()
) -> list[str]:
    """Jobs of the run that hold nodes or may start, optionally only those in ``states``. Of a
    heterogeneous job only component 0 is included, because its cancellation ends the whole job."""
    jobs = {
        job.id: job for job in known_jobs(run, config, slurm).values() if job.state not in ENDED
    }
    leaders = [job for job in jobs.values() if not job.het_offset or job.het_leader not in jobs]
    return [job.id for job in leaders if not states or job.state in states]


def _stop_processes(run: RunDir, config: Config, now: bool) -> None:
    """Stop a run on this machine: its supervisor ends it, with ``now`` immediately. If it does not,
    it is killed, and all its processes die with it."""
    supervisor = _find_supervisor(run)
    if supervisor is None and not _answers(run):
        print_progress(f"{run.root}: the run has no process on this machine")
        return

    def is_alive() -> bool:
        # Exit marks of the roles would not do, because a killed role writes none.
        return _is_alive(supervisor) if supervisor else _answers(run)

    request_stop(run, now=now)
    if not now:
        _wait(run, config, lambda: not is_alive())
    elif supervisor:
        _await_quick_end(supervisor)
    if supervisor and _is_alive(supervisor):
        kill_processes([supervisor])
        print_progress(f"killed supervisor {supervisor.pid}")
    elif is_alive():
        raise DeadlineError(
            f"{run.root}: has not ended, and its supervisor is not on this machine; call stop on "
            "the machine of relax-hpc run"
        )


def _await_quick_end(supervisor: psutil.Process) -> None:
    """Give a supervisor some seconds to end its groups."""
    # A supervisor that still prepares the run does not read the request, and needs the signal.
    with contextlib.suppress(psutil.Error):
        supervisor.send_signal(signal.SIGTERM)
    _wait_until(time.monotonic() + _HURRY_S, lambda: not _is_alive(supervisor))


def _answers(run: RunDir) -> bool:
    return status(run, _ANSWER_S)["hub"]


def _find_supervisor(run: RunDir) -> psutil.Process | None:
    """The process `relax-hpc run`: the parent of the run's preparation, or of a role without
    ranks."""
    for process in psutil.process_iter(["cmdline"]):
        arguments = process.info["cmdline"] or []
        is_of_run = arguments[3:5] == ["--run_dir", str(run.root)]
        if arguments[1:2] == ["-m"] and is_of_run and _is_child(arguments):
            with contextlib.suppress(psutil.Error):
                return process.parent()
    return None


def _is_child(arguments: list[str]) -> bool:
    """Whether the parent of a process of a run is the supervisor. The parent of a rank is the
    launcher of the ranks."""
    if arguments[2] != "relax_hpc.roles":
        return arguments[2] == "relax_hpc.roles.prepare"
    pairs = pairwise(arguments)
    return not any(option == "--role" and value in RANKED for option, value in pairs)


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _wait(run: RunDir, config: Config, ended: Callable[[], bool]) -> None:
    seconds = _PHASES * config.liveness.stop_timeout_s + _MARGIN_S
    print_progress(
        f"{run.root}: asked to stop; the actor saves at its next step (up to {seconds:.0f} s)"
    )
    if not _wait_until(time.monotonic() + seconds, ended):
        print_progress("the run has not ended in time; its remaining jobs or processes are ended")


def _wait_until(deadline: float, condition: Callable[[], bool]) -> bool:
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True


def _print_last_checkpoint(run: RunDir, config: Config) -> None:
    saved = last_checkpoint(run, config)
    result = (
        f"step {saved['step']} is saved in {saved['path']}" if saved else "no checkpoint was made"
    )
    print(f"stopped: {result}")
    if not run.finished.exists():
        print(f"resume with: {resume_command(run)}")
    sys.stdout.flush()


def print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
