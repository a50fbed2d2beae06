"""The status of a run as text. `status_screen` fits it to a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from relax_hpc.base.disk_waits import describe_wait
from relax_hpc.base.terminal_text import escape_line, log_entry
from relax_hpc.cluster.supervise.unsaved_work import describe_unsaved_work
from relax_hpc.ops.observe.status_groups import ALIVE
from relax_hpc.ops.observe.text_table import Column, aligned

_MIN_SHARE = 0.01
COLUMNS = (
    Column("GROUP", max_chars=24),
    Column("STATE", max_chars=20),
    Column("INCARNATION", keep=4, is_number=True),
    Column("JOB", keep=6),
    Column("NODES", keep=5, max_chars=24),
    Column("RANKS", keep=2, is_number=True),
    Column("AGE", keep=3, is_number=True),
    Column("LEFT", keep=4, is_number=True),
    Column("BEAT", keep=3, is_number=True),
    Column("GAP", keep=1, is_number=True),
    Column("WORK", keep=8, max_chars=16),
)
_DAYS_OF_WEEK = 7
_MAX_FAILURES = 5
"""First failures in the text; --json has all of them."""


def lines(run_status: dict[str, Any]) -> Iterator[str]:
    """A status as text: state and results, then the groups, then details."""
    yield log_entry(f"{run_status['run_dir']}: {run_status['state']}{describe_stop(run_status)}")
    yield "  ".join(progress(run_status))
    scores = held_out_scores(run_status)
    if scores:
        yield escape_line(f"held-out: {'  '.join(scores)}")
    yield from map(escape_line, results(run_status))
    yield from aligned(COLUMNS, group_rows(run_status))
    yield from map(log_entry, details(run_status))


def progress(run_status: dict[str, Any]) -> list[str]:
    """Step, time to the end, reward, speed, and the date of the estimated end."""
    eta_s = run_status["eta_s"] if run_status["state"] == "running" else None
    parts = [
        f"step {run_status['trained_steps']}/{run_status['steps']}",
        f"eta {duration(eta_s)}",
    ]
    if run_status["reward"] is not None:
        parts.append(f"reward {run_status['reward']:.3f}")
    if run_status["tokens_per_s"]:
        parts.append(f"{run_status['tokens_per_s']:.0f} tok/s")
    if eta_s is not None:
        parts.append(f"end {time_of_day(run_status['time'] + eta_s, run_status['time'])}")
    return parts


def time_of_day(when: float, now: float) -> str:
    """Local time of ``when``, with the weekday or the date if it is another day than ``now``."""
    end, present = datetime.fromtimestamp(when), datetime.fromtimestamp(now)
    days = (end.date() - present.date()).days
    if not days:
        return f"{end:%H:%M}"
    return f"{end:%a %H:%M}" if 0 < days < _DAYS_OF_WEEK else f"{end:%d %b %H:%M}"


def held_out_scores(run_status: dict[str, Any]) -> list[str]:
    """Scores of the newest evaluation, and the step of its weights; empty without an
    evaluation."""
    held_out = run_status.get("held_out")
    if not held_out:
        return []
    scores = [f"{name} {value:.3f}" for name, value in held_out["scores"].items()]
    return [*scores, f"(weights of step {held_out['step']})"]


def results(run_status: dict[str, Any]) -> Iterator[str]:
    """Checkpoint of a run, and problems that delay it."""
    saved = run_status["checkpoint"]
    if saved:
        yield f"checkpoint: step {saved['step']}, {duration(saved['age_s'])} ago"
    else:
        yield "checkpoint: none yet"
    if run_status.get("unsaved"):
        yield f"checkpoint: {describe_unsaved_work(run_status['unsaved'])}"
    for disk in run_status.get("disk", ()):
        waiting = f"waits {duration(disk['seconds'])} for"
        if disk["loose"]:
            waiting = "keeps in memory the data that it cannot write to"
        yield f"disk: {disk['who']} {waiting} {describe_wait(disk)}"
    if run_status.get("nothing_learned"):
        yield f"nothing was learned from rewards in the last step: {run_status['nothing_learned']}"
    if run_status["preparing"]:
        yield f"preparing: {run_status['preparing']}"
    for wait in run_status["waits"]:
        yield _wait_line(wait)


def details(run_status: dict[str, Any]) -> Iterator[str]:
    """Counts and shares: failures, the queue, weights, time."""
    for failure in run_status.get("failures", ())[:_MAX_FAILURES]:
        yield f"first failure: {failure['headline']}"
    yield f"dropped: {_counts(run_status['dropped']) or 'nothing'}"
    if run_status.get("left_out"):
        yield f"rows left out: {_counts(run_status['left_out'])}"
    if run_status.get("noted"):
        yield f"noted: {_counts(run_status['noted'])}"
    weights, without = run_status["weights"], run_status["without"]
    if weights:
        yield f"weights: newest {weights['newest']}, slowest engine {weights['lag']} behind"
    if without:
        names = ", ".join(f"{name} ({state})" for name, state in without.items())
        yield f"without: {names} (rollout.without)"
    if run_status.get("events"):
        events = [" ".join(filter(None, key)) for key in run_status["events"]]
        yield f"events: {', '.join(events)}"
    yield from map(_tracker_line, run_status.get("trackers", ()))
    if run_status["hub"]:
        yield from _queue(run_status)
    yield from _shares(run_status["shares"])
    yield from _jobs(run_status)


def _tracker_line(tracker: dict[str, Any]) -> str:
    """Line about a tracker that `relax-hpc track` feeds."""
    text = f"tracker {tracker['name']}: {tracker['missing_bytes']} bytes of metrics.jsonl behind"
    if not tracker["works"]:
        text += ", relax-hpc track does not run"
    if tracker["failures"]:
        text += f", {tracker['failures']} failures"
    return f"{text}, the last: {tracker['last_failure']}" if tracker["last_failure"] else text


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def group_rows(run_status: dict[str, Any]) -> list[list[str]]:
    """Cells of each group; groups with a problem come first."""
    groups = run_status["groups"].items()
    ordered = sorted(groups, key=lambda item: item[1]["state"] in ("running", "done"))
    return [[name, *_cells(group)] for name, group in ordered]


def duration(seconds: float | None) -> str:
    """A duration in at most two units: 0.4s, 42s, 4m07s, 3h12m, 2d03h; a dash for None."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f}s"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02d}h"
    if hours:
        return f"{h}h{m:02d}m"
    return f"{m}m{s:02d}s" if minutes else f"{s}s"


