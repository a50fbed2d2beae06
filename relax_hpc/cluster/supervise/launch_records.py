"""Records that supervisors leave for each other in the run directory: how each incarnation of a
group was started.

Together with the exit marks of the roles this says what became of every incarnation, whoever
supervises next.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from relax_hpc.base.last_error import mask_numbers
from relax_hpc.base.rundir import RunDir, read_map, write_json
from relax_hpc.config.groups import base_name, roles_of
from relax_hpc.config.schema import Config
from relax_hpc.net.rendezvous import life_signs
from relax_hpc.net.rendezvous.life_signs import has_ended
from relax_hpc.net.rendezvous.roster import latest_incarnation

Progress = tuple[int, int, int]
"""Trained steps, accepted samples, checkpoints: a crash loop leaves all three as they are."""
UNKNOWN: Progress = (0, 0, 0)
_SAME_ERRORS = 2
"""Starts in a row that end with the same words, after which there is no other."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Start of one incarnation of a group."""

    attempt: int
    """Number of the user's command that started or resumed the run; a crash loop lies within
    one."""
    progress: Progress
    """Progress of the run at that moment."""
    job: str = ""
    """Slurm job on whose nodes it runs; empty: processes of this machine."""
    allocation: str = ""
    """Job and its restarts that the incarnation is a part of: a requeued job keeps its id."""
    steps: dict[str, str] = field(default_factory=dict)
    """Role -> name of its Slurm step."""


def record(run: RunDir, group: str, incarnation: int, launch: Launch) -> None:
    """Write down how ``incarnation`` of ``group`` is about to be started."""
    write_json(_path(run, group, incarnation), asdict(launch))


def read_launch(run: RunDir, group: str, incarnation: int) -> Launch | None:
    """Record of how an incarnation was started; None if it was claimed but never started."""
    kinds = {"attempt": int, "progress": list, "job": str, "allocation": str, "steps": dict}
    # Empty after a power loss.
    value = read_map(_path(run, group, incarnation), **kinds)
    return (
        Launch(**{name: value[name] for name in kinds} | {"progress": tuple(value["progress"])})
        if value
        else None
    )


def fruitless(run: RunDir, group: str, attempt: int, progress: Progress) -> int:
    """Number of the newest incarnations, in a row and in this attempt, that began where the run
    still is.

    A supervisor's first ones begin before it knows how far the run is: they count if one before
    them does. While it does not know, those of another life of a job say nothing: each life begins
    so, however far the run came in it.
    """
    count = unknown = 0
    allocation = None
    for _, launch in newest_launches(run, group):
        if launch.attempt != attempt or launch.progress not in (progress, UNKNOWN):
            break
        allocation = launch.allocation if allocation is None else allocation
        if progress == UNKNOWN and launch.allocation != allocation:
            break
        unknown += 1
        if launch.progress == progress:
            count, unknown = count + unknown, 0
    return count


def repeated_start_error(run: RunDir, config: Config, group: str, attempt: int) -> str:
    """Words with which a child program of ``group`` has failed at its last two starts; empty: they
    differ, or the group has been at work in this attempt.

    Numbers may differ: they are sizes, ports and folders. What has worked before may do so again.
    """
    errors = list[str]()
    for incarnation, launch in newest_launches(run, group):
        if launch.attempt != attempt:
            break
        error = _start_error(run, config, group, incarnation)
        if not error:
            return ""
        errors.append(error)
    if len(errors) < _SAME_ERRORS:
        return ""
    kinds = {mask_numbers(error) for error in errors[:_SAME_ERRORS]}
    return errors[0] if len(kinds) == 1 else ""


def _start_error(run: RunDir, config: Config, group: str, incarnation: int) -> str:
    marks = (read_mark(run, group, incarnation, role) for role in roles_of(config, group))
    return next((str(mark["start_error"]) for mark in marks if mark.get("start_error")), "")


def read_mark(run: RunDir, group: str, incarnation: int, role: str) -> dict:
    """Exit mark of a role; empty while it has left none."""
    return read_map(run.exit_mark(group, incarnation, role), status=str, code=int, reason=str)


def is_done(run: RunDir, group: str, role: str) -> bool:
    """Whether the newest incarnation of ``role`` came to its good end."""
    return read_mark(run, group, latest_incarnation(run, group), role).get("status") == "done"


def all_done(run: RunDir, config: Config, group: str) -> bool:
    """Whether all roles of a group came to their good end; the controller ends when everybody else
    has."""
    roles = [role for role in roles_of(config, group) if role != "controller"]
    return all(is_done(run, group, role) for role in roles) if roles else run.finished.exists()


def all_ended(run: RunDir, config: Config, group: str) -> bool:
    """Whether every role of the newest incarnation of a group has ended somehow; true if it never
    began."""
    incarnation = latest_incarnation(run, group)
    return incarnation == 0 or all(
        read_mark(run, group, incarnation, role) for role in roles_of(config, group)
    )


def last_beat_s(run: RunDir, group: str) -> float:
    """Seconds since the last sign that a group left in its files; infinite if no process that may
    live has left one."""
    beats = (
        read_map(path, time=(int, float)) for path in run.rendezvous(group).glob("beat-*.json")
    )
    return time.time() - max(
        (beat["time"] for beat in beats if beat and not has_ended(beat)), default=-math.inf
    )


def is_there(run: RunDir, group: str) -> bool:
    """Whether a process that beats for a group certainly runs: on a full disk no sign of it is
    young."""
    beats = (
        read_map(path, time=(int, float)) for path in run.rendezvous(group).glob("beat-*.json")
    )
    return any(map(life_signs.is_running, beats))


def members_of(run: RunDir, config: Config) -> list[str]:
    """All groups of a run that ever began, and those configured; elastic members are known by their
    folders."""
    begun = [
        path.name
        for path in (run.root / "rendezvous").glob("*")
        if latest_incarnation(run, path.name)
    ]
    members = [
        name for name in begun if name not in config.groups and base_name(name, config.groups)
    ]
    return [*config.groups, *sorted(members)]


def newest_launches(run: RunDir, group: str) -> Iterator[tuple[int, Launch]]:
    """(incarnation, launch) of each recorded launch of a group, the newest first."""
    for incarnation in range(latest_incarnation(run, group), 0, -1):
        if launch := read_launch(run, group, incarnation):
            yield incarnation, launch


def _path(run: RunDir, group: str, incarnation: int) -> Path:
    return run.rendezvous(group) / f"inc-{incarnation:06d}.launch.json"
