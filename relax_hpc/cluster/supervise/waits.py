"""Waits of a run for groups that are queued, load or are being replaced, and the node-hours that
the other groups spend meanwhile."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from relax_hpc.cluster.supervise.incarnations import unit_of
from relax_hpc.config import Config
from relax_hpc.config.groups import group_settings
from relax_hpc.queue.presence import longest_wait_s

_RUNNING_STATES = ("running", "suspect")
_HOUR_S = 3600.0
_BEATS = 2
"""Heartbeat intervals after the start of a controller until it has heard from all groups."""
_SOURCE_LINE = re.compile(r"\[/[^\]\s]+:\d+\] ?")
"""Source line of a library, which gloo (torch 2.13) prints before its messages."""
_LONGEST = 120


def find_waits(
    config: Config,
    awaited_groups: Mapping[str, Mapping[str, Any]],
    groups: Mapping[str, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """All groups that other groups wait for, the longest wait first; JSON values.

    ``awaited_groups``: see `GroupPresence.report`; ``groups``: see `group_status`.
    `spent`: hours of a `unit`
    (GPU, node, process) that the running groups have held without work during the wait.
    """
    unit = unit_of(config)
    running = {name: group for name, group in groups.items() if group["state"] in _RUNNING_STATES}
    held_units = sum(units_held_by(config, name, unit) for name in running)
    # The job whose time limit comes first ends the wait: it stops for its successor, or the whole
    # run ends.
    times_left = [group["time_left_s"] for group in running.values()]
    job_s = min((seconds for seconds in times_left if seconds is not None), default=math.inf)
    waits = []
    for name, wait in sorted(awaited_groups.items(), key=lambda item: -item[1]["since_s"]):
        since_s, group = wait["since_s"], groups.get(name, {"state": "", "reason": ""})
        # A new controller has not received the heartbeats of running groups yet.
        is_new = since_s < _BEATS * config.liveness.beat_s
        if group["state"] == "done" or (group["state"] in _RUNNING_STATES and is_new):
            continue
        left_s = longest_wait_s(config) - since_s
        waits.append(
            {
                "group": name,
                "why": _reason(group, wait["why"]),
                "since_s": since_s,
                "unit": unit,
                "left_s": max(0.0, min(left_s, job_s)),
                "spent": held_units * since_s / _HOUR_S,
            }
        )
    return waits


def _reason(group: Mapping[str, Any], hub_reason: str) -> str:
    """Reason of a wait: from Slurm's queue and the exit marks if they explain it, else the
    ``hub_reason``."""
    state = group["state"]
    if state in ("", *_RUNNING_STATES) or hub_reason == "is loading":
        return hub_reason
    return f"is {state} ({shorten(group['reason'])})" if group["reason"] else f"is {state}"


def shorten(reason: str) -> str:
    """Reason of an end for one line of `status`: without source lines of libraries, and at most
    120 characters long.

    >>> shorten("RuntimeError: [/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    'RuntimeError: Connection closed by peer'
    """
    text = _SOURCE_LINE.sub("", reason)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def units_held_by(config: Config, name: str, unit: str) -> int:
    """Number of GPUs, nodes or processes of a group: see `unit_of`."""
    resources = group_settings(config, name).resources
    if unit == "process":
        return 1
    return resources.nodes * (resources.gpus_per_node if unit == "GPU" else 1)
