"""Parsers for the output of Slurm's commands: jobs and nodes as values, and errors of one line."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from relax_hpc.cluster.supervise.group import Unavailable

TRANSIENT = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "Connection refused",
    "Connection reset",
    "Resource temporarily unavailable",
    "Slurm backup controller in standby mode",
)
"""Error messages after which the same command may succeed a moment later."""
_SHOWN_AS = {"EXPEDITING": "PENDING"}
"""States of squeue that stand for another one: Slurm 25.11 shows a job as EXPEDITING until its
expedited requeue has started it."""
# The name (%j) comes last, because it may contain the separator. %i is "8+1" for component 1 of a
# heterogeneous job, %A its plain id "9".
JOB_FORMAT = "%i|%A|%T|%D|%N|%M|%L|%r|%j"
"""Output format of squeue for `read_job`."""


class SlurmError(Unavailable):
    """A Slurm command failed. `answer` is its message and `code` its exit code.

    `transient`: Slurm refused, and the same call may succeed later. `timed_out`: Slurm did not
    answer.
    """

    def __init__(
        self,
        text: str,
        answer: str = "",
        *,
        code: int = 0,
        transient: bool = False,
        timed_out: bool = False,
    ) -> None:
        super().__init__(" ".join(text.split()))
        self.answer, self.code, self.transient, self.timed_out = answer, code, transient, timed_out
        self.is_temporary = transient or timed_out


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job, or one component of a heterogeneous job, that squeue still knows."""

    id: str
    """Plain number of the job, also for a component: 8+1 is "9"."""
    name: str
    state: str
    """State in its long form: PENDING, RUNNING, COMPLETING, NODE_FAIL, ..."""
    nodes: int
    node_list: str
    """Nodes in Slurm's compact form (`node[1-2]`); empty while nothing is allocated."""
    reason: str
    time_left_s: float | None
    """Seconds until the time limit; None if it has no limit or is unknown."""
    used_s: float
    """Seconds since its last start; 0 if it has not started."""
    het_leader: str = ""
    """Id of component 0; empty for an ordinary job."""
    het_offset: int = 0


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """A node as one partition shows it."""

    name: str
    partition: str
    state: str
    """State as sinfo prints it, with its flag: idle, allocated*, drained, ... A `*` marks a node
    that does not answer."""
    gres: str
    """Generic resources such as `gpu:h100:4(S:0-1)`; empty if there are no such resources."""
    cpus: int
    memory_mib: int
    address: str
    """Host name or address; nodes of a sandbox share one."""

    def count_gpus(self, kind: str = "") -> int:
        """Number of GPUs of type ``kind``, or of all types."""
        devices = re.findall(r"\bgpu:(?:([^:,()]+):)?(\d+)", self.gres)
        return sum(int(number) for name, number in devices if not kind or name == kind)


def parse_time(text: str) -> float | None:
    """Seconds of a time in Slurm's formats ``[days-]hours:minutes:seconds``, ``minutes:seconds``,
    ``minutes`` or ``days-hours``. None for UNLIMITED and other texts.

    >>> parse_time("1-02:00:00"), parse_time("4:57"), parse_time("UNLIMITED")
    (93600.0, 297.0, None)
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if not match:
        return None
    days, *fields = match.groups()
    numbers = [int(field) for field in fields if field is not None]
    if days is not None or len(numbers) == 3:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    return 86400.0 * int(days or 0) + 3600.0 * hours + 60.0 * minutes + seconds


def parse_release(version: str) -> tuple[int, int]:
    """Year and month of a version of Slurm; (0, 0) if the text is none.

    >>> parse_release("24.11.5")
    (24, 11)
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def read_job_id(command: list[str], answer: str) -> str:
    """The job id that `sbatch --parsable` printed."""
    # A site's submit plugin may print a banner first, and a cluster name may follow the id.
    last = (answer.strip().splitlines() or [""])[-1].partition(";")[0].strip()
    if not last.isdigit():
        raise unexpected_answer(command, answer, "a job id; the job may exist, look at squeue --me")
    return last


def read_job(command: list[str], line: str) -> SlurmJob:
    """Parse a line of squeue in JOB_FORMAT."""
    number, plain_id, state, nodes, node_list, used, time_left, reason, name = split_fields(
        command, line, 9
    )
    if not (plain_id.isdigit() and nodes.isdigit() and state):
        raise unexpected_answer(command, line, f"a line of {JOB_FORMAT}")
    leader, _, offset = number.partition("+") if "+" in number else ("", "", "0")
    return SlurmJob(
        id=plain_id,
        name=name,
        state=_SHOWN_AS.get(state, state),
        nodes=int(nodes),
        node_list=node_list,
        reason=reason,
        time_left_s=parse_time(time_left),
        used_s=parse_time(used) or 0.0,
        het_leader=leader,
        het_offset=int(offset),
    )


def read_node(command: list[str], line: str) -> SlurmNode:
    """Parse a line of sinfo: name|partition|state|cpus|memory|address|gres."""
    name, partition, state, cpus, memory, address, gres = split_fields(command, line, 7)
    # sinfo appends `*` to the default partition, and `+` to a value that differs between nodes.
    if not (cpus.isdigit() and memory.rstrip("+").isdigit()):
        raise unexpected_answer(
            command, line, "a line of node|partition|state|cpus|memory|address|gres"
        )
    gres = "" if gres in ("(null)", "N/A") else gres
    return SlurmNode(
        name, partition.rstrip("*"), state, gres, int(cpus), int(memory.rstrip("+")), address
    )


def split_fields(command: list[str], line: str, count: int) -> list[str]:
    """The ``count`` fields of a line. The last field may contain the separator."""
    fields = line.strip("\n").split("|", count - 1)
    if len(fields) != count:
        raise unexpected_answer(command, line, f"{count} fields separated by |")
    return [field.strip() for field in fields]


def split_pairs(line: str) -> dict[str, str]:
    """Pairs in a line `Key=value Key=value` of scontrol."""
    return dict(pair.split("=", 1) for pair in line.split() if "=" in pair)


def command_error(argv: list[str], message: str, code: int) -> SlurmError:
    """Error of a command that ended with `code`."""
    transient = any(text in message for text in TRANSIENT)
    advice = (
        "slurmctld is busy or down (scontrol ping), try again later"
        if transient
        else "correct the cause that it names"
    )
    text = f"{command_text(argv)}: exit {code}, said {_short(message) or 'nothing'!r}; {advice}"
    return SlurmError(text, message, code=code, transient=transient)


def unexpected_answer(command: list[str], answer: str, expected: str) -> SlurmError:
    """Error of a command whose answer could not be parsed."""
    return SlurmError(
        f"{command_text(command)}: said {_short(answer) or 'nothing'!r}, expected {expected}",
        answer,
    )


def command_text(argv: list[str]) -> str:
    """Command as a user would type it, cut to a readable length."""
    return _short(shlex.join(argv), 160)


def _short(text: str, limit: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
