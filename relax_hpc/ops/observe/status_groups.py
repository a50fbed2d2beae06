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
from relax_hpc.config.groups import base_name, group_roles, group_settings
from relax_hpc.config.schema import LivenessConfig
from relax_hpc.net.rendezvous.life_signs import has_ended, is_running
from relax_hpc.net.rendezvous.roster import latest_card, latest_incarnation
from relax_hpc.queue.client import BEAT_FILE_S

_SUSPECT_BEATS = 2
ALIVE = ("running", "suspect", "restarting")
"""States of groups whose processes live or will be restarted."""
_BEAT = dict.fromkeys(("time", "gap_s", "busy_s", "progress"), (int, float))


def all_names(run: RunDir, config: Config, jobs: dict[str, SlurmJob]) -> list[str]:
    """Configured groups, and the elastic members that run or are queued."""
    queued = [
        entry.group
        for entry in Ledger(run).entries()
        if entry.kind == "group" and entry.job in jobs
    ]
    names = dict.fromkeys([*members_of(run, config), *sorted(queued)])
    return [name for name in names if name in config.groups or _is_shown(run, config, name, jobs)]


def group_status(
    run: RunDir,
    config: Config,
    name: str,
    hub: dict[str, Any],
    jobs: dict[str, SlurmJob],
    squeue_answers: bool,
    is_over: bool,
) -> dict[str, Any]:
    """State, incarnation, nodes and work of a group.

    ``hub``: its answer, or empty. ``squeue_answers``: ``jobs`` are all jobs, others have ended.
    ``is_over``: a stop of the run was requested.
    """
    incarnation, card = latest_incarnation(run, name), latest_card(run, name)
    beats = _beats(run, name, incarnation, hub)
    ages = [beat["age_s"] for beat in beats] or ([0.0] if name == "hub" and hub else [])
    job_id = queued_component(run, config, name, jobs)
    job_id = job_id or current_job(run, name, jobs if squeue_answers else None)
    job = jobs.get(job_id)
    ranks = card.ranks if card and card.incarnation == incarnation else []
    rank_nodes = sorted({rank.get("node", "") for rank in ranks} - {""})
    result: dict[str, Any] = {
        "incarnation": incarnation,
        "ranks": len(ranks),
        "roles": group_roles(config, name),
        "job": job_id,
        "nodes": job.node_list if job else ",".join(rank_nodes),
        "time_left_s": job.time_left_s if job else None,
        "age_s": _incarnation_age_s(run, name, incarnation),
        "last_beat_s": min(ages, default=None),
        "longest_gap_s": max((beat["gap_s"] for beat in beats), default=None),
        "busy_s": max((beat["busy_s"] for beat in beats), default=None),
        "doing": describe_activity(beats),
        "puts": sum(beat["progress"] for beat in beats),
        "ahead": started_ahead(run, name, incarnation),
    }
    if "actor" in group_settings(config, name).roles and hub:
        result["step"] = hub["trained_steps"]
    is_run_alive = bool(hub) or _has_beats(run, config)
    is_job_gone = squeue_answers and bool(job_id) and job is None
    is_over = is_over or not is_run_alive or name not in config.groups or is_job_gone
    may_run = not hub and any(map(is_running, beats))
    state, reason = _state(run, config, name, result, job, is_run_alive, is_over, may_run)
    if is_job_gone and not hub and state in ALIVE:
        # Slurm leaves no process of an ended job, even if the last beat is recent.
        state, reason = "ended", f"job {job_id} is not in the queue"
    return {"state": state, "reason": reason} | result


def started_ahead(run: RunDir, name: str, incarnation: int) -> list[dict[str, Any]]:
    """Roles that are started ahead for an incarnation after this one: `roles.start_ahead`."""
    standbys = []
    for path in sorted((run.root / "logs" / name).glob("inc-*/ahead-*.json")):
        number = int(path.parent.name.removeprefix("inc-"))
        report = read_map(path, memory_mb=int)
        if number > incarnation and report:
            role = path.stem.removeprefix("ahead-")
            standbys.append({"incarnation": number, "role": role, "memory_mb": report["memory_mb"]})
    return standbys


