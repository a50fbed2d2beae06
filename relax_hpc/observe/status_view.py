"""`relax-hpc status`: what `relax_hpc.observe.status` finds, for people and for programs, once or again and again."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from relax_hpc.disk import in_words
from relax_hpc.errors import ConfigError
from relax_hpc.observe.states import OVER
from relax_hpc.observe.status import SLURM_S, status
from relax_hpc.observe.status_groups import ALIVE
from relax_hpc.rundir import RunDir
from relax_hpc.slurm.commands import Slurm
from relax_hpc.supervise.unsaved import in_words as unsaved_in_words

MIN_WATCH_S = 2.0
_SHOWN = 0.01
_CLEAR = "\x1b[H\x1b[J"
_COLUMNS = (
    ("GROUP", 14),
    ("STATE", 24),
    ("INCARNATION", 6),
    ("JOB", 8),
    ("NODES", 16),
    ("RANKS", 6),
    ("AGE", 8),
    ("LEFT", 8),
    ("BEAT", 8),
    ("GAP", 8),
    ("WORK", 0),
)


def main(root: str, as_json: bool = False, watch_s: float | None = None) -> int:
    """Print it; with ``watch_s`` every so many seconds until the run ends. See `states.exit_code` for what it says."""
    if watch_s is not None and watch_s < MIN_WATCH_S:
        raise ConfigError(
            f"--watch: found {watch_s:g}, allowed: at least {MIN_WATCH_S:g} s (slurmctld serves everyone)"
        )
    run, slurm = RunDir(root), Slurm(timeout_s=SLURM_S, tries=1)
    while True:
        found = status(run, slurm=slurm)
        text = json.dumps(found) if as_json else "\n".join(lines(found))
        if watch_s and not as_json:
            text = _CLEAR + text if sys.stdout.isatty() else text + "\n"
        print(text, flush=True)
        if watch_s is None or found["state"] in OVER:
            return found["exit_code"]
        time.sleep(watch_s)


def lines(found: dict[str, Any]) -> Iterator[str]:
    """A status as text."""
    yield f"{found['run_dir']}: {found['state']}{_why(found)}"
    rate = f"  {found['tokens_per_s']:.0f} tok/s" if found["tokens_per_s"] else ""
    reward = f"  reward {found['reward']:.3f}" if found["reward"] is not None else ""
    yield f"step {found['trained_steps']}/{found['steps']}  eta {duration(_eta(found))}{reward}{rate}"
    if found.get("nothing_learned"):
        yield f"nothing was learned from rewards in the last step: {found['nothing_learned']}"
    if found["preparing"]:
        yield f"preparing: {found['preparing']}"
    if weights := found["weights"]:
        yield f"weights: newest {weights['newest']}, slowest engine {weights['lag']} behind"
    if without := found["without"]:
        yield "without: " + ", ".join(f"{name} ({state})" for name, state in without.items()) + " (rollout.without)"
    for told in found.get("disk", ()):
        what = "keeps what it cannot write to" if told["loose"] else f"waits {duration(told['seconds'])} for"
        yield f"disk: {told['who']} {what} {in_words(told)}"
    saved = found["checkpoint"]
    yield f"checkpoint: step {saved['step']}, {duration(saved['age_s'])} ago" if saved else "checkpoint: none yet"
    if found.get("unsaved"):
        yield f"checkpoint: {unsaved_in_words(found['unsaved'])}"
    for wait in found["waits"]:
        yield _wait(wait)
    if found["hub"]:
        yield from _queue(found)
    yield "dropped: " + (", ".join(f"{k} {v}" for k, v in sorted(found["dropped"].items())) or "nothing")
    if left_out := found.get("left_out"):
        yield "rows left out: " + ", ".join(f"{reason} {count}" for reason, count in sorted(left_out.items()))
    if found.get("noted"):
        yield "noted: " + ", ".join(f"{k} {v}" for k, v in sorted(found["noted"].items()))
    yield from _shares(found["shares"])
    yield from _jobs(found)
    yield _row([title for title, _ in _COLUMNS])
    for name, group in found["groups"].items():
        yield _row([name, *_cells(group)])


def duration(seconds: float | None) -> str:
    """Two units at most: 0.4s, 42s, 4m07s, 3h12m, 2d03h; a dash for what is not known."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f}s"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    return f"{days}d{h:02d}h" if days else f"{h}h{m:02d}m" if hours else f"{m}m{s:02d}s" if minutes else f"{s}s"


