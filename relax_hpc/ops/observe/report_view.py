"""`relax-hpc report`: print the report of a run as text or as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from relax_hpc.base.errors import EXIT_DONE
from relax_hpc.base.rundir import RunDir
from relax_hpc.base.terminal_text import escape_line
from relax_hpc.ops.observe.cost_view import cost_lines
from relax_hpc.ops.observe.length_comparison import length_lines
from relax_hpc.ops.observe.recovery import PARTS
from relax_hpc.ops.observe.report import report
from relax_hpc.ops.observe.status_view import duration
from relax_hpc.ops.observe.text_table import Column, aligned

_WIDTH, _MIN_REASON_CHARS = 100, 40
"""Columns of the text, and the minimum of columns for a reason."""
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
_MIN_WAIT_SHARE = 0.0005
"""Waits with a smaller share of the time are not printed."""
_HOURS = (
    ("used", "used"),
    ("waiting", "waiting"),
    ("lost_restarting", "lost to faults, restarting"),
    ("lost_again", "lost to faults, trained again"),
    ("rest", "starting and other"),
)


def main(
    root: str, as_json: bool = False, first: int | None = None, last: int | None = None
) -> int:
    """Print the report."""
    values = report(RunDir(Path(root)), first, last)
    print(json.dumps(values) if as_json else "\n".join(lines(values)))
    return EXIT_DONE


def lines(values: dict[str, Any]) -> Iterator[str]:
    """A report as text of at most 100 columns; control characters in it are escaped."""
    return map(escape_line, _lines(values))


def _lines(values: dict[str, Any]) -> Iterator[str]:
    yield from _indented("", values["sentence"], 0)
    trained = "no step"
    if values["first_step"] is not None:
        trained = f"steps {values['first_step']} to {values['last_step']}"
    ended = "finished" if values["finished"] else "not finished"
    yield f"{values['run_dir']}: {ended}, {trained} in {duration(values['wall_s'])}"
    yield from (f"note: {note}" for note in values["notes"])
    yield from (f"first failure: {failure['headline']}" for failure in values["failures"])
    if values["roles"]:
        yield from _roles(values["roles"])
        yield from _waits(values["waits"])
    if values["pace"]:
        yield from _pace(values["pace"])
    if values["split"]:
        yield from _split(values["split"], values["max_staleness"])
    if values["goodput"]:
        yield from _goodput(values["goodput"])
    yield from length_lines(values["lengths"])
    yield from _hours(values["hours"])
    yield from cost_lines(values["cost"])
    yield from _restarts(values["restarts"])
    yield from _recoveries(values["restarts"])


def _roles(roles: dict[str, Any]) -> Iterator[str]:
    """A table of kinds of work (lines) and roles (columns), the longest kinds first."""
    totals = Counter[str]()
    for role in roles.values():
        totals.update(role["seconds"])
    columns = [Column("SECONDS, SHARE"), *(Column(name, is_number=True) for name in roles)]
    rows = list[list[str]]()
    for kind, _ in totals.most_common():
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
        if wait["share"] >= _MIN_WAIT_SHARE
    ]
    if rows:
        yield ""
        yield from aligned(_WAITS, rows)


def _pace(pace: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield (
        f"step: {pace['step_s']:.2f} s (median of {pace['steps']}), rollout busy "
        f"{pace['rollout_s']:.2f} s of it, actor {pace['actor_s']:.2f} s"
    )
    yield (
        f"overlap efficiency: {pace['overlap']:.0%} (busy time of the busier role / step; 100%: "
        "it never waits)"
    )


def _split(split: dict[str, Any], max_staleness: int) -> Iterator[str]:
    present, suggested, busy = split["present"], split["suggested"], split["suggested_busy_s"]
    rollout = _count(present["rollout"], split["unit"])
    yield f"split: {rollout} for rollout and {present['actor']} for training"
    if present == suggested:
        yield f"       no other split of {sum(present.values())} would be more even"
    else:
        sides = f"{busy['rollout']:.2f} and {busy['actor']:.2f} s of a step"
        better = f"{suggested['rollout']} and {suggested['actor']}"
        yield f"       {better} would be even: busy {sides}, if time is proportional to 1 / units"
    if not max_staleness:
        yield "       (at max_staleness 0 they take turns: each waits for the other in any split)"


def _goodput(goodput: dict[str, Any]) -> Iterator[str]:
    yield (
        f"goodput: {goodput['trained_tokens_per_s']:.0f} trained tokens/s, "
        f"{goodput['trained_tokens']:.0f} in total"
    )
    trained_share = goodput["trained_share"]
    share = f"{trained_share:.1%}" if trained_share is not None else "-"
    counts = [f"{reason} {count}" for reason, count in goodput["dropped_samples"].items()]
    yield (
        f"tokens generated: {goodput['generated_tokens']:.0f}, {share} of them trained; samples "
        f"dropped: {', '.join(counts) or 'nothing'}"
    )


def _hours(hours: dict[str, Any]) -> Iterator[str]:
    total = hours["asked"]
    yield f"{hours['unit']}-hours: held {total:.3g}"
    for name, title in _HOURS if total else ():
        yield f"  {title:<30}{hours[name]:>10.3g} {hours[name] / total:>6.1%}"


def _restarts(restarts: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not restarts:
        yield "restarts: none"
        return
    rows, reasons = list[list[str]](), list[str]()
    for restart in restarts:
        times = duration(restart["at_s"]), duration(restart["gap_s"])
        rows.append([restart["group"], str(restart["incarnation"]), *times, ""])
        reasons.append(restart["why"] or ("" if restart["fault"] else "requested"))
    titles, *cells = aligned(_RESTARTS, rows)
    yield titles
    for line, reason in zip(cells, reasons, strict=True):
        # The reason is printed completely, because readers search for it.
        yield from _indented(f"{line}  ", reason, len(titles) - len("WHY"))


def _recoveries(restarts: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Table of the seconds from each fault to the next trained step, by part."""
    columns = [
        Column("RECOVERY"),
        Column("INCARNATION", is_number=True),
        Column("TOTAL", is_number=True),
        *(Column(part.upper(), is_number=True) for part in PARTS),
    ]
    rows = list[list[str]]()
    for restart in restarts:
        seconds = restart.get("recovery")
        if seconds:
            cells = [f"{seconds[part]:.1f}" for part in ("total", *PARTS)]
            rows.append([restart["group"], str(restart["incarnation"]), *cells])
    if rows:
        yield from aligned(columns, rows)


def _indented(start: str, text: str, indent: int) -> Iterator[str]:
    """``start``, then ``text`` in a column that begins at ``indent``."""
    width = max(_MIN_REASON_CHARS, _WIDTH - indent)
    line = " ".join(text.split())
    # Paths are not broken, so that they can be copied.
    pieces = wrap(line, width, break_on_hyphens=False, break_long_words=False) or [""]
    yield f"{start.ljust(indent)}{pieces[0]}".rstrip()
    for piece in pieces[1:]:
        yield f"{' ' * indent}{piece}"


def _count(number: int, unit: str) -> str:
    ending = "es" if unit.endswith("s") else "s"
    return f"{number} {unit}{ending if number > 1 else ''}"
