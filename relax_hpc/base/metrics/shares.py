"""Shares of each role's time: as tags of a step, and summed over steps of metrics.jsonl."""

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
    """Tags for the ``seconds`` by kind of `Spans.take`: idle shares by peer, and seconds by
    kind."""
    total = sum(seconds.values())
    if not total:
        return {}
    waits = {kind: spent for kind, spent in seconds.items() if kind.startswith(_WAIT)}
    tags = {f"{IDLE}{role}": sum(waits.values()) / total}
    for kind, spent in waits.items():
        if kind != _WAIT:
            tags[f"{IDLE}{role}{kind.removeprefix(_WAIT)}"] = spent / total
    for kind, spent in seconds.items():
        if kind not in waits:
            tags[f"perf/{role}_{kind}_s"] = spent
    tags[f"perf/{role}_{_WAIT}_s"] = sum(waits.values())
    return tags


def is_by_peer(tag: str) -> bool:
    """Whether ``tag`` is the idle time for one peer, which is a part of a role's idle time.

    >>> is_by_peer("idle/actor_for_rollout"), is_by_peer("idle/actor_fwd")
    (True, False)
    """
    return bool(_WAITED.fullmatch(tag))


def shares_of_time(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Shares of each role's time in these steps.

    `at`: share of each kind; their sum is 1. `for`: share of waiting for each peer.

    >>> step = {"idle/actor": 0.25, "idle/actor_for_rollout": 0.25}
    >>> shares_of_time([{**step, "perf/actor_train_s": 3, "perf/actor_wait_s": 1}])
    {'actor': {'at': {'train': 0.75, 'wait': 0.25}, 'for': {'rollout': 0.25}}}
    """
    kinds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    peers: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        totals: dict[str, float] = defaultdict(float)
        for tag, value in row.items():
            if match := _SECONDS.fullmatch(tag):
                role, kind = match.groups()
                kinds[role][kind] += value
                totals[role] += value
        for tag, value in row.items():
            if match := _WAITED.fullmatch(tag):
                role, peer = match.groups()
                peers[role][peer] += value * totals[role]
    shares = {}
    for role, seconds in sorted(kinds.items()):
        total = sum(seconds.values())
        if total:
            shares[role] = {
                "at": _divide(seconds, total),
                "for": _divide(peers[role], total),
            }
    return shares


def _divide(seconds: Mapping[str, float], total: float) -> dict[str, float]:
    """Shares of ``total``, largest first."""
    largest_first = sorted(seconds.items(), key=lambda item: -item[1])
    return {name: spent / total for name, spent in largest_first if spent}
