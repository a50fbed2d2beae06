"""Groups of engines as separate Slurm jobs: submitted, looked up and ended."""

from __future__ import annotations

import contextlib
import hashlib
import time

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.elastic.members import RUNNING, WAITING, GroupState, StartRefusedError
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError, SlurmJob
from relax_hpc.cluster.slurm.job_lookup import ENDED, known_jobs
from relax_hpc.cluster.slurm.jobs import submit_group
from relax_hpc.cluster.slurm.submissions import Ledger, Submission
from relax_hpc.cluster.supervise import requests
from relax_hpc.cluster.supervise.launch_records import members_of, read_launch
from relax_hpc.config import Config
from relax_hpc.config.groups import base_name
from relax_hpc.net.rendezvous.roster import latest_incarnation
from relax_hpc.queue.operations import Operation

_EXPECTED_S = 30.0
"""Seconds between two questions for the expected start of a job. Slurm's backfill computes it about
once in half a minute (bf_interval)."""
_GRACE_S = 10.0
"""Seconds for a job to end after its group has stopped, in addition to
`liveness.stop_timeout_s`."""
_NEW_S = 10.0
"""Seconds until squeue certainly shows a new job."""


class SlurmMembers:
    """Members of ``group``, each in a separate job. The configured group may have any job."""

    def __init__(self, run: RunDir, config: Config, slurm: Slurm, group: str) -> None:
        self._run, self._config, self._slurm, self._group = run, config, slurm, group
        self._ledger = Ledger(run)
        self._expected: dict[str, tuple[float, float]] = {}
        """Expected start by job, and the monotonic time of the answer."""
        self._released_at: dict[str, float] = {}
        """Monotonic time at which a job's group was asked to stop."""

    def groups(self) -> dict[str, GroupState]:
        """See `GroupMembers`. SlurmError: Slurm does not answer."""
        jobs = known_jobs(self._run, self._config, self._slurm)
        states = {self._group: GroupState(self._group, RUNNING)}
        for name in self._member_names():
            entry = self._ledger.separate_job(name)
            if entry is None:
                continue
            job = jobs.get(entry.job)
            if job is not None and job.state not in ENDED:
                states[name] = self._describe(name, job)
            elif job is None and time.time() - entry.time < _NEW_S:
                states[name] = GroupState(name, WAITING, entry.job, detail="just submitted")
        return states

    def _member_names(self) -> list[str]:
        names = {entry.group for entry in self._ledger.entries() if entry.kind == "group"}
        names.update(members_of(self._run, self._config))
        return sorted(name for name in names - {self._group} if base_name(name, {self._group}))

    def _describe(self, name: str, job: SlurmJob) -> GroupState:
        if job.state != "RUNNING":
            expected = self._expected_start(job.id) if job.state == "PENDING" else 0.0
            detail = f"job {job.id} is {job.state}: {job.reason}"
            return GroupState(name, WAITING, job.id, expected, detail)
        self._expected.pop(job.id, None)
        launch = read_launch(self._run, name, latest_incarnation(self._run, name))
        has_started = launch is not None and launch.job == job.id
        detail = "" if has_started else f"job {job.id} prepares its nodes"
        return GroupState(name, RUNNING if has_started else WAITING, job.id, detail=detail)

    def _expected_start(self, job: str) -> float:
        """Wall-clock time at which Slurm expects to start a pending job; 0: it does not know."""
        expected, asked_at = self._expected.get(job, (0.0, float("-inf")))
        if time.monotonic() - asked_at < _EXPECTED_S:
            return expected
        expected = 0.0
        with contextlib.suppress(SlurmError, ValueError, OverflowError):
            # scontrol prints local time in ISO format, or `Unknown`.
            start = self._slurm.describe(job).get("StartTime", "")
            expected = time.mktime(time.strptime(start, "%Y-%m-%dT%H:%M:%S"))
        self._expected[job] = expected, time.monotonic()
        return expected

    # -- changes -----------------------------------------------------------------------------------

    def start(self, operation: Operation, name: str) -> str:
        """See `GroupMembers`. The job has a tag in its comment, by which `recover` finds it."""
        options, tag = _job_options(operation), self._tag(operation, name)
        # The head of the new job would serve a request that the former job has not answered.
        for request in self._pending(name):
            requests.answer(self._run, request, error="withdrawn")
        try:
            return submit_group(self._run, self._slurm, self._ledger, name, options, tag=tag)
        except SlurmError as error:
            if error.is_temporary:
                raise
            raise StartRefusedError("submission_refused", str(error)) from error

    def recover(self, operation: Operation, name: str) -> str:
        """See `GroupMembers`. The earlier reconciler may have been killed between the submission
        and the entry in the ledger."""
        entry = self._ledger.separate_job(name)
        if entry and entry.time >= operation.created_at:
            return entry.job
        job = self._slurm.find_tagged_job(self._tag(operation, name))
        if job:
            options = _job_options(operation)
            self._ledger.add(Submission(job=job, kind="group", group=name, options=options))
        return job

    def _tag(self, operation: Operation, name: str) -> str:
        """Text in the job's comment that only this submission has."""
        run = hashlib.sha256(str(self._run.root).encode()).hexdigest()[:12]
        return f"relax-hpc-{run}-{operation.id}-{name}"

    def end(self, name: str, force: bool) -> None:
        """See `GroupMembers`. A pending job is cancelled. A running one is asked to stop, and
        cancelled if it does not end in time."""
        entry = self._ledger.separate_job(name)
        job = self._slurm.jobs(entry.job).get(entry.job) if entry else None
        if job is None or job.state in ENDED:
            return
        if job.state == "PENDING" or force:
            self._slurm.cancel(job.id)
            return
        limit_s = self._config.liveness.stop_timeout_s + _GRACE_S
        released_at = self._released_at.get(job.id)
        if released_at is None:
            self._released_at[job.id] = time.monotonic()
            if not self._pending(name):
                requests.send_request(self._run, "release", name)
        elif time.monotonic() - released_at > limit_s:
            self._slurm.cancel(job.id)

    def _pending(self, name: str) -> list[requests.GroupRequest]:
        """Requests about a group that no supervisor has answered."""
        return requests.pending_requests(self._run, lambda group: group == name)

    def lost_reason(self, name: str, start: str) -> tuple[str, str]:
        # The head of the hub, or of the group, may have replaced the job that was started.
        entry = self._ledger.separate_job(name)
        job, state = entry.job if entry else start, ""
        with contextlib.suppress(SlurmError):
            state = self._slurm.describe(job).get("JobState", "")
        return "job_ended", f"job {job} of {name} is over ({state or 'no longer known to Slurm'})"


def _job_options(operation: Operation) -> list[str]:
    """Options of sbatch that the request names."""
    names = {"time": "time", "time_min": "time-min"}
    return [
        f"--{option}={operation.body[name]}"
        for name, option in names.items()
        if operation.body.get(name)
    ]
