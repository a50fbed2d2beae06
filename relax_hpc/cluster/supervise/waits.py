"""Waits of a run for groups that are queued, load or are being replaced, and what the others spend
meanwhile."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from relax_hpc.cluster.supervise.incarnations import unit_of
from relax_hpc.config import Config
from relax_hpc.config.groups import group_of
from relax_hpc.queue.presence import longest_wait_s

_AT_WORK = ("running", "suspect")
_HOUR_S = 3600.0
_BEATS = 2
"""Beats after the start of a controller until all groups have given a sign."""
_PLACE = re.compile(r"\[/[^\]\s]+:\d+\] ?")
"""Source line of a library, as gloo puts it before its messages."""
_LONGEST = 120


def waits(
    config: Config,
    lacking: Mapping[str, Mapping[str, Any]],
    groups: Mapping[str, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Each group that is waited for, the longest awaited first; JSON values.

    ``lacking``: see `Presence.told`; ``groups``: see `group_status`. `spent`: hours of a `unit`
    (GPU, node, process) that the groups at work have held since, to no use.
    """
    unit = unit_of(config)
    there = {name: group for name, group in groups.items() if group["state"] in _AT_WORK}
    held = sum(held_by(config, name, unit) for name in there)
    # Whose time is over first makes way, or has the whole run end.
    job_s = min(
        (group["time_left_s"] for group in there.values() if group["time_left_s"] is not None),
        default=math.inf,
    )
    found = []
    for name, wait in sorted(lacking.items(), key=lambda item: -item[1]["since_s"]):
        state, reason = (
            (groups[name][word] for word in ("state", "reason")) if name in groups else ("", "")
        )
        # A new controller has no beats yet of groups that are there.
        is_known_soon = state in _AT_WORK and wait["since_s"] < _BEATS * config.liveness.beat_s
        if state == "done" or is_known_soon:
            continue
        # What the queue and the marks say is more than that the hub sees nothing.
        known = state not in ("", *_AT_WORK) and wait["why"] != "is loading"
        why = wait["why"]
        if known:
            why = f"is {state} ({shorten(reason)})" if reason else f"is {state}"
        about = {"group": name, "why": why, "since_s": wait["since_s"], "unit": unit}
        left_s, spent = longest_wait_s(config) - wait["since_s"], held * wait["since_s"] / _HOUR_S
        found.append(about | {"left_s": max(0.0, min(left_s, job_s)), "spent": spent})
    return found


def shorten(reason: str) -> str:
    """Reason of an end for one line of `status`: without source lines of libraries, at most 120
    characters.

    >>> shorten("RuntimeError: [/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    'RuntimeError: Connection closed by peer'
    """
    text = _PLACE.sub("", reason)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def held_by(config: Config, name: str, unit: str) -> int:
    """Number of GPUs, nodes or processes of a group: see `unit_of`."""
    resources = group_of(config, name).resources
    return (
        1
        if unit == "process"
        else resources.nodes * (resources.gpus_per_node if unit == "GPU" else 1)
    )
