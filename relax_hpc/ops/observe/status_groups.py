"""Status of one group of a run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from relax_hpc.base.rundir import RunDir, read_map
from relax_hpc.cluster.slurm.commands import SlurmJob
from relax_hpc.cluster.slurm.job_lookup import current_job, queued_component
from relax_hpc.cluster.slurm.submissions import Ledger
from relax_hpc.cluster.supervise import launch_records
from relax_hpc.cluster.supervise.launch_records import (
    all_done,
    all_ended,
    last_beat_s,
    members_of,
    read_launch,
    read_mark,
)
from relax_hpc.cluster.supervise.verdict import Evidence, Fate, verdict
from relax_hpc.config import Config
from relax_hpc.config.groups import base_name, group_of, roles_of
from relax_hpc.config.schema import LivenessConfig
from relax_hpc.net.rendezvous.life_signs import has_ended, is_running
from relax_hpc.net.rendezvous.roster import latest_card, latest_incarnation
from relax_hpc.queue.client import BEAT_FILE_S

_SUSPECT_BEATS = 2
ALIVE = ("running", "suspect", "restarting")
"""States of groups by which a run goes on."""
_BEAT = dict.fromkeys(("time", "gap_s", "busy_s", "progress"), (int, float))


def all_names(run: RunDir, config: Config, jobs: dict[str, SlurmJob]) -> list[str]:
    """Configured groups, and the elastic members that run or are queued."""
    queued = [
        entry.group
        for entry in Ledger(run).entries()
        if entry.kind == "group" and entry.job in jobs
    ]
    found = dict.fromkeys([*members_of(run, config), *sorted(queued)])
    return [name for name in found if name in config.groups or _shown(run, config, name, jobs)]


def group_status(
    run: RunDir,
    config: Config,
    name: str,
    hub: dict[str, Any],
    jobs: dict[str, SlurmJob],
    squeue: bool,
    over: bool,
) -> dict[str, Any]:
    """State, incarnation, place and work of a group.

    ``hub``: its controller's answer, empty if there was none; ``squeue``: it answered, so other
    jobs are gone; ``over``: the run was asked to stop.
    """
    incarnation, card = latest_incarnation(run, name), latest_card(run, name)
    beats = _beats(run, name, incarnation, hub)
    ages = [beat["age_s"] for beat in beats] or ([0.0] if name == "hub" and hub else [])
    job_id = queued_component(run, config, name, jobs) or current_job(
        run, name, jobs if squeue else None
    )
    job = jobs.get(job_id)
    ranks = card.ranks if card and card.incarnation == incarnation else []
    about = {
        "incarnation": incarnation,
        "ranks": len(ranks),
        "roles": roles_of(config, name),
        "job": job_id,
        "nodes": job.node_list
        if job
        else ",".join(sorted({rank.get("node", "") for rank in ranks} - {""})),
        "time_left_s": job.time_left_s if job else None,
        "age_s": _age_s(run, name, incarnation),
        "last_beat_s": min(ages, default=None),
        "longest_gap_s": max((beat["gap_s"] for beat in beats), default=None),
        "busy_s": max((beat["busy_s"] for beat in beats), default=None),
        "doing": doing(beats),
        "puts": sum(beat["progress"] for beat in beats),
        "ahead": started_ahead(run, name, incarnation),
    }
    if "actor" in group_of(config, name).roles and hub:
        about["step"] = hub["trained_steps"]
    lives = bool(hub) or _hub_beats(run, config)
    gone = squeue and bool(about["job"]) and job is None
    over = over or not lives or name not in config.groups or gone
    there = not hub and any(map(is_running, beats))
    state, reason = _state(run, config, name, about, job, lives, over, there)
    if gone and not hub and state in ALIVE:
        # Slurm leaves no process of a job behind, however young its last beat is.
        state, reason = "ended", f"job {about['job']} is gone"
    return {"state": state, "reason": reason} | about


def started_ahead(run: RunDir, name: str, incarnation: int) -> list[dict[str, Any]]:
    """Roles that wait, with all imported, to be an incarnation after this one: see
    `relax_hpc.roles.start_ahead`."""
    found = []
    for path in sorted((run.root / "logs" / name).glob("inc-*/ahead-*.json")):
        number = int(path.parent.name.removeprefix("inc-"))
        if number > incarnation and (about := read_map(path, memory_mb=int)):
            role = path.stem.removeprefix("ahead-")
            found.append({"incarnation": number, "role": role, "memory_mb": about["memory_mb"]})
    return found


def doing(beats: Iterable[Mapping[str, Any]]) -> str:
    """Words for what the processes of ``beats`` are doing: the one that has been at it for the
    longest."""
    told = max(
        (beat for beat in beats if beat.get("doing")),
        key=lambda beat: beat["doing_s"],
        default=None,
    )
    return f"{told['doing']} ({told['doing_s']:.0f} s)" if told else ""


def _state(
    run: RunDir,
    config: Config,
    name: str,
    about: dict[str, Any],
    job: SlurmJob | None,
    lives: bool,
    over: bool,
    there: bool,
) -> tuple[str, str]:
    """A word, and why where that helps. ``there``: something of it runs, though it may not be able
    to say so."""
    if run.finished.exists() or (about["incarnation"] and all_done(run, config, name)):
        return "done", ""
    if job and job.state == "PENDING":
        return "queued", job.reason
    marks = (read_mark(run, name, about["incarnation"], role) for role in about["roles"])
    if ended := [mark for mark in marks if mark and mark["status"] != "done"]:
        return "ended" if over else "restarting", ended[0]["reason"]
    if about["last_beat_s"] is None:
        started = read_launch(run, name, about["incarnation"]) is not None
        if job or (lives and started):
            return "starting", ""
        return ("ended", "left no mark") if started else ("absent", "never started")
    return _by_beat(about["last_beat_s"], config.liveness, lives, there)


def _by_beat(age_s: float, limits: LivenessConfig, lives: bool, there: bool) -> tuple[str, str]:
    said = f"no sign for {age_s:.0f} s"
    # It may be in the files alone, which are written more seldom than the hub is told.
    found = Evidence(beats=[{"age_s": age_s - BEAT_FILE_S, "busy_s": 0.0}])
    if verdict(found, limits).fate is Fate.DEAD:
        # On a full disk nobody can leave a sign.
        return ("suspect" if there else "dead", said) if lives else ("ended", "left no mark")
    # Without the hub only the files are seen, which are written more seldom.
    allowed = (_SUSPECT_BEATS * limits.beat_s) + (0.0 if lives else BEAT_FILE_S)
    return ("suspect", said) if age_s > max(allowed, 1.0) else ("running", "")


def _beats(run: RunDir, name: str, incarnation: int, hub: dict[str, Any]) -> list[dict[str, Any]]:
    """Newest beat of each process of an incarnation: as the hub has them, else as the processes
    leave them."""
    if found := [
        b
        for b in hub.get("beats", {}).values()
        if (b["group"], b["incarnation"]) == (name, incarnation)
    ]:
        return found
    beats = (
        read_map(path, incarnation=int, **_BEAT)
        for path in run.rendezvous(name).glob("beat-*.json")
    )
    mine = (
        beat
        for beat in beats
        if beat and beat["incarnation"] == incarnation and not has_ended(beat)
    )
    return [beat | {"age_s": time.time() - beat["time"]} for beat in mine]


def _age_s(run: RunDir, name: str, incarnation: int) -> float | None:
    """Age of the incarnation, seconds."""
    try:
        return time.time() - (run.rendezvous(name) / f"inc-{incarnation:06d}.claim").stat().st_mtime
    except OSError:
        return None


def _hub_beats(run: RunDir, config: Config) -> bool:
    """Whether somebody beats in files, or certainly runs, where the hub does not answer; and has
    not said that it ended."""
    limit = config.liveness.lease_s + BEAT_FILE_S
    names = [name for name in config.groups if not all_ended(run, config, name)]
    return any(
        last_beat_s(run, name) < limit or launch_records.has_live_process(run, name)
        for name in names
    )


def _shown(run: RunDir, config: Config, name: str, jobs: dict[str, SlurmJob]) -> bool:
    """Whether a group is shown: members that were drained are not."""
    incarnation = latest_incarnation(run, name)
    ended = bool(incarnation) and all(
        read_mark(run, name, incarnation, role) for role in roles_of(config, name)
    )
    return bool(base_name(name, config.groups)) and (
        current_job(run, name) in jobs or (bool(incarnation) and not ended)
    )
