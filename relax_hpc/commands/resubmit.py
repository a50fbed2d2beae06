"""`relax-hpc resubmit`: replace one group of a running run, optionally with another size or
setting, while the other groups continue.

If the nodes stay the same, the group restarts in place. Otherwise the supervisor stops the group
cleanly, and a separate job takes over. That job is in Slurm's queue before the old nodes are free.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import EXIT_DONE, ConfigError, RelaxError
from relax_hpc.base.protocol import describe_protocol_mismatch
from relax_hpc.base.rundir import RunDir, write_atomic
from relax_hpc.cluster.slurm.commands import Slurm, SlurmJob
from relax_hpc.cluster.slurm.job_lookup import (
    ENDED,
    current_job,
    known_jobs,
    load_unfinished_run,
    separate_job,
)
from relax_hpc.cluster.slurm.layout import components, group_component
from relax_hpc.cluster.slurm.render import render_group
from relax_hpc.cluster.slurm.submissions import Ledger, Submission
from relax_hpc.cluster.supervise import requests
from relax_hpc.cluster.supervise.attempts import latest_attempt
from relax_hpc.commands.snapshot import keep_code
from relax_hpc.config import Config, load_resolved
from relax_hpc.config.changes import add_change
from relax_hpc.config.groups import base_name, group_settings
from relax_hpc.net.rendezvous.roster import latest_card
from relax_hpc.ops.checks.settings import check

ANSWER_S = 30.0
"""Seconds for the answer of a supervisor, in addition to the time in which a group stops."""
GRACE_S = 10.0
"""Seconds for a job to end after its group is released."""
LOOK_S = 1.0
"""Seconds between two requests to Slurm."""


@dataclass(frozen=True, slots=True)
class ResubmitRequest:
    """Request of the user to replace a group."""

    group: str
    files: Sequence[str] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)
    nodes: int | None = None
    code: str | None = None
    """Folder with the package that the group must run."""
    new_job: bool = False
    """Whether the group gets a separate job, even if a restart in place is the default (layout
    het)."""
    in_place: bool = False
    """Whether the group stays on its nodes, even if a new job is the default (layout jobs)."""
    parsable: bool = False


def main(root: str, request: ResubmitRequest) -> int:
    """Replace the group. Progress goes to standard error, the id of a new job to standard
    output."""
    run = RunDir(Path(root))
    config = load_unfinished_run(run)
    group_settings(config, request.group)
    in_place = _stays_in_place(run, config, request)
    apply_change(run, config, request)
    if in_place:
        request_and_wait(run, config, "restart", request.group)
        print_progress(f"{request.group}: restarted in place")
    else:
        job = replace_job(run, config, Slurm(), request.group)
        print_job(request.group, job, request.parsable)
    return EXIT_DONE


def apply_change(run: RunDir, config: Config, request: ResubmitRequest) -> None:
    """Check the new settings of the group, and store them for its next start."""
    group = request.group
    settings: dict[str, Any] = dict(request.overrides)
    if request.nodes is not None:
        settings[f"groups.{group}.resources.nodes"] = request.nodes
    if request.code is not None:
        code = _copy_new_code(run, Path(request.code))
        settings[f"groups.{base_name(group, config.groups)}.code"] = code

    def check_changed(changed: Config) -> None:
        findings = check(changed)
        if findings:
            raise ConfigError(findings[0])
        if changed.layout == "local":
            components(changed)
        else:
            group_component(changed, group)

    present = load_resolved(run.root, group)
    path = add_change(run, present, group, request.files, settings, check_changed)
    if path:
        print_progress(f"{group}: the change is stored in {path}")


def _copy_new_code(run: RunDir, source: Path) -> str:
    """Copy the package in ``source`` into the run. ConfigError if its protocol differs from that of
    the other groups."""
    hub = latest_card(run, "hub")
    if hub:
        hub.check_protocol()
    problem = describe_protocol_mismatch(source)
    if problem:
        raise ConfigError(f"--code: {problem}")
    return str(keep_code(run, source))


def replace_job(run: RunDir, config: Config, slurm: Slurm, group: str) -> str:
    """Stop a group in its present job, and start it in a new one. Returns the id of the new job.

    The new job is submitted held before the group is stopped. If Slurm refuses it, the group
    continues unchanged.
    """
    present = known_jobs(run, config, slurm).get(current_job(run, group))
    after = ""
    if present is not None and present.state not in (*ENDED, "PENDING"):
        after = present.id if separate_job(run, group) == present.id else ""
    dependency = [f"--dependency=afterany:{after}"] if after else []
    job = slurm.submit(_write_script(run, group), "--hold", *dependency)
    ledger, attempt = Ledger(run), latest_attempt(run)
    # If this command is killed, the job is used or cancelled like any other spare job.
    ledger.add(Submission(job, "spare", group, attempt=attempt))
    try:
        stop_group(run, config, slurm, group, present)
    except BaseException:
        slurm.cancel(job)
        raise
    ledger.add(Submission(job, "group", group, attempt=attempt))
    slurm.release(job)
    if after:
        # If the old job does not end after its group has left, it is cancelled below. Without this
        # mark, the cancellation of the hub's job would count as a request of the user to stop.
        ledger.mark_retired(after)
        await_job_end(slurm, after)
    return job


def stop_group(run: RunDir, config: Config, slurm: Slurm, group: str, job: SlurmJob | None) -> None:
    """Stop a group in ``job``. DeadlineError if the job runs and no supervisor answers."""
    if job is None or job.state in ENDED:
        print_progress(f"{group}: it has no job, so there is nothing to stop")
    elif not cancel_if_pending(slurm, group, job):
        request_and_wait(run, config, "release", group)
        print_progress(f"{group}: stopped in job {job.id}")


def cancel_if_pending(slurm: Slurm, group: str, job: SlurmJob) -> bool:
    """Cancel a job if it has not started. Returns whether it was cancelled."""
    if job.state != "PENDING":
        return False
    slurm.cancel(job.id)
    print_progress(f"{group}: job {job.id} was still queued; cancelled")
    return True


def request_and_wait(run: RunDir, config: Config, op: str, *groups: str) -> None:
    """Send a request to the supervisors of ``groups``, and wait until all have served it."""
    seconds = config.liveness.stop_timeout_s + ANSWER_S
    for group in groups:
        print_progress(f"{group}: asking its supervisor to {op} it (up to {seconds:.0f} s)")
    for request in [requests.send_request(run, op, group) for group in groups]:
        error = requests.wait_for_answer(run, request, seconds).get("error")
        if error:
            raise RelaxError(f"{op} {request.group}: the supervisor says: {error}")


def await_job_end(slurm: Slurm, *jobs: str) -> None:
    """Wait for the end of jobs whose groups were released, and cancel those that do not end
    soon."""
    began, remaining = time.monotonic(), list(jobs)
    while time.monotonic() - began < ANSWER_S:
        jobs_by_id = slurm.jobs(*remaining)
        remaining = [
            job for job in remaining if job in jobs_by_id and jobs_by_id[job].state not in ENDED
        ]
        if not remaining:
            return
        for job in remaining:
            if jobs_by_id[job].state == "PENDING" or time.monotonic() - began > GRACE_S:
                slurm.cancel(job)
        time.sleep(LOOK_S)
    raise RelaxError(
        f"jobs {', '.join(remaining)} do not end; look at scontrol show job {remaining[0]}, and "
        "scancel them"
    )


def print_job(name: str, job: str, parsable: bool) -> None:
    """Print the id of a new job to standard output."""
    print(job if parsable else f"{name}: submitted job {job}", flush=True)


def print_progress(text: str) -> None:
    """Print a line of progress to standard error."""
    print(text, file=sys.stderr, flush=True)


def _write_script(run: RunDir, group: str) -> Path:
    """Write the batch script of a group with its present settings; its path."""
    script = run.submit / f"{group}.sbatch"
    run.submit.mkdir(exist_ok=True)
    write_atomic(script, render_group(load_resolved(run.root, group), group).encode())
    return script


def _stays_in_place(run: RunDir, config: Config, request: ResubmitRequest) -> bool:
    """Whether the group restarts on its present nodes. ConfigError if the request is not
    possible."""
    needs_new_job = request.new_job or request.nodes is not None
    if request.in_place and needs_new_job:
        raise ConfigError(
            "--in-place: found with --nodes or --new-job, which need a new job; leave out one of "
            "them"
        )
    in_component = config.layout == "het" and not separate_job(run, request.group)
    if config.layout == "local" or request.in_place or (in_component and not needs_new_job):
        return True
    if in_component and request.group in components(config)[0].groups:
        raise ConfigError(
            f"{request.group}: is in component 0 of the het job, which is the job itself; leave "
            "out --nodes and --new-job to restart it in place, or stop the run and submit "
            "--resume with the new size"
        )
    return False
