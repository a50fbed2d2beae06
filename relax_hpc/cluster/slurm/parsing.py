"""Answers of Slurm's commands: jobs and nodes as values, and errors of one line."""

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
"""Answers after which the same command may succeed a moment later."""
JOB_FORMAT = "%i|%A|%T|%D|%N|%M|%L|%r|%j"
"""The fields of squeue that make a Job."""


class SlurmError(Unavailable):
    """A Slurm command failed: `said` is its answer and `code` its exit code.

    `transient`: the same call may succeed later; `timed_out`: there was no answer at all.
    """

    def __init__(
        self,
        text: str,
        said: str = "",
        *,
        code: int = 0,
        transient: bool = False,
        timed_out: bool = False,
    ) -> None:
        super().__init__(" ".join(text.split()))
        self.said, self.code, self.transient, self.timed_out = said, code, transient, timed_out
        self.later = transient or timed_out


@dataclass(frozen=True, slots=True)
class Job:
    """A job, or one component of a heterogeneous job, that squeue still knows."""

    id: str
    """Number of the job, plain also for a component: 8+1 is "9"."""
    name: str
    state: str
    """State in its long form: PENDING, RUNNING, COMPLETING, NODE_FAIL, ..."""
    nodes: int
    node_list: str
    """Nodes in Slurm's compact form (`node[1-2]`); empty while nothing is allocated."""
    reason: str
    time_left_s: float | None
    """Seconds until the time limit; None: without limit, or not known."""
    used_s: float
    """Seconds since it began to run, for the last time if it was requeued; 0 before."""
    het_leader: str = ""
    """Id of component 0; empty for an ordinary job."""
    het_offset: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    """A node as one partition shows it."""

    name: str
    partition: str
    state: str
    """State as sinfo gives it, with its flag: idle, allocated*, drained, ..."""
    gres: str
    """Generic resources: `gpu:h100:4(S:0-1)`; empty: none."""
    cpus: int
    memory_mib: int
    address: str
    """Host name or address; nodes of a sandbox share one."""


def parse_time(text: str) -> float | None:
    """Seconds of Slurm's ``[days-]hours:minutes:seconds``, ``minutes:seconds``, ``minutes`` or
    ``days-hours``.

    >>> parse_time("1-02:00:00"), parse_time("4:57"), parse_time("UNLIMITED")
    (93600.0, 297.0, None)

    None: UNLIMITED and anything else that is not a time.
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if not found:
        return None
    days, *parts = found.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is not None or len(numbers) == 3:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    return 86400.0 * int(days or 0) + 3600.0 * hours + 60.0 * minutes + seconds


def read_job_id(command: list[str], answer: str) -> str:
    """The id that `sbatch --parsable` printed, without its cluster; a site's banner may stand above
    it."""
    last = (answer.strip().splitlines() or [""])[-1].partition(";")[0].strip()
    if not last.isdigit():
        raise rubbish(command, answer, "a job id; the job may have been made, look at squeue --me")
    return last


def read_job(command: list[str], line: str) -> Job:
    """Job of a squeue line in JOB_FORMAT."""
    number, plain, state, nodes, node_list, used, left, reason, name = split_fields(
        command, line, 9
    )
    if not (plain.isdigit() and nodes.isdigit() and state):
        raise rubbish(command, line, f"a line of {JOB_FORMAT}")
    leader, _, offset = number.partition("+") if "+" in number else ("", "", "0")
    times = parse_time(left), parse_time(used) or 0.0
    return Job(plain, name, state, int(nodes), node_list, reason, *times, leader, int(offset))


def read_node(command: list[str], line: str) -> Node:
    """A line of sinfo: name|partition|state|cpus|memory|address|gres."""
    name, partition, state, cpus, memory, address, gres = split_fields(command, line, 7)
    if not (cpus.isdigit() and memory.rstrip("+").isdigit()):
        raise rubbish(command, line, "a line of node|partition|state|cpus|memory|address|gres")
    gres = "" if gres in ("(null)", "N/A") else gres
    return Node(
        name, partition.rstrip("*"), state, gres, int(cpus), int(memory.rstrip("+")), address
    )


def split_fields(command: list[str], line: str, count: int) -> list[str]:
    """The ``count`` fields of a line; the last may hold the separator itself."""
    fields = line.strip("\n").split("|", count - 1)
    if len(fields) != count:
        raise rubbish(command, line, f"{count} fields parted by |")
    return [field.strip() for field in fields]


def split_words(line: str) -> dict[str, str]:
    """Pairs of `Key=value Key=value` as scontrol prints them."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def refusal(argv: list[str], complaint: str, code: int) -> SlurmError:
    """Error of a command that ended with `code`."""
    transient = any(text in complaint for text in TRANSIENT)
    advice = (
        "slurmctld is busy or down (scontrol ping), try again later"
        if transient
        else "mend what it names"
    )
    text = f"{shown(argv)}: exit {code}, said {_short(complaint) or 'nothing'!r}; {advice}"
    return SlurmError(text, complaint, code=code, transient=transient)


def rubbish(command: list[str], answer: str, expected: str) -> SlurmError:
    """Error of a command whose answer makes no sense."""
    return SlurmError(
        f"{shown(command)}: said {_short(answer) or 'nothing'!r}, expected {expected}", answer
    )


def shown(argv: list[str]) -> str:
    """Command as one would type it, cut to a readable length."""
    return _short(shlex.join(argv), 160)


def _short(text: str, limit: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
