"""`relax-hpc resubmit`: replace one group of a living run, also with another size or setting; the
others go on.

In place, where its nodes stay the same; else the supervisor stops the group in good order, and a
job of its own takes over, in the queue before the old nodes are free.
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
from relax_hpc.config.groups import base_name, group_of
from relax_hpc.net.rendezvous.roster import latest_card
from relax_hpc.ops.checks.settings import check

ANSWER_S = 30.0
"""Seconds for an answer of a supervisor, besides the time in which a group stops."""
GRACE_S = 10.0
"""Seconds for a job to end once its group is released."""
LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Wish:
    """Request of the user."""

    group: str
    files: Sequence[str] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)
    nodes: int | None = None
    code: str | None = None
    """Folder with the package that the group shall run."""
    new_job: bool = False
    """Whether it shall get a job of its own, even where a restart in place is the rule (layout
    het)."""
    in_place: bool = False
    """Whether it shall stay on its nodes, even where a new job is the rule (layout jobs)."""
    parsable: bool = False


def main(root: str, wish: Wish) -> int:
    """Do it; progress goes to standard error, the new job, if there is one, to standard output."""
    run = RunDir(root)
    config = load_unfinished_run(run)
    group_of(config, wish.group)
    in_place = _in_place(run, config, wish)
    change(run, config, wish)
    if in_place:
        requested(run, config, "restart", wish.group)
        tell(f"{wish.group}: started again in place")
    else:
        announce(wish.group, replace_job(run, config, Slurm(), wish.group), wish.parsable)
    return EXIT_DONE


def change(run: RunDir, config: Config, wish: Wish) -> None:
    """Validate and keep what the group shall have from its next start on."""
    size = {} if wish.nodes is None else {f"groups.{wish.group}.resources.nodes": wish.nodes}
    if wish.code is not None:
        size[f"groups.{base_name(wish.group, config.groups)}.code"] = _own_code(
            run, Path(wish.code)
        )

    def judge(found: Config) -> None:
        if findings := check(found):
            raise ConfigError(findings[0])
        if found.layout == "local":
            components(found)
        else:
            group_component(found, wish.group)

    now = load_resolved(run.root, wish.group)
    path = add_change(run, now, wish.group, wish.files, {**wish.overrides, **size}, judge)
    if path:
        tell(f"{wish.group}: keeps the change in {path}")


def _own_code(run: RunDir, source: Path) -> str:
    """A copy in the run of the package below ``source``. ConfigError unless the other groups
    understand it."""
    if hub := latest_card(run, "hub"):
        hub.check_protocol()
    if why := describe_protocol_mismatch(source):
        raise ConfigError(f"--code: {why}")
    return str(keep_code(run, source))


def replace_job(run: RunDir, config: Config, slurm: Slurm, group: str) -> str:
    """Have a group stop where it lives, and its next job take over; that job's id.

    The job is submitted held before anything is stopped: if Slurm does not take it, the group goes
    on as it is.
    """
    found = known_jobs(run, config, slurm).get(current_job(run, group))
    lives = found is not None and found.state not in (*ENDED, "PENDING")
    after = found.id if lives and separate_job(run, group) == found.id else ""
    job = slurm.submit(
        _script(run, group), "--hold", *([f"--dependency=afterany:{after}"] if after else [])
    )
    ledger, attempt = Ledger(run), latest_attempt(run)
    # Known from now on: should this command be killed, the job is used, or withdrawn, like any
    # other spare one.
    ledger.add(Submission(job, "spare", group, attempt=attempt))
    try:
        release(run, config, slurm, group, found)
    except BaseException:
        slurm.cancel(job)
        raise
    ledger.add(Submission(job, "group", group, attempt=attempt))
    slurm.release(job)
    if after:
        # One that stays although its group has left is ended, which of the hub's would be taken for
        # the user's wish.
        ledger.mark_retired(after)
        see_off(slurm, after)
    return job


def release(run: RunDir, config: Config, slurm: Slurm, group: str, job: SlurmJob | None) -> None:
    """Have a group stop where it lives, in ``job``; DeadlineError if that runs and no supervisor
    answers."""
    if job is None or job.state in ENDED:
        tell(f"{group}: no job of it is left, so there is nothing to stop")
    elif not withdrawn(slurm, group, job):
        requested(run, config, "release", group)
        tell(f"{group}: stopped in job {job.id}")


def withdrawn(slurm: Slurm, group: str, job: SlurmJob) -> bool:
    """Cancel a job that has not started; whether it had not."""
    if job.state != "PENDING":
        return False
    slurm.cancel(job.id)
    tell(f"{group}: job {job.id} was still queued; withdrawn")
    return True


def requested(run: RunDir, config: Config, op: str, *groups: str) -> None:
    """Ask the supervisors of groups, and wait until all have done it."""
    seconds = config.liveness.stop_timeout_s + ANSWER_S
    for group in groups:
        tell(f"{group}: asking its supervisor to {op} it (up to {seconds:.0f} s)")
    for asked in [requests.send_request(run, op, group) for group in groups]:
        answer = requests.wait_for_answer(run, asked, seconds)
        if error := answer.get("error"):
            raise RelaxError(f"{op} {asked.group}: the supervisor says: {error}")


def see_off(slurm: Slurm, *jobs: str) -> None:
    """Wait until jobs whose groups were released are gone; one that stays although it has no work
    left is ended."""
    began, left = time.monotonic(), list(jobs)
    while time.monotonic() - began < ANSWER_S:
        known = slurm.jobs(*left)
        left = [job for job in left if job in known and known[job].state not in ENDED]
        if not left:
            return
        for job in left:
            if known[job].state == "PENDING" or time.monotonic() - began > GRACE_S:
                slurm.cancel(job)
        time.sleep(LOOK_S)
    raise RelaxError(
        f"jobs {', '.join(left)} do not end; look at scontrol show job {left[0]}, and scancel them"
    )


def announce(name: str, job: str, parsable: bool) -> None:
    """Name a new job where programs read."""
    print(job if parsable else f"{name}: submitted job {job}", flush=True)


def tell(text: str) -> None:
    """Print a line of progress, beside what programs read."""
    print(text, file=sys.stderr, flush=True)


def _script(run: RunDir, group: str) -> Path:
    """The batch script of a group as it is configured now."""
    script = run.submit / f"{group}.sbatch"
    run.submit.mkdir(exist_ok=True)
    write_atomic(script, render_group(load_resolved(run.root, group), group).encode())
    return script


def _in_place(run: RunDir, config: Config, wish: Wish) -> bool:
    """Whether the group starts again where it is; ConfigError for what cannot be."""
    if wish.in_place and (wish.new_job or wish.nodes is not None):
        raise ConfigError(
            "--in-place: found with --nodes or --new-job, which need a new job; leave out one of "
            "them"
        )
    whole = config.layout == "het" and not separate_job(run, wish.group)
    if (
        config.layout == "local"
        or wish.in_place
        or (whole and not wish.new_job and wish.nodes is None)
    ):
        return True
    if whole and wish.group in components(config)[0].groups:
        raise ConfigError(
            f"{wish.group}: lives in component 0 of the het job, which is the job itself; leave "
            "out --nodes and "
            "--new-job to restart it in place, or stop the run and submit --resume with the new "
            "size"
        )
    return False
