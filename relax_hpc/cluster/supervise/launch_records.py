"""Records in the run directory of how each incarnation of a group was started.

With these records and the exit marks of the roles, the next supervisor knows what happened to every
incarnation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from relax_hpc.base.last_error import mask_numbers
from relax_hpc.base.rundir import RunDir, read_map, write_json
from relax_hpc.config.groups import base_name, group_roles
from relax_hpc.config.schema import Config
from relax_hpc.net.rendezvous import life_signs
from relax_hpc.net.rendezvous.life_signs import has_ended
from relax_hpc.net.rendezvous.roster import latest_incarnation

Progress = tuple[int, int, int]
"""Trained steps, accepted samples, checkpoints. A crash loop changes none of the three."""
UNKNOWN: Progress = (0, 0, 0)
_SAME_ERRORS = 2
"""Consecutive starts with the same error after which the group is not started again."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Start of one incarnation of a group."""

    attempt: int
    """Number of the user's command that started or resumed the run. Starts are counted within one
    attempt."""
    progress: Progress
    """Progress of the run at that moment."""
    job: str = ""
    """Slurm job on whose nodes it runs; empty: processes of this machine."""
    allocation: str = ""
    """Job and its number of restarts, because a requeued job keeps its id."""
    steps: dict[str, str] = field(default_factory=dict)
    """Role -> name of its Slurm step."""
    detected_at: float = 0.0
    """Wall-clock seconds at which this supervisor took the previous incarnation for dead. 0: it was
    not dead, or another supervisor found that."""
    launched_at: float = 0.0
    """Wall-clock seconds at which it was started. 0: a record of an earlier release."""


def record_launch(run: RunDir, group: str, incarnation: int, launch: Launch) -> None:
    """Record how ``incarnation`` of ``group`` is about to be started."""
    write_json(_path(run, group, incarnation), asdict(launch))


def read_launch(run: RunDir, group: str, incarnation: int) -> Launch | None:
    """Record of how an incarnation was started; None if it was claimed but never started."""
    kinds = {"attempt": int, "progress": list, "job": str, "allocation": str, "steps": dict}
    # The file may be empty after a power loss.
    value = read_map(_path(run, group, incarnation), **kinds)
    if not value:
        return None
    values = {name: value[name] for name in kinds} | {"progress": tuple(value["progress"])}
    for name in ("detected_at", "launched_at"):
        seconds = value.get(name)
        values[name] = seconds if type(seconds) in (int, float) else 0.0
    return Launch(**values)


def count_fruitless_starts(run: RunDir, group: str, attempt: int, progress: Progress) -> int:
    """Number of consecutive starts, the newest ones of this attempt, since which the run has made
    no ``progress``.

    A supervisor starts its first incarnations before it knows the progress of the run. These
    count only if an earlier start with known progress counts. While ``progress`` itself is
    unknown, only starts of the same allocation count, because every restart of a job begins with
    unknown progress.
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
    """Error with which a child program of ``group`` failed at its last two starts. Empty if the
    errors differ, or if the group has worked in this attempt.

    Errors may differ in numbers, which are sizes, ports and folders. A group that has worked
    before may work again.
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
    marks = (read_mark(run, group, incarnation, role) for role in group_roles(config, group))
    return next((str(mark["start_error"]) for mark in marks if mark.get("start_error")), "")


def read_mark(run: RunDir, group: str, incarnation: int, role: str) -> dict:
    """Exit mark of a role; empty if it has written none."""
    return read_map(run.exit_mark(group, incarnation, role), status=str, code=int, reason=str)


def is_done(run: RunDir, group: str, role: str) -> bool:
    """Whether the newest incarnation of ``role`` finished its work."""
    return read_mark(run, group, latest_incarnation(run, group), role).get("status") == "done"


def all_done(run: RunDir, config: Config, group: str) -> bool:
    """Whether all roles of a group have finished their work. The controller does not count,
    because it ends after all other roles."""
    roles = [role for role in group_roles(config, group) if role != "controller"]
    return all(is_done(run, group, role) for role in roles) if roles else run.finished.exists()


def all_ended(run: RunDir, config: Config, group: str) -> bool:
    """Whether every role of the newest incarnation of a group has ended, with success or not. True
    if the group never started."""
    incarnation = latest_incarnation(run, group)
    return incarnation == 0 or all(
        read_mark(run, group, incarnation, role) for role in group_roles(config, group)
    )


def last_beat_s(run: RunDir, group: str) -> float:
    """Seconds since the last heartbeat in the group's files; infinite if no process that may be
    alive has written one."""
    beats = (
        read_map(path, time=(int, float)) for path in run.rendezvous(group).glob("beat-*.json")
    )
    return time.time() - max(
        (beat["time"] for beat in beats if beat and not has_ended(beat)), default=-math.inf
    )


def has_live_process(run: RunDir, group: str) -> bool:
    """Whether a process that sends heartbeats for a group certainly runs. On a full disk its
    heartbeat file is old although it runs."""
    beats = (
        read_map(path, time=(int, float)) for path in run.rendezvous(group).glob("beat-*.json")
    )
    return any(map(life_signs.is_running, beats))


def members_of(run: RunDir, config: Config) -> list[str]:
    """All configured groups of a run, and all further members that ever started, by their
    folders."""
    started = [
        path.name
        for path in (run.root / "rendezvous").glob("*")
        if latest_incarnation(run, path.name)
    ]
    members = [
        name for name in started if name not in config.groups and base_name(name, config.groups)
    ]
    return [*config.groups, *sorted(members)]


def newest_launches(run: RunDir, group: str) -> Iterator[tuple[int, Launch]]:
    """(incarnation, launch) of each recorded launch of a group, the newest first."""
    for incarnation in range(latest_incarnation(run, group), 0, -1):
        launch = read_launch(run, group, incarnation)
        if launch:
            yield incarnation, launch


def _path(run: RunDir, group: str, incarnation: int) -> Path:
    return run.rendezvous(group) / f"inc-{incarnation:06d}.launch.json"
