"""`relax-hpc status`: print the status of a run as text or as JSON, once or repeatedly."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import Any

from relax_hpc.base.disk_waits import describe_wait
from relax_hpc.base.errors import ConfigError
from relax_hpc.base.rundir import RunDir
from relax_hpc.base.terminal_text import escape_line, log_entry, unfiltered
from relax_hpc.cluster.slurm.commands import Slurm
from relax_hpc.cluster.supervise.unsaved_work import describe_unsaved_work
from relax_hpc.ops.observe.run_state import FINAL_STATES
from relax_hpc.ops.observe.status import SLURM_S, status
from relax_hpc.ops.observe.status_groups import ALIVE
from relax_hpc.ops.observe.text_table import Column, aligned, fitted, shorten_line

MIN_WATCH_S = 2.0
_MIN_SHARE = 0.01
_CLEAR = "\x1b[H\x1b[J"
_COLUMNS = (
    Column("GROUP"),
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
_MAX_FAILURES = 5
"""First failures in the text; --json has all of them."""
_MAX_STATE_LINES = 3


def main(root: str, as_json: bool = False, watch_s: float | None = None) -> int:
    """Print the status, with ``watch_s`` repeatedly until the run ends.

    Returns `run_state.exit_code`.
    """
    if watch_s is not None and watch_s < MIN_WATCH_S:
        raise ConfigError(
            f"--watch: found {watch_s:g}, allowed: at least {MIN_WATCH_S:g} s (slurmctld serves "
            "all users)"
        )
    run, slurm = RunDir(Path(root)), Slurm(timeout_s=SLURM_S, tries=1)
    clears = watch_s is not None and sys.stdout.isatty()
    while True:
        run_status = status(run, slurm=slurm)
        is_over = run_status["state"] in FINAL_STATES
        if as_json:
            text = json.dumps(run_status)
        elif clears:
            unfiltered(sys.stdout).write(_CLEAR)
            text = "\n".join(_for_screen(run_status, is_over))
        else:
            text = "\n".join(lines(run_status)) + ("\n" if watch_s else "")
        print(text, flush=True)
        if watch_s is None or is_over:
            return run_status["exit_code"]
        time.sleep(watch_s)


def lines(run_status: dict[str, Any]) -> Iterator[str]:
    """A status as text: state and results, then the groups, then details."""
    yield log_entry(f"{run_status['run_dir']}: {run_status['state']}{_describe_stop(run_status)}")
    yield from map(escape_line, _results(run_status))
    yield from aligned(_COLUMNS, _group_rows(run_status))
    yield from map(log_entry, _details(run_status))


def screen_lines(run_status: dict[str, Any], width: int, height: int | None) -> list[str]:
    """The status in ``width`` columns and ``height`` lines.

    If it is too long, details are dropped first, then running groups. ``height`` None: no limit.
    """
    results = [shorten_line(escape_line(line), width) for line in _results(run_status)]
    top = [*_state_lines(run_status, width), *results]
    table = fitted(_COLUMNS, _group_rows(run_status), width)
    details = list[str]()
    for line in _details(run_status):
        details += wrap(line, width, subsequent_indent="  ")
    if height is None:
        return [*top, *table, *details]
    table = _fit_height(table, height - len(top))
    return [*top, *table, *details][:height]


def _for_screen(run_status: dict[str, Any], is_over: bool) -> list[str]:
    size = shutil.get_terminal_size()
    # A terminal adds an empty line after a line of its full width, and the cursor needs a line.
    # The last status of a run stays on the screen, so it is printed completely.
    return screen_lines(run_status, size.columns - 1, None if is_over else size.lines - 1)


def _state_lines(run_status: dict[str, Any], width: int) -> list[str]:
    """Folder and state of the run. A long path is cut at its start, a long reason at its end."""
    root = run_status["run_dir"]
    state = " ".join(f"{run_status['state']}{_describe_stop(run_status)}".split())
    root_width = max(width // 3, width - len(state) - 2)
    if len(root) > root_width:
        root = f"..{root[2 - root_width :]}"
    wrapped = wrap(f"{root}: {state}", width, subsequent_indent="  ", break_on_hyphens=False)
    if len(wrapped) > _MAX_STATE_LINES:
        wrapped = wrapped[:_MAX_STATE_LINES]
        wrapped[-1] = shorten_line(f"{wrapped[-1]} ....", width)
    return wrapped


def _fit_height(table: list[str], height: int) -> list[str]:
    """The first lines of a table; the last line has the number of groups that do not fit."""
    if len(table) <= height:
        return table
    if height <= 0:
        return []
    shown = table[: height - 1]
    # The first line of the table has the titles.
    hidden = len(table) - max(1, len(shown))
    return [*shown, f"{hidden} more groups"]


def _results(run_status: dict[str, Any]) -> Iterator[str]:
    """Progress, reward and checkpoint of a run, and problems that delay it."""
    rate = f"  {run_status['tokens_per_s']:.0f} tok/s" if run_status["tokens_per_s"] else ""
    reward = f"  reward {run_status['reward']:.3f}" if run_status["reward"] is not None else ""
    step = f"step {run_status['trained_steps']}/{run_status['steps']}"
    yield f"{step}  eta {duration(_eta(run_status))}{reward}{rate}"
    held_out = run_status.get("held_out")
    if held_out:
        scores = "  ".join(f"{name} {value:.3f}" for name, value in held_out["scores"].items())
        yield f"held-out: {scores}  (weights of step {held_out['step']})"
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


def _details(run_status: dict[str, Any]) -> Iterator[str]:
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
    if run_status["hub"]:
        yield from _queue(run_status)
    yield from _shares(run_status["shares"])
    yield from _jobs(run_status)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def _group_rows(run_status: dict[str, Any]) -> list[list[str]]:
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


def _describe_stop(run_status: dict[str, Any]) -> str:
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


def _eta(run_status: dict[str, Any]) -> float | None:
    return run_status["eta_s"] if run_status["state"] == "running" else None


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
