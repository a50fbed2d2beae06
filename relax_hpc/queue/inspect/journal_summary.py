"""The summary of a journal: the results of `queue audit` and `samples` after its first records.

It is made of the journal alone, by the same code that reads the whole journal. It names the bytes
that it was made of and their checksums. A reader uses it only if the run's files begin with these
bytes, and continues after them. Nothing else depends on it, and anybody may delete it.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import msgpack

from relax_hpc.base.block_summaries import FOLDER
from relax_hpc.base.foreign_files import read_in_run
from relax_hpc.base.rundir import RunDir, write_atomic
from relax_hpc.queue.controller import snapshots
from relax_hpc.queue.inspect.event_extent import EventExtent
from relax_hpc.queue.inspect.journal_copy import JournalPrefix
from relax_hpc.queue.plan import Plan

FORMAT = 1
"""Format of the ledger and the fates in a summary. One of another format is not used."""
_NAME = "journal.summary"
_MAX_BYTES = 256 << 20
_HEAD = struct.Struct("<8sIIQI")
"""Magic, `FORMAT`, format of the state, bytes of the body and their crc."""
_MAGIC = b"RLXJSUMM"


@dataclass(slots=True)
class JournalSummary:
    """Results of reading a beginning of the journal."""

    prefix: JournalPrefix
    records: int
    """Records of the prefix."""
    state: Any
    ledger: Any
    fates: Any
    """Dumps of the queue's state, of `audit.Ledger`, and of `fates.FateRecord`."""
    events: EventExtent
    """The beginning of events.jsonl that follows from the prefix."""


def path_of(run: RunDir) -> Path:
    return run.root / FOLDER / _NAME


def read_summary(run: RunDir, plan: Plan) -> JournalSummary | None:
    """The summary of the journal of ``run``; None: there is none that this code can use. ``plan``:
    of the present configuration."""
    try:
        data = read_in_run(path_of(run), _MAX_BYTES)
        magic, number, state_format, size, crc = _HEAD.unpack_from(data)
        if (magic, number, state_format) != (_MAGIC, FORMAT, snapshots.FORMAT):
            return None
        body = memoryview(data)[_HEAD.size :]
        if len(body) != size or zlib.crc32(body) != crc:
            return None
        values = msgpack.unpackb(body, strict_map_key=False)
        if values["plan"] != _plan_text(plan):
            return None
        files = {int(name): (length, crc) for name, (length, crc) in values["files"].items()}
        return JournalSummary(
            JournalPrefix(files),
            values["ledger"]["records"],
            values["state"],
            values["ledger"],
            values["fates"],
            EventExtent(*values["events"]),
        )
    except (OSError, LookupError, TypeError, ValueError, AttributeError, struct.error):
        return None


def write_summary(run: RunDir, plan: Plan, summary: JournalSummary) -> None:
    """Replace the summary of the journal of ``run``. OSError: that failed."""
    values = {
        "plan": _plan_text(plan),
        "files": {str(name): list(part) for name, part in summary.prefix.files.items()},
        "state": summary.state,
        "ledger": summary.ledger,
        "fates": summary.fates,
        "events": astuple(summary.events),
    }
    body = msgpack.packb(values)
    head = _HEAD.pack(_MAGIC, FORMAT, snapshots.FORMAT, len(body), zlib.crc32(body))
    path = path_of(run)
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, head + body, sync=False)


def _plan_text(plan: Plan) -> str:
    """The plan of the run as text. Everything in a summary depends on it."""
    return json.dumps(asdict(plan), default=sorted, sort_keys=True)
