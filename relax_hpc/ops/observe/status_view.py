"""`relax-hpc status`: what `relax_hpc.ops.observe.status` finds, for people and for programs, once
or again and again."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from textwrap import wrap
from typing import Any

from relax_hpc.base.disk_waits import describe_wait
from relax_hpc.base.errors import ConfigError
from relax_hpc.base.rundir import RunDir
from relax_hpc.base.terminal_text import escape_line, log_entry, unfiltered
from relax_hpc.cluster.slurm.commands import Slurm
from relax_hpc.cluster.supervise.unsaved_work import describe_unsaved_work as unsaved_in_words
from relax_hpc.ops.observe.run_state import OVER
from relax_hpc.ops.observe.status import SLURM_S, status
from relax_hpc.ops.observe.status_groups import ALIVE
from relax_hpc.ops.observe.text_table import Column, aligned, fitted, shorten_line

MIN_WATCH_S = 2.0
_SHOWN = 0.01
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
    """Print it; with ``watch_s`` every so many seconds until the run ends. See `states.exit_code`
    for what it says."""
    if watch_s is not None and watch_s < MIN_WATCH_S:
        raise ConfigError(
            f"--watch: found {watch_s:g}, allowed: at least {MIN_WATCH_S:g} s (slurmctld serves "
            "everyone)"
        )
    run, slurm = RunDir(root), Slurm(timeout_s=SLURM_S, tries=1)
    clears = watch_s is not None and sys.stdout.isatty()
    while True:
        run_status = status(run, slurm=slurm)
        is_over = run_status["state"] in OVER
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
    """A status as text: what matters most first, then the groups, then details."""
    yield log_entry(f"{run_status['run_dir']}: {run_status['state']}{_why(run_status)}")
    yield from map(escape_line, _results(run_status))
    yield from aligned(_COLUMNS, _group_rows(run_status))
    yield from map(log_entry, _details(run_status))


def fitted_lines(run_status: dict[str, Any], width: int, height: int | None) -> list[str]:
    """The same in ``width`` columns and ``height`` lines: of what does not fit the details are left
    out, then groups that run. ``height`` None: any number of lines."""
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
    # A line that is as wide as the terminal would be followed by an empty one; the cursor needs a
    # line as well. The last status of a run stays on the terminal, whole.
    return fitted_lines(run_status, size.columns - 1, None if is_over else size.lines - 1)


def _state_lines(run_status: dict[str, Any], width: int) -> list[str]:
    """The run's folder and state; of a long path the end, and of a long reason the beginning."""
    root = run_status["run_dir"]
    state = " ".join(f"{run_status['state']}{_why(run_status)}".split())
    room = max(width // 3, width - len(state) - 2)
    if len(root) > room:
        root = f"..{root[2 - room :]}"
    wrapped = wrap(f"{root}: {state}", width, subsequent_indent="  ", break_on_hyphens=False)
    if len(wrapped) > _MAX_STATE_LINES:
        wrapped = wrapped[:_MAX_STATE_LINES]
        wrapped[-1] = shorten_line(f"{wrapped[-1]} ....", width)
    return wrapped


def _fit_height(table: list[str], height: int) -> list[str]:
    """Lines of a table that fit; the last one says how many groups are left out."""
    if len(table) <= height:
        return table
    if height <= 0:
        return []
    shown = table[: height - 1]
    # The first line of the table has the titles.
    left_out = len(table) - max(1, len(shown))
    return [*shown, f"{left_out} more groups"]


def _results(run_status: dict[str, Any]) -> Iterator[str]:
    """Progress, reward and checkpoint of a run, and whatever keeps it from getting on."""
    rate = f"  {run_status['tokens_per_s']:.0f} tok/s" if run_status["tokens_per_s"] else ""
    reward = f"  reward {run_status['reward']:.3f}" if run_status["reward"] is not None else ""
    step = f"step {run_status['trained_steps']}/{run_status['steps']}"
    yield f"{step}  eta {duration(_eta(run_status))}{reward}{rate}"
    if held_out := run_status.get("held_out"):
        scores = "  ".join(f"{name} {value:.3f}" for name, value in held_out["scores"].items())
        yield f"held-out: {scores}  (weights of step {held_out['step']})"
    saved = run_status["checkpoint"]
    if saved:
        yield f"checkpoint: step {saved['step']}, {duration(saved['age_s'])} ago"
    else:
        yield "checkpoint: none yet"
    if run_status.get("unsaved"):
        yield f"checkpoint: {unsaved_in_words(run_status['unsaved'])}"
    for disk in run_status.get("disk", ()):
        waiting = f"waits {duration(disk['seconds'])} for"
        if disk["loose"]:
            waiting = "keeps the data that it cannot write to"
        yield f"disk: {disk['who']} {waiting} {describe_wait(disk)}"
    if run_status.get("nothing_learned"):
        yield f"nothing was learned from rewards in the last step: {run_status['nothing_learned']}"
    if run_status["preparing"]:
        yield f"preparing: {run_status['preparing']}"
    for wait in run_status["waits"]:
        yield _wait(wait)


def _details(run_status: dict[str, Any]) -> Iterator[str]:
    """Counts and shares: failures, the queue, weights, time."""
    for failure in run_status.get("failures", ())[:_MAX_FAILURES]:
        yield f"first failure: {failure['headline']}"
    yield f"dropped: {_counts(run_status['dropped']) or 'nothing'}"
    if left_out := run_status.get("left_out"):
        yield f"rows left out: {_counts(left_out)}"
    if run_status.get("noted"):
        yield f"noted: {_counts(run_status['noted'])}"
    if weights := run_status["weights"]:
        yield f"weights: newest {weights['newest']}, slowest engine {weights['lag']} behind"
    if without := run_status["without"]:
        names = ", ".join(f"{name} ({state})" for name, state in without.items())
        yield f"without: {names} (rollout.without)"
    if run_status["hub"]:
        yield from _queue(run_status)
    yield from _shares(run_status["shares"])
    yield from _jobs(run_status)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def _group_rows(run_status: dict[str, Any]) -> list[list[str]]:
    """Cells of each group. Groups that do not run come first, because people look for them."""
    groups = run_status["groups"].items()
    ordered = sorted(groups, key=lambda item: item[1]["state"] in ("running", "done"))
    return [[name, *_cells(group)] for name, group in ordered]


def duration(seconds: float | None) -> str:
    """Two units at most: 0.4s, 42s, 4m07s, 3h12m, 2d03h; a dash for what is not known."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f}s"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    return (
        f"{days}d{h:02d}h"
        if days
        else f"{h}h{m:02d}m"
        if hours
        else f"{m}m{s:02d}s"
        if minutes
        else f"{s}s"
    )


def _why(found: dict[str, Any]) -> str:
    if asked := found["stop"]:
        code = f"exit {asked['code']}: " if asked["code"] else ""
        return f" ({code}{asked['reason']})"
    lacks = {
        "the hub": found["hub"] or found["state"] == "queued",
        "squeue": found["squeue"] or not _on_slurm(found),
    }
    silent = [name for name, answers in lacks.items() if not answers]
    return f" (no answer from {' and '.join(silent)})" if silent and not found["finished"] else ""


def _on_slurm(found: dict[str, Any]) -> bool:
    return any(group["job"] for group in found["groups"].values())


def _eta(found: dict[str, Any]) -> float | None:
    return found["eta_s"] if found["state"] == "running" else None


def _queue(found: dict[str, Any]) -> Iterator[str]:
    depth, ages = found["depth"], found.get("oldest_s", {})
    old = {
        name: f" (oldest {duration(age)})"
        for name, age in ages.items()
        if age is not None and depth[name]
    }
    yield (
        f"queue: {depth['generating']} prompt groups in generation{old.get('generating', '')}, "
        f"{depth['ready']} waiting for training{old.get('ready', '')}"
    )
    yield "waiting: " + (", ".join(sorted(set(found["waiting"]))) or "nobody")


def _wait(wait: dict[str, Any]) -> str:
    for_, spent = (
        f"{wait['group']}, which {wait['why']}",
        f"{wait['spent']:.1f} {wait['unit']}-hours spent waiting",
    )
    return (
        f"waits for {for_}: {duration(wait['since_s'])} so far, {spent}; gives up in "
        f"{duration(wait['left_s'])}"
    )


def _shares(found: dict[str, Any]) -> Iterator[str]:
    """Lines with what each role did in the last steps, most of it first; below a hundredth is left
    out."""
    if found["roles"]:
        yield f"time of the last {found['steps']} steps:"
    for role, about in found["roles"].items():
        parts = {what: share for what, share in about["at"].items() if what != "wait"}
        parts |= {f"waits for {peer}": share for peer, share in about["for"].items()}
        parts["waits"] = about["at"].get("wait", 0.0) - sum(about["for"].values())
        shown = sorted(
            ((share, what) for what, share in parts.items() if share >= _SHOWN), reverse=True
        )
        yield f"  {role:<12}" + "  ".join(f"{what} {share:.0%}" for share, what in shown)


def _jobs(found: dict[str, Any]) -> Iterator[str]:
    for kind in ("successor", "spare"):
        if queued := [
            row["job"] for row in found["jobs"] if row["kind"] == kind and row["state"] == "PENDING"
        ]:
            plural = "s" if len(queued) > 1 else ""
            yield f"queued {kind}{plural}: job{plural} {', '.join(queued)}"
    if found["excluded_nodes"]:
        yield f"excluded nodes: {', '.join(found['excluded_nodes'])}"


def _cells(group: dict[str, Any]) -> list[str]:
    reason = " ".join(group["reason"].split())
    work = (
        f"step {group['step']}"
        if "step" in group
        else f"{group['puts']} puts"
        if group["puts"]
        else ""
    )
    long = group["state"] != "queued" and reason
    waits = ", ".join(
        f"standby of {standby['role']} ready ({standby['memory_mb']} MB a rank)"
        for standby in ahead_of(group)
    )
    return [
        f"{group['state']} ({reason})" if group["state"] == "queued" and reason else group["state"],
        str(group["incarnation"] or "-"),
        group["job"] or "-",
        group["nodes"] or "-",
        str(group["ranks"] or "-"),
        duration(group["age_s"]),
        duration(group["time_left_s"]),
        duration(group["last_beat_s"]),
        duration(group["longest_gap_s"]),
        "; ".join(
            part for part in (work, group["doing"], reason[:80] if long else "", waits) if part
        ),
    ]


def ahead_of(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Incarnations that were started ahead and still live, as their group does."""
    return group.get("ahead", []) if group["state"] in ALIVE else []
