"""`relax-hpc report`: what `relax_hpc.ops.observe.report` finds, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Any

from relax_hpc.base.errors import EXIT_DONE
from relax_hpc.base.rundir import RunDir
from relax_hpc.base.terminal_text import escape_line
from relax_hpc.ops.observe.report import report
from relax_hpc.ops.observe.status_view import duration
from relax_hpc.ops.observe.text_table import Column, aligned

_WIDTH, _MIN_REASON_CHARS = 100, 40
"""Columns of the text, and columns that are left for a reason in any case."""
_RESTARTS = (
    Column("RESTARTS"),
    Column("INCARNATION", is_number=True),
    Column("AT", is_number=True),
    Column("GAP", is_number=True),
    Column("WHY"),
)
_WAITS = (
    Column("WAITS"),
    Column("FOR"),
    Column("WHY"),
    Column("SECONDS", is_number=True),
    Column("SHARE", is_number=True),
)
_FEW = 0.0005
"""Share of the time below which a wait is left out of the text."""
_HOURS = (
    ("used", "used"),
    ("waiting", "waiting"),
    ("lost_restarting", "lost to faults, restarting"),
    ("lost_again", "lost to faults, trained again"),
    ("rest", "starting and rest"),
)


def main(
    root: str, as_json: bool = False, first: int | None = None, last: int | None = None
) -> int:
    """Print the report."""
    found = report(RunDir(root), first, last)
    print(json.dumps(found) if as_json else "\n".join(lines(found)))
    return EXIT_DONE


def lines(found: dict[str, Any]) -> Iterator[str]:
    """A report as text, at most 100 columns; foreign text in it is neutralised."""
    return map(escape_line, _lines(found))


def _lines(found: dict[str, Any]) -> Iterator[str]:
    trained = (
        "no step"
        if found["first_step"] is None
        else f"steps {found['first_step']} to {found['last_step']}"
    )
    ended = "finished" if found["finished"] else "not finished"
    yield f"{found['run_dir']}: {ended}, {trained} in {duration(found['wall_s'])}"
    yield from _bottleneck(found["bottleneck"])
    yield from (f"note: {note}" for note in found["notes"])
    yield from (f"first failure: {failure['headline']}" for failure in found["failures"])
    if found["roles"]:
        yield from _roles(found["roles"])
        yield from _waits(found["waits"])
    if found["pace"]:
        yield from _pace(found["pace"])
    if found["split"]:
        yield from _split(found["split"], found["max_staleness"])
    if found["goodput"]:
        yield from _goodput(found["goodput"])
    yield from _hours(found["hours"])
    yield from _restarts(found["restarts"])


def _roles(roles: dict[str, Any]) -> Iterator[str]:
    """Kinds down, roles across, those first that took most time of all."""
    kinds = {kind for about in roles.values() for kind in about["seconds"]}
    order = sorted(
        kinds, key=lambda kind: -sum(about["seconds"].get(kind, 0.0) for about in roles.values())
    )
    columns = [Column("SECONDS, SHARE"), *(Column(role, is_number=True) for role in roles)]
    rows = list[list[str]]()
    for kind in order:
        rows.append([kind, *(_cell_of_kind(role, kind) for role in roles.values())])
    rows.append(["all", *(_cell(role["worker_s"], 1.0) for role in roles.values())])
    yield ""
    yield from aligned(columns, rows)


def _cell_of_kind(role: dict[str, Any], kind: str) -> str:
    return _cell(role["seconds"].get(kind, 0.0), role["share"].get(kind, 0.0))


def _cell(seconds: float, share: float) -> str:
    return f"{seconds:>9.1f} {share:>4.0%}" if seconds else "-"


def _waits(waits: Sequence[dict[str, Any]]) -> Iterator[str]:
    rows = [
        [
            wait["role"],
            wait["peer"] or "-",
            wait["reason"] or "-",
            f"{wait['seconds']:.1f}",
            f"{wait['share']:.1%}",
        ]
        for wait in waits
        if wait["share"] >= _FEW
    ]
    if rows:
        yield ""
        yield from aligned(_WAITS, rows)


def _bottleneck(bottleneck: dict[str, Any] | None) -> Iterator[str]:
    """Line about the side of a step that keeps the other waiting."""
    if bottleneck is None:
        return
    role, busy, waiting = (bottleneck[name] for name in ("role", "busy_share", "waiting_share"))
    if not role:
        yield f"bottleneck: none; rollout and actor are both busy for {busy:.0%} of a step"
        return
    other = "actor" if role == "rollout" else "rollout"
    yield (
        f"bottleneck: {role}, busy for {busy:.0%} of a step; {other} waits for it "
        f"{waiting:.0%} of its time"
    )


def _pace(pace: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield (
        f"step: {pace['step_s']:.2f} s (median of {pace['steps']}), rollout busy "
        f"{pace['rollout_s']:.2f} s of it, actor {pace['actor_s']:.2f} s"
    )
    yield (
        f"overlap efficiency: {pace['overlap']:.0%} (the busier side over the step; 100%: it "
        "never waits)"
    )


def _split(split: dict[str, Any], max_staleness: int) -> Iterator[str]:
    now, then, busy = split["present"], split["suggested"], split["suggested_busy_s"]
    unit, total = split["unit"], sum(now.values())
    yield f"split: {_count(now['rollout'], unit)} for rollout and {now['actor']} for training"
    if now == then:
        yield f"       no other of {total} would be more even"
    else:
        sides = f"{busy['rollout']:.2f} and {busy['actor']:.2f} s of a step"
        best = f"{then['rollout']} and {then['actor']}"
        yield f"       {best} would be even: busy {sides}, if twice as many take half the time"
    if not max_staleness:
        yield "       (at max_staleness 0 they take turns: each waits for the other in any split)"


def _goodput(good: dict[str, Any]) -> Iterator[str]:
    yield (
        f"goodput: {good['trained_tokens_per_s']:.0f} trained tokens/s, "
        f"{good['trained_tokens']:.0f} in all"
    )
    share = f"{good['trained_share']:.1%}" if good["trained_share"] is not None else "-"
    dropped = (
        ", ".join(f"{reason} {count}" for reason, count in good["dropped_samples"].items())
        or "nothing"
    )
    yield (
        f"tokens generated: {good['generated_tokens']:.0f}, {share} of them trained; samples "
        f"dropped: {dropped}"
    )


def _hours(hours: dict[str, Any]) -> Iterator[str]:
    asked = hours["asked"]
    yield f"{hours['unit']}-hours: asked {asked:.3g}"
    for name, title in _HOURS if asked else ():
        yield f"  {title:<30}{hours[name]:>10.3g} {hours[name] / asked:>6.1%}"


def _restarts(restarts: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not restarts:
        yield "restarts: none"
        return
    rows, reasons = list[list[str]](), list[str]()
    for restart in restarts:
        times = duration(restart["at_s"]), duration(restart["gap_s"])
        rows.append([restart["group"], str(restart["incarnation"]), *times, ""])
        reasons.append(restart["why"] or ("" if restart["fault"] else "asked to"))
    titles, *cells = aligned(_RESTARTS, rows)
    yield titles
    for line, reason in zip(cells, reasons, strict=True):
        # Whole: the reason is what somebody looks for.
        yield from _hanging(f"{line}  ", reason, len(titles) - len("WHY"))


def _hanging(start: str, text: str, indent: int) -> Iterator[str]:
    """``text`` behind ``start``, in lines of at most 100 columns that begin under each other."""
    room = max(_MIN_REASON_CHARS, _WIDTH - indent)
    line = " ".join(text.split())
    # Paths stay whole, for copying.
    pieces = wrap(line, room, break_on_hyphens=False, break_long_words=False) or [""]
    yield f"{start.ljust(indent)}{pieces[0]}".rstrip()
    for piece in pieces[1:]:
        yield f"{' ' * indent}{piece}"


def _count(number: int, unit: str) -> str:
    ending = "es" if unit.endswith("s") else "s"
    return f"{number} {unit}{ending if number > 1 else ''}"