def _why(found: dict[str, Any]) -> str:
    if asked := found["stop"]:
        code = f"exit {asked['code']}: " if asked["code"] else ""
        return f" ({code}{asked['reason']})"
    lacks = {"the hub": found["hub"] or found["state"] == "queued", "squeue": found["squeue"] or not _on_slurm(found)}
    silent = [name for name, answers in lacks.items() if not answers]
    return f" (no answer from {' and '.join(silent)})" if silent and not found["finished"] else ""


def _on_slurm(found: dict[str, Any]) -> bool:
    return any(group["job"] for group in found["groups"].values())


def _eta(found: dict[str, Any]) -> float | None:
    return found["eta_s"] if found["state"] == "running" else None


def _queue(found: dict[str, Any]) -> Iterator[str]:
    depth, ages = found["depth"], found.get("oldest_s", {})
    old = {name: f" (oldest {duration(age)})" for name, age in ages.items() if age is not None}
    yield (
        f"queue: {depth['generating']} prompt groups in generation{old.get('generating', '')}, "
        f"{depth['ready']} waiting for training{old.get('ready', '')}"
    )
    yield "waiting: " + (", ".join(sorted(set(found["waiting"]))) or "nobody")


def _wait(wait: dict[str, Any]) -> str:
    for_, spent = f"{wait['group']}, which {wait['why']}", f"{wait['spent']:.1f} {wait['unit']}-hours spent waiting"
    return f"waits for {for_}: {duration(wait['since_s'])} so far, {spent}; gives up in {duration(wait['left_s'])}"


def _shares(found: dict[str, Any]) -> Iterator[str]:
    """Lines with what each role did in the last steps, most of it first; below a hundredth is left out."""
    if found["roles"]:
        yield f"time of the last {found['steps']} steps:"
    for role, about in found["roles"].items():
        parts = {what: share for what, share in about["at"].items() if what != "wait"}
        parts |= {f"waits for {peer}": share for peer, share in about["for"].items()}
        parts["waits"] = about["at"].get("wait", 0.0) - sum(about["for"].values())
        shown = sorted(((share, what) for what, share in parts.items() if share >= _SHOWN), reverse=True)
        yield f"  {role:<12}" + "  ".join(f"{what} {share:.0%}" for share, what in shown)


def _jobs(found: dict[str, Any]) -> Iterator[str]:
    for kind in ("successor", "spare"):
        if queued := [row["job"] for row in found["jobs"] if row["kind"] == kind and row["state"] == "PENDING"]:
            yield f"{kind}s queued: {', '.join(queued)}"
    if found["excluded_nodes"]:
        yield f"excluded nodes: {', '.join(found['excluded_nodes'])}"


def _cells(group: dict[str, Any]) -> list[str]:
    reason = " ".join(group["reason"].split())
    work = f"step {group['step']}" if "step" in group else f"{group['puts']} puts" if group["puts"] else ""
    long = group["state"] != "queued" and reason
    waits = ", ".join(
        f"{one['role']} {one['incarnation']} waits ({one['memory_mb']} MB a rank)" for one in ahead_of(group)
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
        "; ".join(part for part in (work, group["doing"], reason[:80] if long else "", waits) if part),
    ]


def ahead_of(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Incarnations that were started ahead and still live, as their group does."""
    return group.get("ahead", []) if group["state"] in ALIVE else []


def _row(cells: list[str]) -> str:
    # A long cell pushes the others aside instead of being cut: node lists are for copying.
    return " ".join(cell.ljust(width - 1) for cell, (_, width) in zip(cells, _COLUMNS, strict=True)).rstrip()
