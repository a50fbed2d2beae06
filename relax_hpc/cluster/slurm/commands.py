"""Slurm's programs, which only this module starts: argument lists, a deadline for each call, and
errors of one line.

Calls are also made inside jobs. The SLURM_* variables of the calling job are therefore removed from
the environment of every command.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import subprocess
import time
from pathlib import Path

from relax_hpc.cluster.slurm.parsing import (
    JOB_FORMAT,
    SlurmError,
    SlurmJob,
    SlurmNode,
    command_error,
    command_text,
    parse_time,
    read_job,
    read_job_id,
    read_node,
    split_fields,
    split_pairs,
    unexpected_answer,
)
from relax_hpc.cluster.slurm.program_output import run_program

__all__ = [
    "PROGRAMS",
    "Slurm",
    "SlurmError",
    "SlurmJob",
    "SlurmNode",
    "clean_environment",
    "parse_time",
]

PROGRAMS = ("sbatch", "squeue", "scontrol", "scancel", "sinfo", "srun")
GONE = ("Invalid job id specified", "Job/step already completing or completed")
"""Answers about a job or step that has ended."""
# scancel 22.05 sometimes prints nothing about a job that has ended. Its exit code is then the low
# byte of Slurm's error number: 2017 (invalid job id) or 2021 (already done).
GONE_CODES = (2017 % 256, 2021 % 256)
"""Exit codes of scancel for a job or step that has ended."""
_OWN_VARIABLES = (
    "SLURM_",
    "SBATCH_",
    "SRUN_",
    "SALLOC_",
    "SQUEUE_",
    "SINFO_",
    "SCANCEL_",
    "SACCT_",
)
_KEPT_VARIABLES = ("SLURM_CONF", "SLURM_CONF_SERVER")
_MAX_IDS = 5000
"""Job ids in one call of squeue, because Linux limits one argument to 128 KiB."""
_PAUSES_S = (0.25, 0.5, 1.0, 2.0)
"""Seconds between attempts."""


class Slurm:
    """Slurm's commands. Every method raises SlurmError unless its docstring says otherwise.

    ``timeout_s`` limits one call with all its attempts; ``tries`` limits the number of attempts
    after transient errors.
    """

    def __init__(self, timeout_s: float = 20.0, tries: int = 4) -> None:
        self.timeout_s, self.tries = timeout_s, tries

    def available(self) -> bool:
        """Whether all programs are on PATH."""
        return not self.missing()

    def missing(self) -> list[str]:
        """Programs that are not on PATH."""
        return [program for program in PROGRAMS if shutil.which(program) is None]

    def submit(self, script: Path, *options: str, tag: str = "") -> str:
        """Submit ``script`` and return the job's id (of a heterogeneous job: that of component 0).

        Every submission has a tag in its comment, ``tag`` or a random one. If it is unknown whether
        the job was created, the queue is searched for the tag, and the script is not submitted
        again.
        """
        # If slurmctld is busy, sbatch 22.05 may report "Socket timed out" although the job was
        # created. A second sbatch would then create the job twice.
        tag = tag or f"relax-hpc-{secrets.token_hex(6)}"
        comment = f"{_comment(script, options)} {tag}".strip()
        command = ["sbatch", "--parsable", *options, f"--comment={comment}", str(script)]
        try:
            answer = self._run(command, retry_timeouts=False)
        except SlurmError as error:
            if not (error.timed_out or "Socket timed out" in error.answer):
                raise
            job = self._find_tagged_job(tag, error)
            if job:
                return job
            raise SlurmError(
                f"{error}; the job may still appear: before trying again look for comment {tag} "
                "in squeue --me -o '%i %k'",
                error.answer,
                timed_out=True,
            ) from error
        return read_job_id(command, answer)

    def test_only(self, script: Path, *options: str) -> str:
        """Answer of Slurm to ``script`` without submitting it. SlurmError if Slurm refuses it."""
        return self._run(["sbatch", "--test-only", *options, str(script)], both=True).strip()

    def jobs(self, *ids: str, components: bool = False) -> dict[str, SlurmJob]:
        """The jobs with ``ids`` (plain numbers) that squeue knows, by id. Finished and unknown
        jobs are absent.

        ``components``: include the other components of heterogeneous jobs whose component 0 is in
        ``ids``.
        """
        known_jobs, wanted = list[SlurmJob](), frozenset(ids)
        for start in range(0, len(ids), _MAX_IDS):
            id_list = ",".join(ids[start : start + _MAX_IDS])
            command = ["squeue", "--noheader", f"--jobs={id_list}", f"--format={JOB_FORMAT}"]
            lines = self._run(command, forgive=GONE).splitlines()
            known_jobs += [read_job(command, line) for line in lines if line.strip()]
        # squeue 22.05 lists all components of a heterogeneous job for the id of component 0.
        return {
            job.id: job
            for job in known_jobs
            if job.id in wanted or (components and job.het_leader in wanted)
        }

    def describe(self, job: str) -> dict[str, str]:
        """Fields of `scontrol show job` for a job or component (a plain number): JobState, Reason,
        PreemptTime, ...

        Empty when slurmctld has forgotten the job, MinJobAge after its end.
        """
        lines = self._run(["scontrol", "--oneliner", "show", "job", job], forgive=GONE).splitlines()
        # scontrol 22.05 prints the job's comment last and does not quote it, so that a comment can
        # contain "JobState=...". Reversed, the first pair with a key wins.
        tables = [
            dict(reversed([w.split("=", 1) for w in line.split() if "=" in w])) for line in lines
        ]
        # The id of component 0 prints all components, one line each.
        return next((table for table in tables if table.get("JobId") == job), {})

    def is_preempted(self, job: str) -> bool:
        """Whether Slurm is about to end a running job, or component, for a more urgent one."""
        # During the partition's GraceTime the state of a preempted job is still RUNNING in Slurm
        # 22.05. The steps receive SIGTERM, the batch script receives no signal.
        fields = self.describe(job)
        preempted_at = fields.get("PreemptTime", "None")
        # The time may be that of an earlier start of a requeued job. Both are local times in ISO
        # format, which compare as texts.
        return preempted_at != "None" and preempted_at >= fields.get("StartTime", "")

    def own_jobs(self) -> dict[str, SlurmJob]:
        """All jobs of this user that squeue knows, by id."""
        command = ["squeue", "--noheader", "--me", f"--format={JOB_FORMAT}"]
        lines = self._run(command).splitlines()
        jobs = [read_job(command, line) for line in lines if line.strip()]
        return {job.id: job for job in jobs}

    def cancel(self, job: str, signal: str = "", batch: bool = False) -> None:
        """Cancel a job ("8"), a step ("9.0") or a component ("8+1"), or send it ``signal``. No
        error if it has ended already.

        ``batch``: the signal goes only to the batch script; otherwise only to the steps.
        """
        # scancel 22.05 ends a step by SIGKILL without a SIGTERM before it. A process that must save
        # has to receive a signal first.
        options = [f"--signal={signal}"] if signal else []
        try:
            self._run(["scancel", *options, *(["--batch"] if batch else []), job], forgive=GONE)
        except SlurmError as error:
            if error.code not in GONE_CODES:
                raise

    def requeue(self, job: str) -> None:
        """Requeue a running job under its id. A pending job does not change."""
        # Slurm 22.05 requeues a heterogeneous job only as a whole, by the id of component 0. Its
        # tasks get SIGTERM immediately. The job starts again when its credentials have expired
        # (AuthInfo cred_expire, 120 s by default).
        self._run(["scontrol", "requeue", job], forgive=("Job is pending execution",))

    def set_requeue(self, job: str, allowed: bool) -> None:
        """Set whether Slurm may requeue ``job``."""
        self._run(["scontrol", "update", f"jobid={job}", f"requeue={int(allowed)}"])

    def set_mail_types(self, job: str, types: str) -> None:
        """Set the events of which ``job`` sends mail (`END,FAIL`, `NONE`)."""
        self._run(["scontrol", "update", f"jobid={job}", f"mailtype={types}"])

    def set_name(self, job: str, name: str) -> None:
        """Change the name of a job that has not ended."""
        self._run(["scontrol", "update", f"jobid={job}", f"jobname={name}"])

    def hold(self, job: str) -> None:
        """Keep a pending job from starting."""
        self._run(["scontrol", "hold", job])

    def release(self, job: str) -> None:
        """Let a held job start."""
        self._run(["scontrol", "release", job])

    def steps(self, job: str) -> dict[str, str]:
        """Names of the running steps of ``job`` by their ids ("9.0", "9.batch"); empty when the
        job has ended."""
        command = ["squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%i|%j"]
        lines = self._run(command, forgive=GONE).splitlines()
        return dict(split_fields(command, line, 2) for line in lines if line.strip())

    def nodes(self) -> list[SlurmNode]:
        """Every node, once for each partition it is in."""
        command = ["sinfo", "--noheader", "--Node", "--format=%N|%P|%T|%c|%m|%o|%G"]
        return [
            read_node(command, line) for line in self._run(command).splitlines() if line.strip()
        ]

    def describe_node(self, name: str) -> dict[str, str]:
        """Fields of `scontrol show node`: Arch, OS, ..."""
        return split_pairs(self._run(["scontrol", "--oneliner", "show", "node", name]))

    def node_states(self) -> dict[str, str]:
        """State of every node by its name."""
        return {node.name: node.state for node in self.nodes()}

    def partitions(self) -> dict[str, dict[str, str]]:
        """Fields of `scontrol show partition` by the partition's name: MaxTime, MaxNodes, Default,
        State, ..."""
        command = ["scontrol", "--oneliner", "show", "partition"]
        tables = [split_pairs(line) for line in self._run(command).splitlines() if line.strip()]
        if not all("PartitionName" in table for table in tables):
            raise unexpected_answer(command, str(tables), "lines of PartitionName=...")
        return {table["PartitionName"]: table for table in tables}

    def hostnames(self, node_list: str) -> list[str]:
        """``node[1-2]`` -> ["node1", "node2"]."""
        return self._run(["scontrol", "show", "hostnames", node_list]).split() if node_list else []

    def mpi_plugins(self) -> list[str]:
        """Plugin names that `srun --mpi` accepts."""
        # Slurm 22.05 prints a header that ends in "are...", then one plugin a line, then "specific
        # pmix plugin versions available: pmix_v4".
        names: list[str] = []
        for line in self._run(["srun", "--mpi=list"], both=True).splitlines():
            if "are..." in line:
                continue
            text = line.strip().removeprefix("srun:").strip().split("available:")[-1]
            names += [name for name in re.split(r"[,\s]+", text) if name]
        return names

    def config(self) -> dict[str, str]:
        """Slurm's configuration in slurmctld."""
        lines = self._run(["scontrol", "show", "config"]).splitlines()
        pairs = [line.split(" = ", 1) for line in lines if " = " in line]
        return {key.strip(): value.strip() for key, value in pairs}

    def version(self) -> str:
        """Version of Slurm, such as 22.05.8."""
        command = ["sinfo", "--version"]
        answer = self._run(command)
        match = re.search(r"\d+\.\d+\S*", answer)
        if not match:
            raise unexpected_answer(command, answer, "a version")
        return match[0]

    def srun_help(self) -> str:
        """The text of `srun --help`, which includes the options of plugins such as pyxis."""
        return self._run(["srun", "--help"], both=True)

    def associations(self) -> list[dict[str, str]]:
        """Limits of this user in the accounting database: Account, QOS, MaxJobs, MaxSubmit. Empty
        without accounting."""
        user = os.environ.get("USER") or str(os.getuid())
        return self._read_accounting(
            "associations", ("Account", "QOS", "MaxJobs", "MaxSubmit"), f"user={user}"
        )

    def qos_limits(self) -> list[dict[str, str]]:
        """Every QOS with its Name and limits: of a user (MaxJobsPU, MaxSubmitPU, MaxTRESPU), of a
        job (MaxWall, MaxTRES), and of all jobs together (GrpTRES). Empty without accounting."""
        return self._read_accounting(
            "qos",
            ("Name", "MaxJobsPU", "MaxSubmitPU", "MaxWall", "MaxTRES", "MaxTRESPU", "GrpTRES"),
        )

    def _read_accounting(
        self, entity: str, names: tuple[str, ...], *filters: str
    ) -> list[dict[str, str]]:
        """Columns ``names`` of all rows of an accounting ``entity`` that match ``filters``."""
        if shutil.which("sacctmgr") is None:
            return []
        command = [
            "sacctmgr",
            "--noheader",
            "--parsable2",
            "show",
            entity,
            *filters,
            f"format={','.join(names)}",
        ]
        lines = self._run(command, forgive=("not running a supported",)).splitlines()
        return [
            dict(zip(names, split_fields(command, line, len(names)), strict=True))
            for line in lines
            if line.strip()
        ]

    def find_tagged_job(self, tag: str) -> str:
        """The id of the job with ``tag`` in its comment, also of one that has ended; empty: there
        is none."""
        return self._find_tagged_job(tag, SlurmError(f"looking for the job with comment {tag}"))

    def _find_tagged_job(self, tag: str, cause: SlurmError) -> str:
        """The id of the job with ``tag`` in its comment, or ""."""
        command = ["squeue", "--noheader", "--me", "--states=all", "--format=%i|%A|%k"]
        # squeue may not show a new job for a moment.
        for pause in _PAUSES_S:
            try:
                lines = self._run(command).splitlines()
            except SlurmError as error:
                raise SlurmError(
                    f"{cause}; it is not known whether the job was created: {error}", error.answer
                ) from error
            for line in lines:
                if not line.strip():
                    continue
                number, plain_id, comment = split_fields(command, line, 3)
                if tag in comment:
                    return number.partition("+")[0] if "+" in number else plain_id
            time.sleep(pause)
        return ""

    def _run(
        self,
        argv: list[str],
        *,
        both: bool = False,
        forgive: tuple[str, ...] = (),
        retry_timeouts: bool = True,
    ) -> str:
        """Output of ``argv`` (``both``: with stderr), after retries. Answers that contain a text of
        ``forgive`` are no failures."""
        deadline = time.monotonic() + self.timeout_s
        for attempt in range(self.tries):
            try:
                return self._run_once(argv, deadline - time.monotonic(), both, forgive)
            except SlurmError as error:
                pause = _PAUSES_S[min(attempt, len(_PAUSES_S) - 1)]
                ambiguous = not retry_timeouts and "Socket timed out" in error.answer
                late = time.monotonic() + pause >= deadline
                if not error.transient or ambiguous or late or attempt == self.tries - 1:
                    raise
                time.sleep(pause)
        raise AssertionError("tries is at least 1")

    def _run_once(
        self, argv: list[str], timeout_s: float, both: bool, forgive: tuple[str, ...]
    ) -> str:
        try:
            done = run_program(argv, max(timeout_s, 0.01), clean_environment())
        except FileNotFoundError as error:
            raise SlurmError(
                f"{argv[0]}: not found on PATH; load the site's Slurm module, or install Slurm's "
                "client programs"
            ) from error
        except OSError as error:
            raise SlurmError(
                f"{argv[0]}: cannot be started: {error.strerror}; check its file mode and PATH"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise SlurmError(
                f"{command_text(argv)}: no answer within {self.timeout_s:g} s; slurmctld is busy "
                "or down (scontrol ping), try again later",
                timed_out=True,
            ) from error
        output = f"{done.stdout}\n{done.stderr}" if both else done.stdout
        message = done.stderr.strip() or done.stdout.strip()
        if done.returncode == 0 or any(text in message for text in forgive):
            return output
        raise command_error(argv, message, done.returncode)


def clean_environment() -> dict[str, str]:
    """Environment of this process without the variables that describe its Slurm job."""
    # Inside a job, sbatch and srun 22.05 take options from SLURM_* variables of that job, such as
    # its number of tasks.
    return {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT_VARIABLES or not name.startswith(_OWN_VARIABLES)
    }


def _comment(script: Path, options: tuple[str, ...]) -> str:
    """The user's comment for component 0. A comment on the command line replaces it, so it has to
    be repeated there."""
    for option in options:
        if option.startswith("--comment="):
            return option.removeprefix("--comment=")
    try:
        head = re.split(r"(?m)^#SBATCH\s+hetjob", script.read_text(errors="replace"))[0]
        match = re.search(r"(?m)^#SBATCH\s+--comment=(.*)$", head)
        return " ".join(shlex.split(match[1])) if match else ""
    except (OSError, ValueError):
        return ""
