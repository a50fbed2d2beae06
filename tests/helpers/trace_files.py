"""Checks of trace files in the JSON format that Perfetto reads."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

ROUNDING_US = 0.01
"""Times are printed with three decimal digits."""


def read_slices(path: Path) -> list[dict[str, Any]]:
    """Slices of a trace. Perfetto shows a slice that overlaps the end of another one of its thread
    wrongly, so they must nest."""
    with gzip.open(path) as file:
        trace = json.load(file)
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    threads = defaultdict(list)
    for event in slices:
        threads[event["pid"], event["tid"]].append(event)
    for events in threads.values():
        assert_nest(events)
    return slices


def assert_nest(events: list[dict[str, Any]]) -> None:
    """Assert that slices of one thread nest."""
    open_ends: list[float] = []
    for event in sorted(events, key=lambda item: (item["ts"], -item["dur"])):
        start, end = event["ts"], event["ts"] + event["dur"]
        assert event["dur"] >= 0 and event["name"]
        while open_ends and open_ends[-1] <= start + ROUNDING_US:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + ROUNDING_US, event
        open_ends.append(end)
