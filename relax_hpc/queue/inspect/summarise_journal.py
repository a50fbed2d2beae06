"""Continues the summary of a journal up to its present end."""

from __future__ import annotations

import zlib

from relax_hpc.base.rundir import RunDir
from relax_hpc.config import load_resolved
from relax_hpc.queue.controller.state.events import expand, to_lines
from relax_hpc.queue.inspect.audit import Ledger
from relax_hpc.queue.inspect.event_extent import EventExtent
from relax_hpc.queue.inspect.fates import FateRecord
from relax_hpc.queue.inspect.journal_copy import MALFORMED, DifferentJournalError, JournalCopy
from relax_hpc.queue.inspect.journal_summary import JournalSummary, read_summary, write_summary
from relax_hpc.queue.plan import Plan

_STEP_SHARE = 0.01


def summarise_journal(run: RunDir, step_bytes: int) -> bool:
    """Write a new summary of the journal of ``run`` if it has ``step_bytes`` more bytes than the
    last one, of a long journal 1 % more. Whether one was written.

    JournalError: the journal is damaged. OSError: the summary cannot be written.
    """
    plan = Plan.from_config(load_resolved(run.root))
    summary = read_summary(run, plan)
    size = sum(path.stat().st_size for path in run.journal.glob("*.journal"))
    covered = sum(length for length, _ in summary.prefix.files.values()) if summary else 0
    # A summary contains the history of all prompt groups, so that of a long run costs more.
    if size - covered < max(step_bytes, round(_STEP_SHARE * size)):
        return False
    try:
        extended = _extend(run, plan, summary)
    except (DifferentJournalError, *MALFORMED, zlib.error):
        if summary is None:
            raise
        extended = _extend(run, plan, None)
    write_summary(run, plan, extended)
    return True


def _extend(run: RunDir, plan: Plan, summary: JournalSummary | None) -> JournalSummary:
    ledger, fates, events = Ledger.empty(run, plan), FateRecord(), EventExtent()
    if summary:
        ledger.load(summary)
        fates.load(summary.fates)
        events = summary.events
    copy = JournalCopy(run, summary.prefix if summary else None)
    for batches in copy.replay(ledger.state):
        events.add(to_lines(batches))
        for event in expand(batches):
            ledger.take(event)
            fates.take(ledger.state, event)
        ledger.records += 1
    return JournalSummary(
        copy.read, ledger.records, ledger.state.dump(), ledger.dump(), fates.dump(), events
    )
