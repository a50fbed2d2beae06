"""The arithmetic of the recovery benchmark: from what was seen of one fault to its figures, and
from those to a table.

All times are seconds; moments are seconds since 1970.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

EXIT_S, STEP_S, JOB_S = 1.0, 2.0, 5.0
"""Targets: detection of an exit, restart as a step, restart as a job without its wait in the
queue."""
NEVER = math.inf


@dataclass(kw_only=True, slots=True)
class Record:
    """What was seen of one fault. A moment that did not come is NEVER."""

    layout: str
    policy: str
    fault: str
    victim: str
    """Group that the fault took."""
    beat_s: float
    lease_s: float
    at: float
    job: str = ""
    """In which the victim was."""
    step: int
    """Newest step that was trained before."""
    detected: float = NEVER
    launched: float = NEVER
    """The victim's new incarnation was started; `beaten`: it had joined and sent its first beat."""
    beaten: float = NEVER
    left: float = NEVER
    """The victim's job was seen to run no more, where that may be the first sign of the fault."""
    queued_s: float = 0.0
    """How long the job that it went on in waited in the queue; 0: the same job as before."""
    new_job: bool = False
    helped: str = ""
    """What a user had to do, where the run does not come back by itself."""
    accepted: list[float] = field(default_factory=list)
    """Moments after the fault at which samples were accepted."""
    steps: list[tuple[float, int]] = field(default_factory=list)
    """(moment, step) of every step that was trained, from the last one before the fault on."""
    gaps: dict[str, float] = field(default_factory=dict)
    """Longest gap between two beats of each process of the other groups; of a restart: how long
    each group was gone."""
    lost: float = math.nan
    """Known once the run has ended in good order, as `duplicated`."""
    duplicated: float = math.nan


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one fault; see `COLUMNS`."""

    detect: float
    restart: float
    working: float
    caught_up: float
    others: float
    training: float
    again: float
    lost: float
    duplicated: float


COLUMNS = {
    "detect": "until the supervisor, or Slurm, says that the group is gone",
    "restart": "from there until it is started again; * in another job, without its wait in the "
    "queue (known to 1 s)",
    "working": "until the new incarnation has beaten and a sample was accepted, or a step trained",
    "caught_up": "until a step beyond all that were trained before is trained with the new "
    "incarnation",
    "others": "longest gap between two beats of a process of the other groups; of a restart: how "
    "long they were gone",
    "training": "longest gap between two trained steps, where the actor is not the victim",
    "again": "steps that were trained a second time",
    "lost": "samples that no surviving step trained",
    "duplicated": "samples that surviving steps trained twice",
}
"""Column -> what it says."""


def result(record: Record) -> Result:
    """The figures of one fault; NEVER what did not come, nan what is of no meaning."""
    after = [(moment, step) for moment, step in record.steps if moment > record.at]
    return Result(
        detect=record.detected - record.at,
        restart=max(0.0, record.launched - record.detected - record.queued_s)
        if record.launched < NEVER
        else NEVER,
        working=_first(_signs(record, after), record.beaten) - record.at,
        caught_up=_caught_up(record, after) - record.at,
        others=max(record.gaps.values(), default=math.nan),
        training=math.nan
        if record.victim == "actor"
        else longest_gap(moment for moment, _ in record.steps),
        again=_repeated(record.step, [step for _, step in after]),
        lost=record.lost,
        duplicated=record.duplicated,
    )


def _signs(record: Record, after: Sequence[tuple[float, int]]) -> list[float]:
    """Moments that show the victim at work: only engines accept samples, and all groups are needed
    for a step."""
    return record.accepted if record.victim == "rollout" else [moment for moment, _ in after]


def _caught_up(record: Record, after: Sequence[tuple[float, int]]) -> float:
    """When training passed the step that it had reached; what was under way at the fault was still
    trained."""
    reached = max([record.step, *(step for moment, step in after if moment <= record.beaten)])
    return _first((moment for moment, step in after if step > reached), record.beaten)


def _repeated(step: int, later: Sequence[int]) -> int:
    """How many of ``later`` are no higher than one before them, beginning with ``step``."""
    return sum(
        number <= top for number, top in zip(later, accumulate([step, *later], max), strict=False)
    )


def _first(moments: Iterable[float], since: float) -> float:
    return min((moment for moment in moments if moment > since), default=NEVER)


def longest_gap(moments: Iterable[float]) -> float:
    """Between two of ascending ``moments``; nan of fewer than two."""
    return max((later - earlier for earlier, later in pairwise(moments)), default=math.nan)


def missed(record: Record) -> list[str]:
    """Columns that miss their target (see `targets`); of a policy that has none, none."""
    if record.policy != "toolkit":
        return []
    found = result(record)
    silent = record.fault.startswith(("node:", "down:"))
    limits = {
        "detect": record.lease_s + 2 * record.beat_s if silent else EXIT_S,
        "restart": JOB_S if record.new_job else STEP_S,
        "others": 2 * record.beat_s,
        "lost": 0.0,
        "duplicated": 0.0,
    }
    late = [name for name, limit in limits.items() if getattr(found, name) > limit]
    return late + [name for name in ("working", "caught_up") if getattr(found, name) == NEVER]


def targets(beat_s: float, lease_s: float) -> str:
    """The targets in words."""
    return (
        f"targets: detect < {EXIT_S:g} s of an exit, < {lease_s + 2 * beat_s:g} s (lease + two "
        f"beats) of a power loss; restart < {STEP_S:g} s as a step, < {JOB_S:g} s as a job "
        f"(marked *) beside its wait in the queue; others <= {2 * beat_s:g} s (twice the beat); "
        "lost 0, duplicated 0"
    )


def share(ids: Iterable[str], records: Sequence[Record], prompts_per_step: int) -> list[int]:
    """How many of the samples ``ids`` each of a run's faults has on its account: the last that
    reached their step.

    A fault reaches from the first step that was trained after it, be it a second time.
    """
    reach = [
        min((s for moment, s in r.steps if moment > r.at), default=r.step + 1) for r in records
    ]
    counts = [0] * len(records)
    for name in ids:
        step = int(name.partition(".")[0]) // prompts_per_step
        # What was there before the first fault is on its account too: somebody has to answer for
        # it.
        counts[max((place for place, low in enumerate(reach) if low <= step), default=0)] += 1
    return counts


def quantile(values: Sequence[float], q: float) -> float:
    """The nearest-rank ``q`` quantile of at least one value."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def table(records: Sequence[Record]) -> list[str]:
    """Lines of text: one a layout, fault and policy, in the order of ``records``; p50/p95 where
    there are several."""
    head = ("layout", "fault", "policy", *(name.replace("_", " ") for name in COLUMNS), "")
    rows = [head]
    for key in dict.fromkeys((r.layout, r.fault, r.policy) for r in records):
        same = [r for r in records if (r.layout, r.fault, r.policy) == key]
        rows.append((*key, *(_cell(name, same) for name in COLUMNS), _verdict(same)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        words = [word.ljust(width) if place in (0, 1, 2, len(row) - 1) else word.rjust(width)
                 for place, (word, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        lines.append("  ".join(words).rstrip())
    return lines


def _cell(column: str, same: Sequence[Record]) -> str:
    values = [value for r in same if not math.isnan(value := getattr(result(r), column))]
    if not values:
        return "-"
    ends = [quantile(values, 0.5), quantile(values, 0.95)] if len(values) > 1 else values
    counted = column in ("again", "lost", "duplicated")
    texts = [
        "never" if value == NEVER else f"{value:.0f}" if counted else f"{value:.2f}"
        for value in ends
    ]
    return "/".join(texts) + ("*" if column == "restart" and same[0].new_job else "")


def _verdict(same: Sequence[Record]) -> str:
    late = dict.fromkeys(name for r in same for name in missed(r))
    words = ["MISSED " + ", ".join(late)] if late else ["ok"] if same[0].policy == "toolkit" else []
    return "; ".join([*words, *dict.fromkeys(r.helped for r in same if r.helped)])
