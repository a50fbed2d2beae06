"""Shares of each role's time: as tags of a step, and back from the steps of metrics.jsonl."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from relax_hpc.base.metrics.accounting import OTHER
from relax_hpc.base.metrics.spans import FOR, KINDS

IDLE = "idle/"
_WAIT = "wait"
_SECONDS = re.compile(rf"perf/(.+)_({'|'.join((*KINDS, OTHER))})_s")
_WAITED = re.compile(rf"{IDLE}(.+?){FOR}(.+)")


def tags_of_time(role: str, seconds: Mapping[str, float]) -> dict[str, float]:
    """``seconds`` as `Spans.take` gives them, as tags: what was waited, of all, for whom, and
    seconds by kind."""
    total = sum(seconds.values())
    if not total:
        return {}
    waited = {what: spent for what, spent in seconds.items() if what.startswith(_WAIT)}
    tags = {f"{IDLE}{role}": sum(waited.values()) / total}
    tags |= {
        f"{IDLE}{role}{what[len(_WAIT) :]}": s / total
        for what, s in waited.items()
        if what != _WAIT
    }
    kinds = {what: spent for what, spent in seconds.items() if what not in waited} | {
        _WAIT: sum(waited.values())
    }
    return tags | {f"perf/{role}_{what}_s": spent for what, spent in kinds.items()}


def is_by_peer(tag: str) -> bool:
    """Whether it is a part of another tag's idle time.

    >>> is_by_peer("idle/actor_for_rollout"), is_by_peer("idle/actor_fwd")
    (True, False)
    """
    return bool(_WAITED.fullmatch(tag))


def shares_of_time(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Shares of each role's time in these steps: `at` the kinds, which add up to 1, and of the
    waiting `for` whom.

    >>> step = {"idle/actor": 0.25, "idle/actor_for_rollout": 0.25}
    >>> shares_of_time([{**step, "perf/actor_train_s": 3, "perf/actor_wait_s": 1}])
    {'actor': {'at': {'train': 0.75, 'wait': 0.25}, 'for': {'rollout': 0.25}}}
    """
    at: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    peers: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        spent = {match.groups(): row[tag] for tag in row if (match := _SECONDS.fullmatch(tag))}
        for (role, what), seconds in spent.items():
            at[role][what] += seconds
        for tag, match in ((tag, _WAITED.fullmatch(tag)) for tag in row):
            if match:
                whole = sum(seconds for (role, _), seconds in spent.items() if role == match[1])
                peers[match[1]][match[2]] += row[tag] * whole
    totals = {role: sum(seconds.values()) for role, seconds in at.items()}
    return {
        role: {"at": _over(at[role], total), "for": _over(peers[role], total)}
        for role, total in sorted(totals.items())
        if total
    }


def _over(seconds: Mapping[str, float], total: float) -> dict[str, float]:
    """Shares of ``total``, largest first."""
    return {
        what: spent / total
        for what, spent in sorted(seconds.items(), key=lambda item: -item[1])
        if spent
    }