def describe_stop(run_status: dict[str, Any]) -> str:
    """Exit code and reason of a stop, or the components that do not answer."""
    stop = run_status["stop"]
    if stop:
        code = f"exit {stop['code']}: " if stop["code"] else ""
        return f" ({code}{stop['reason']})"
    answers_by_source = {
        "the hub": run_status["hub"] or run_status["state"] == "queued",
        "squeue": run_status["squeue"] or not _on_slurm(run_status),
    }
    silent = [name for name, answers in answers_by_source.items() if not answers]
    if not silent or run_status["finished"]:
        return ""
    return f" (no answer from {' and '.join(silent)})"


def _on_slurm(run_status: dict[str, Any]) -> bool:
    return any(group["job"] for group in run_status["groups"].values())


def _queue(run_status: dict[str, Any]) -> Iterator[str]:
    depth, ages = run_status["depth"], run_status.get("oldest_s", {})
    notes = {"generating": "", "ready": ""}
    for name, age_s in ages.items():
        if age_s is not None and depth[name]:
            notes[name] = f" (oldest {duration(age_s)})"
    yield (
        f"queue: {depth['generating']} prompt groups in generation{notes['generating']}, "
        f"{depth['ready']} waiting for training{notes['ready']}"
    )
    yield f"waiting: {', '.join(sorted(set(run_status['waiting']))) or 'none'}"


def _wait_line(wait: dict[str, Any]) -> str:
    spent = f"{wait['spent']:.1f} {wait['unit']}-hours spent waiting"
    return (
        f"waits for {wait['group']}, which {wait['why']}: {duration(wait['since_s'])} so far, "
        f"{spent}; fails in {duration(wait['left_s'])}"
    )


def _shares(shares: dict[str, Any]) -> Iterator[str]:
    """A line for each role with the shares of its time in the last steps, largest first.

    Shares below 1 % are dropped.
    """
    if shares["roles"]:
        yield f"time of the last {shares['steps']} steps:"
    for role, times in shares["roles"].items():
        by_name = {name: share for name, share in times["at"].items() if name != "wait"}
        for peer, share in times["for"].items():
            by_name[f"waits for {peer}"] = share
        by_name["waits"] = times["at"].get("wait", 0.0) - sum(times["for"].values())
        pairs = [(share, name) for name, share in by_name.items() if share >= _MIN_SHARE]
        texts = [f"{name} {share:.0%}" for share, name in sorted(pairs, reverse=True)]
        yield f"  {role:<12}{'  '.join(texts)}"


def _jobs(run_status: dict[str, Any]) -> Iterator[str]:
    for kind in ("successor", "spare"):
        queued = [
            row["job"]
            for row in run_status["jobs"]
            if row["kind"] == kind and row["state"] == "PENDING"
        ]
        if queued:
            plural = "s" if len(queued) > 1 else ""
            yield f"queued {kind}{plural}: job{plural} {', '.join(queued)}"
    if run_status["excluded_nodes"]:
        yield f"excluded nodes: {', '.join(run_status['excluded_nodes'])}"


def _cells(group: dict[str, Any]) -> list[str]:
    """Cells of a group's row, after its name."""
    reason = " ".join(group["reason"].split())
    state = group["state"]
    is_queued = state == "queued"
    return [
        f"{state} ({reason})" if is_queued and reason else state,
        str(group["incarnation"] or "-"),
        group["job"] or "-",
        group["nodes"] or "-",
        str(group["ranks"] or "-"),
        duration(group["age_s"]),
        duration(group["time_left_s"]),
        duration(group["last_beat_s"]),
        duration(group["longest_gap_s"]),
        _work(group, "" if is_queued else reason[:80]),
    ]


def _work(group: dict[str, Any], reason: str) -> str:
    """Last cell of a group's row: progress, activity, reason of its state, standbys."""
    progress = f"{group['puts']} puts" if group["puts"] else ""
    if "step" in group:
        progress = f"step {group['step']}"
    standbys = [
        f"standby of {standby['role']} ready ({standby['memory_mb']} MB a rank)"
        for standby in live_standbys(group)
    ]
    return "; ".join(filter(None, (progress, group["doing"], reason, ", ".join(standbys))))


def live_standbys(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Standbys of a group. Those of a dead group have ended with it."""
    return group.get("ahead", []) if group["state"] in ALIVE else []