def describe_activity(beats: Iterable[Mapping[str, Any]]) -> str:
    """The longest current activity among the processes of ``beats``, with its seconds."""
    active = [beat for beat in beats if beat.get("doing")]
    if not active:
        return ""
    longest = max(active, key=lambda beat: beat["doing_s"])
    return f"{longest['doing']} ({longest['doing_s']:.0f} s)"


def _state(
    run: RunDir,
    config: Config,
    name: str,
    group: dict[str, Any],
    job: SlurmJob | None,
    is_run_alive: bool,
    is_over: bool,
    may_run: bool,
) -> tuple[str, str]:
    """State of a group, and a reason for some states.

    ``may_run``: a process of the group runs, but perhaps cannot write a beat.
    """
    incarnation = group["incarnation"]
    if run.finished.exists() or (incarnation and all_done(run, config, name)):
        return "done", ""
    if job and job.state == "PENDING":
        return "queued", job.reason
    for role in group["roles"]:
        mark = read_mark(run, name, incarnation, role)
        if mark and mark["status"] != "done":
            return "ended" if is_over else "restarting", mark["reason"]
    if group["last_beat_s"] is None:
        started = read_launch(run, name, incarnation) is not None
        if job or (is_run_alive and started):
            return "starting", ""
        return ("ended", "left no mark") if started else ("absent", "never started")
    return _state_by_beat(group["last_beat_s"], config.liveness, is_run_alive, may_run)


def _state_by_beat(
    age_s: float, limits: LivenessConfig, is_run_alive: bool, may_run: bool
) -> tuple[str, str]:
    """State of a group by the age of its newest beat."""
    silence = f"no sign for {age_s:.0f} s"
    # The newest beat may be in a file, and files are written less often than messages to the hub.
    evidence = Evidence(beats=[{"age_s": age_s - BEAT_FILE_S, "busy_s": 0.0}])
    if verdict(evidence, limits).fate is Fate.DEAD:
        if not is_run_alive:
            return "ended", "left no mark"
        # On a full disk a living process cannot write a beat.
        return "suspect" if may_run else "dead", silence
    # Without the hub only files are visible.
    allowed = (_SUSPECT_BEATS * limits.beat_s) + (0.0 if is_run_alive else BEAT_FILE_S)
    return ("suspect", silence) if age_s > max(allowed, 1.0) else ("running", "")


def _beats(run: RunDir, name: str, incarnation: int, hub: dict[str, Any]) -> list[dict[str, Any]]:
    """Newest beat of each process of an incarnation: from the hub, or else from files."""
    from_hub = [
        beat
        for beat in hub.get("beats", {}).values()
        if (beat["group"], beat["incarnation"]) == (name, incarnation)
    ]
    if from_hub:
        return from_hub
    beats = []
    for path in run.rendezvous(name).glob("beat-*.json"):
        beat = read_map(path, incarnation=int, **_BEAT)
        if beat and beat["incarnation"] == incarnation and not has_ended(beat):
            beats.append(beat | {"age_s": time.time() - beat["time"]})
    return beats


def _incarnation_age_s(run: RunDir, name: str, incarnation: int) -> float | None:
    """Age of the incarnation, seconds."""
    try:
        return time.time() - (run.rendezvous(name) / f"inc-{incarnation:06d}.claim").stat().st_mtime
    except OSError:
        return None


def _has_beats(run: RunDir, config: Config) -> bool:
    """Whether a group that has not recorded its end has a recent beat in files, or runs here."""
    limit = config.liveness.lease_s + BEAT_FILE_S
    names = [name for name in config.groups if not all_ended(run, config, name)]
    return any(
        last_beat_s(run, name) < limit or launch_records.has_live_process(run, name)
        for name in names
    )


def _is_shown(run: RunDir, config: Config, name: str, jobs: dict[str, SlurmJob]) -> bool:
    """Whether an elastic member is shown: it runs or is queued. Drained members are hidden."""
    incarnation = latest_incarnation(run, name)
    ended = bool(incarnation) and all(
        read_mark(run, name, incarnation, role) for role in group_roles(config, name)
    )
    return bool(base_name(name, config.groups)) and (
        current_job(run, name) in jobs or (bool(incarnation) and not ended)
    )
