"""The one place that starts Slurm's programs: argv lists, a deadline a call, errors of one line.

Calls are also made inside jobs, so the calling job's own SLURM_* variables are kept away from every
command.
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
    Job,
    Node,
    SlurmError,
    parse_time,
    read_job,
    read_job_id,
    read_node,
    refusal,
    rubbish,
    shown,
    split_fields,
    split_words,
)
from relax_hpc.cluster.slurm.program_output import ask

__all__ = ["PROGRAMS", "Job", "Node", "Slurm", "SlurmError", "clean_environment", "parse_time"]

PROGRAMS = ("sbatch", "squeue", "scontrol", "scancel", "sinfo", "srun")
GONE = ("Invalid job id specified", "Job/step already completing or completed")
"""Answers about a job or step that has ended."""
GONE_CODES = (2017 % 256, 2021 % 256)
"""scancel's exit code for the same, at times without a word: the low byte of Slurm's error
number."""
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
"""Ids of jobs in one call of squeue: Linux allows an argument 128 KiB."""
_PAUSES_S = (0.25, 0.5, 1.0, 2.0)


class Slurm:
    """Slurm's commands. Every method raises SlurmError unless it says otherwise.

    ``timeout_s`` bounds one call, its tries on transient answers included; ``tries`` bounds those.
    """

    def __init__(self, timeout_s: float = 20.0, tries: int = 4) -> None:
        self.timeout_s, self.tries = timeout_s, tries

    def available(self) -> bool:
        """Whether all programs are on PATH."""
        return not self.missing()

    def missing(self) -> list[str]:
        """Programs that are not on PATH."""
        return [program for program in PROGRAMS if shutil.which(program) is None]

    def submit(self, script: Path, *options: str) -> str:
        """Submit ``script``; the job's id (of a heterogeneous job: that of component 0).

        A deadline, or a socket that timed out, leaves open whether the job was made. So every
        submission carries a tag in its comment; the queue is searched for it, and nothing is
        submitted again.
        """
        tag = f"relax-hpc-{secrets.token_hex(6)}"
        comment = f"{_comment(script, options)} {tag}".strip()
        command = ["sbatch", "--parsable", *options, f"--comment={comment}", str(script)]
        try:
            answer = self._run(command, retry_timeouts=False)
        except SlurmError as error:
            if not (error.timed_out or "Socket timed out" in error.said):
                raise
            if found := self._tagged(tag, error):
                return found
            raise SlurmError(
                f"{error}; the job may still appear: before trying again look for comment {tag} "
                "in squeue --me -o '%i %k'",
                error.said,
                timed_out=True,
            ) from error
        return read_job_id(command, answer)

    def test_only(self, script: Path, *options: str) -> str:
        """Answer of Slurm to ``script`` without submitting it; a refusal raises."""
        return self._run(["sbatch", "--test-only", *options, str(script)], both=True).strip()

    def jobs(self, *ids: str, components: bool = False) -> dict[str, Job]:
        """The jobs among ``ids`` (plain numbers) that squeue knows, by id. Finished and unknown
        jobs are absent.

        ``components``: also the other components of heterogeneous jobs whose component 0 is among
        ``ids``.
        """
        known_jobs, wanted = list[Job](), frozenset(ids)
        for start in range(0, len(ids), _MAX_IDS):
            id_list = ",".join(ids[start : start + _MAX_IDS])
            command = ["squeue", "--noheader", f"--jobs={id_list}", f"--format={JOB_FORMAT}"]
            lines = self._run(command, forgive=GONE).splitlines()
            known_jobs += [read_job(command, line) for line in lines if line.strip()]
        # The id of component 0 brings the other components along.
        return {
            job.id: job
            for job in known_jobs
            if job.id in wanted or (components and job.het_leader in wanted)
        }

    def describe(self, job: str) -> dict[str, str]:
        """Fields of `scontrol show job` for a job or component (a plain number): JobState, Reason,
        PreemptTime, ...

        Empty once slurmctld has forgotten it: MinJobAge after its end.
        """
        lines = self._run(["scontrol", "--oneliner", "show", "job", job], forgive=GONE).splitlines()
        # Words of a comment come last, and may look like anything.
        tables = [
            dict(reversed([w.split("=", 1) for w in line.split() if "=" in w])) for line in lines
        ]
        return next((table for table in tables if table.get("JobId") == job), {})

    def is_preempted(self, job: str) -> bool:
        """Whether Slurm is about to end a running job, or component, for a more urgent one.

        During the partition's GraceTime its state is still RUNNING. The steps get SIGTERM, and the
        batch script gets no signal (seen on Slurm 22.05).
        """
        fields = self.describe(job)
        preempted_at = fields.get("PreemptTime", "None")
        # An earlier life of the job may have been preempted. Both are local times and sort as
        # texts.
        return preempted_at != "None" and preempted_at >= fields.get("StartTime", "")

    def own_jobs(self) -> dict[str, Job]:
        """All jobs of this user that squeue knows, by id."""
        command = ["squeue", "--noheader", "--me", f"--format={JOB_FORMAT}"]
        found = [
            read_job(command, line) for line in self._run(command).splitlines() if line.strip()
        ]
        return {job.id: job for job in found}

    def cancel(self, job: str, signal: str = "", batch: bool = False) -> None:
        """End, or with ``signal`` signal, a job ("8"), a step ("9.0") or a component ("8+1"); ended
        ones are fine.

        ``batch``: the signal goes to the batch script alone, else to the steps alone.
        """
        options = [f"--signal={signal}"] if signal else []
        try:
            self._run(["scancel", *options, *(["--batch"] if batch else []), job], forgive=GONE)
        except SlurmError as error:
            if error.code not in GONE_CODES:
                raise

    def requeue(self, job: str) -> None:
        """End a running job and queue it again under its id; one that waits already is left as it
        is."""
        self._run(["scontrol", "requeue", job], forgive=("Job is pending execution",))

    def set_mail_types(self, job: str, types: str) -> None:
        """Replace the events of which ``job`` sends mail (`END,FAIL`, `NONE`)."""
        self._run(["scontrol", "update", f"jobid={job}", f"mailtype={types}"])

    def hold(self, job: str) -> None:
        """Keep a pending job from starting."""
        self._run(["scontrol", "hold", job])

    def release(self, job: str) -> None:
        """Let a held job start."""
        self._run(["scontrol", "release", job])

    def steps(self, job: str) -> dict[str, str]:
        """Running steps of ``job``, by id ("9.0", "9.batch"), with their names; empty when the job
        has ended."""
        command = ["squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%i|%j"]
        lines = self._run(command, forgive=GONE).splitlines()
        return dict(split_fields(command, line, 2) for line in lines if line.strip())

    def nodes(self) -> list[Node]:
        """Every node, once for each partition it is in."""
        command = ["sinfo", "--noheader", "--Node", "--format=%N|%P|%T|%c|%m|%o|%G"]
        return [
            read_node(command, line) for line in self._run(command).splitlines() if line.strip()
        ]

    def node_states(self) -> dict[str, str]:
        """State of every node by its name."""
        return {node.name: node.state for node in self.nodes()}

    def partitions(self) -> dict[str, dict[str, str]]:
        """Fields of `scontrol show partition` by the partition's name: MaxTime, MaxNodes, Default,
        State, ..."""
        command = ["scontrol", "--oneliner", "show", "partition"]
        tables = [split_words(line) for line in self._run(command).splitlines() if line.strip()]
        if not all("PartitionName" in table for table in tables):
            raise rubbish(command, str(tables), "lines of PartitionName=...")
        return {table["PartitionName"]: table for table in tables}

    def hostnames(self, node_list: str) -> list[str]:
        """``node[1-2]`` -> ["node1", "node2"]."""
        return self._run(["scontrol", "show", "hostnames", node_list]).split() if node_list else []

    def mpi_plugins(self) -> list[str]:
        """Names that `srun --mpi` takes."""
        lines = self._run(["srun", "--mpi=list"], both=True).splitlines()
        listed = [
            line.strip().removeprefix("srun:").strip() for line in lines if "are..." not in line
        ]
        return [
            word
            for line in listed
            for word in re.split(r"[,\s]+", line.split("available:")[-1])
            if word
        ]

    def config(self) -> dict[str, str]:
        """Slurm's own configuration as slurmctld has it."""
        lines = self._run(["scontrol", "show", "config"]).splitlines()
        return {
            key.strip(): value.strip()
            for key, found, value in (line.partition(" = ") for line in lines)
            if found
        }

    def version(self) -> str:
        """Version of Slurm, such as 22.05.8."""
        command = ["sinfo", "--version"]
        answer = self._run(command)
        found = re.search(r"\d+\.\d+\S*", answer)
        if not found:
            raise rubbish(command, answer, "a version")
        return found[0]

    def srun_help(self) -> str:
        """The text of `srun --help`, which also lists what plugins such as pyxis add."""
        return self._run(["srun", "--help"], both=True)

    def associations(self) -> list[dict[str, str]]:
        """Limits of this user in the accounting database: Account, QOS, MaxJobs, MaxSubmit; empty
        without one."""
        user = os.environ.get("USER") or str(os.getuid())
        return self._accounting(
            "associations", ("Account", "QOS", "MaxJobs", "MaxSubmit"), f"user={user}"
        )

    def qualities(self) -> list[dict[str, str]]:
        """Every qos: Name, its limits a user, MaxJobsPU, MaxSubmitPU and MaxTRESPU, a job, MaxWall
        and MaxTRES, and of all together, GrpTRES; empty without accounting."""
        return self._accounting(
            "qos",
            ("Name", "MaxJobsPU", "MaxSubmitPU", "MaxWall", "MaxTRES", "MaxTRESPU", "GrpTRES"),
        )

    def _accounting(self, what: str, names: tuple[str, ...], *filters: str) -> list[dict[str, str]]:
        if shutil.which("sacctmgr") is None:
            return []
        command = [
            "sacctmgr",
            "--noheader",
            "--parsable2",
            "show",
            what,
            *filters,
            f"format={','.join(names)}",
        ]
        lines = self._run(command, forgive=("not running a supported",)).splitlines()
        return [
            dict(zip(names, split_fields(command, line, len(names)), strict=True))
            for line in lines
            if line.strip()
        ]

    def _tagged(self, tag: str, cause: SlurmError) -> str:
        """The id of the job whose comment holds ``tag``, or "": one asked for just now may take a
        moment to show."""
        command = ["squeue", "--noheader", "--me", "--states=all", "--format=%i|%A|%k"]
        for pause in _PAUSES_S:
            try:
                lines = self._run(command).splitlines()
            except SlurmError as error:
                raise SlurmError(
                    f"{cause}; whether the job was made is not known: {error}", error.said
                ) from error
            for number, plain, comment in (
                split_fields(command, line, 3) for line in lines if line.strip()
            ):
                if tag in comment:
                    return number.partition("+")[0] if "+" in number else plain
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
        """Output of ``argv`` (``both``: with stderr), after retries; answers of ``forgive`` are no
        failure."""
        deadline = time.monotonic() + self.timeout_s
        for attempt in range(self.tries):
            try:
                return self._try(argv, deadline - time.monotonic(), both, forgive)
            except SlurmError as error:
                pause = _PAUSES_S[min(attempt, len(_PAUSES_S) - 1)]
                ambiguous = not retry_timeouts and "Socket timed out" in error.said
                late = time.monotonic() + pause >= deadline
                if not error.transient or ambiguous or late or attempt == self.tries - 1:
                    raise
                time.sleep(pause)
        raise AssertionError("tries is at least 1")

    def _try(self, argv: list[str], timeout_s: float, both: bool, forgive: tuple[str, ...]) -> str:
        try:
            done = ask(argv, max(timeout_s, 0.01), clean_environment())
        except FileNotFoundError as error:
            raise SlurmError(
                f"{argv[0]}: not found on PATH; load the site's Slurm module, or install Slurm's "
                "client programs"
            ) from error
        except OSError as error:
            raise SlurmError(
                f"{argv[0]}: cannot be started: {error.strerror}; mend its file mode or PATH"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise SlurmError(
                f"{shown(argv)}: no answer within {self.timeout_s:g} s; slurmctld is busy or down "
                "(scontrol ping), try again later",
                timed_out=True,
            ) from error
        said = f"{done.stdout}\n{done.stderr}" if both else done.stdout
        complaint = done.stderr.strip() or done.stdout.strip()
        if done.returncode == 0 or any(text in complaint for text in forgive):
            return said
        raise refusal(argv, complaint, done.returncode)


def clean_environment() -> dict[str, str]:
    """Environment of this process without what tells a Slurm command which job it is called
    from."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT_VARIABLES or not name.startswith(_OWN_VARIABLES)
    }


def _comment(script: Path, options: tuple[str, ...]) -> str:
    """The comment that the user gave component 0, which the command line's would replace."""
    for option in options:
        if option.startswith("--comment="):
            return option.removeprefix("--comment=")
    try:
        head = re.split(r"(?m)^#SBATCH\s+hetjob", script.read_text(errors="replace"))[0]
        found = re.search(r"(?m)^#SBATCH\s+--comment=(.*)$", head)
        return " ".join(shlex.split(found[1])) if found else ""
    except (OSError, ValueError):
        return ""
