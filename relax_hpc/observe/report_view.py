"""`relax-hpc report`: what `relax_hpc.observe.report` finds, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from relax_hpc.errors import EXIT_DONE
from relax_hpc.observe.report import report
from relax_hpc.observe.status_view import duration
from relax_hpc.rundir import RunDir

_FEW = 0.0005
"""Share of the time below which a wait is left out of the text."""
_HOURS = (
    ("used", "used"),
    ("waiting", "waiting"),
    ("lost_restarting", "lost to faults, restarting"),
    ("lost_again", "lost to faults, trained again"),
    ("rest", "starting and rest"),
)


def main(root: str, as_json: bool = False, first: int | None = None, last: int | None = None) -> int:
    """Print the report."""
    found = report(RunDir(root), first, last)
    print(json.dumps(found) if as_json else "\n".join(lines(found)))
    return EXIT_DONE


def lines(found: dict[str, Any]) -> Iterator[str]:
    """A report as text, at most 100 columns."""
    trained = "no step" if found["first_step"] is None else f"steps {found['first_step']} to {found['last_step']}"
    ended = "finished" if found["finished"] else "not finished"
    yield f"{found['run_dir']}: {ended}, {trained} in {duration(found['wall_s'])}"
    yield from (f"note: {note}" for note in found["notes"])
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
    order = sorted(kinds, key=lambda kind: -sum(about["seconds"].get(kind, 0.0) for about in roles.values()))
    yield ""
    yield f"{'SECONDS, SHARE':<14}" + "".join(f"{role:>16}" for role in roles)
    for kind in order:
        cells = (_cell(about["seconds"].get(kind, 0.0), about["share"].get(kind, 0.0)) for about in roles.values())
        yield f"{kind:<14}" + "".join(cells)
    yield f"{'all':<14}" + "".join(_cell(about["worker_s"], 1.0) for about in roles.values())


def _cell(seconds: float, share: float) -> str:
    return f"{seconds:>11.1f} {share:>4.0%}" if seconds else f"{'-':>16}"


def _waits(waits: Sequence[dict[str, Any]]) -> Iterator[str]:
    shown = [wait for wait in waits if wait["share"] >= _FEW]
    if shown:
        yield ""
        yield f"{'WAITS':<14}{'FOR':<12}{'WHY':<34}{'SECONDS':>10} {'SHARE':>6}"
    for wait in shown:
        about = f"{wait['role']:<14}{wait['peer'] or '-':<12}{wait['reason'] or '-':<34}"
        yield f"{about}{wait['seconds']:>10.1f} {wait['share']:>6.1%}"


def _pace(pace: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield (
        f"step: {pace['step_s']:.2f} s (median of {pace['steps']}), rollout busy {pace['rollout_s']:.2f} s of it, "
        f"actor {pace['actor_s']:.2f} s"
    )
    yield f"overlap efficiency: {pace['overlap']:.0%} (the busier side over the step; 100%: it never waits)"


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
    yield f"goodput: {good['trained_tokens_per_s']:.0f} trained tokens/s, {good['trained_tokens']:.0f} in all"
    share = f"{good['trained_share']:.1%}" if good["trained_share"] is not None else "-"
    dropped = ", ".join(f"{reason} {count}" for reason, count in good["dropped_samples"].items()) or "nothing"
    yield f"tokens generated: {good['generated_tokens']:.0f}, {share} of them trained; samples dropped: {dropped}"


def _hours(hours: dict[str, Any]) -> Iterator[str]:
    asked = hours["asked"]
    yield f"{hours['unit']}-hours: asked {asked:.3g}"
    for name, title in _HOURS if asked else ():
        yield f"  {title:<30}{hours[name]:>10.3g} {hours[name] / asked:>6.1%}"


def _restarts(restarts: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not restarts:
        yield "restarts: none"
        return
    yield f"{'RESTARTS':<14}{'INCARNATION':>6} {'AT':>8} {'GAP':>8}  WHY"
    for one in restarts:
        why = " ".join(one["why"].split()) or ("" if one["fault"] else "asked to")
        cells = f"{one['group']:<14}{one['incarnation']:>6} {duration(one['at_s']):>8} {duration(one['gap_s']):>8}"
        yield f"{cells}  {why[:60]}"


def _count(number: int, unit: str) -> str:
    ending = "es" if unit.endswith("s") else "s"
    return f"{number} {unit}{ending if number > 1 else ''}"
