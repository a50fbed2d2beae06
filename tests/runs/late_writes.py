"""What an ended process wrote all the same, by the run's journal."""

from __future__ import annotations

import re
from typing import Any

from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from tests.helpers.run_helpers import journal_records


def late_writes(run: RunDir) -> list[str]:
    """Journal records that came from an incarnation of a group after a later one had begun, or its
    end was journaled.

    A fenced process leaves none: it can put, ack, publish and checkpoint nothing.
    """
    found, lowest = [], dict[str, int]()
    for record in journal_records(run):
        group, incarnation = writer_of(record)
        if incarnation and incarnation < lowest.get(group, 0):
            found.append(
                f"{record['op']} of {group} incarnation {incarnation}, although {lowest[group]} "
                "has begun"
            )
        if record["op"] in ("register", "down"):
            over = record["incarnation"] + (record["op"] == "down")
            lowest[record["group"]] = max(over, lowest.get(record["group"], 0))
    return found


def writer_of(record: dict[str, Any]) -> tuple[str, int]:
    """Group and incarnation of the process whose request a journal record is; incarnation 0: it
    does not say."""
    if record["op"] == "gathered":
        # The controller's own work, for which nobody asked: it may end after its group was said to
        # be over, and what fences a controller is its successor's journal.
        return "", 0
    if "owner" in record:
        return record["owner"][0], record["owner"][1]
    if record["op"] in ("resume", "checkpoint"):
        return "actor", record["incarnation"]
    if record["op"] == "publish":
        return "actor", Version.parse(record["version"]).incarnation
    if record["op"] == "put":
        group, incarnation = re.match(r"(.+)-i(\d{6})-\d+-\w+#", record["key"]).groups()
        return group, int(incarnation)
    return "", 0
