"""Segments on the side of rollout: appended to logs of attempts under way, and read to go on with
an earlier one.

A segment is a row of what came since the one before: its per-token fields go on where those end.
The first one of a row begins with the prompt, later ones have none (`prompt_len` 0);
`finish_reason` is that of the last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from relax_hpc.base.errors import RefusedError
from relax_hpc.base.fields import FIELDS
from relax_hpc.queue.plan import UNSCORED
from relax_hpc.queue.row_ids import parse_row_id
from relax_hpc.queue.row_schema import BadRow, Row, add_optional_fields, sampled_versions
from relax_hpc.queue.storage.shard import pack
from relax_hpc.queue.storage.shard_store import files_of

if TYPE_CHECKING:
    from relax_hpc.queue.client import QueueClient
    from relax_hpc.queue.client.answers import LogPlace

UNFINISHED = "partial"
"""Value of `finish_reason` in a segment that its episode goes on after."""
START = "start"
"""Field of a segment: tokens behind the prompt that its row had before."""


def append(
    client: QueueClient,
    segments: Sequence[Row],
    attempts: Mapping[int, int],
    spare: bool = False,
    timeout: float | None = None,
) -> dict[int, str]:
    """Append to the logs of ``attempts`` (by ticket): from the return on, ``segments`` survive this
    process.

    ``spare``: of whole attempts that no ticket has a use for now. Returns why tickets were refused.
    OSError: the disk did not take it.
    """
    whole, fields = add_optional_fields(segments, UNSCORED)
    name, origin = client.next_shard(), {"group": client.group, "incarnation": client.incarnation}
    try:
        record = pack(whole, (*fields, START), origin)
    except BadRow as error:
        raise RefusedError(f"append: {error}") from error
    shard = files_of(client.run, client.config).write(name, record)
    logs = told(segments, attempts)
    return client.tickets.append(shard, logs, fields, spare, timeout).result()


def told(segments: Sequence[Row], attempts: Mapping[int, int]) -> list[dict[str, Any]]:
    """Summary of ``segments`` for the controller, by log."""
    logs: dict[int, dict[str, Any]] = {}
    for one in segments:
        ticket, episode, row = parse_row_id(one["row_id"])
        log = logs.setdefault(
            ticket,
            {"ticket": ticket, "attempt": attempts[ticket], "segments": [], "versions": set()},
        )
        tokens, ended = (
            len(one["token_ids"]) - one["prompt_len"],
            int(one["finish_reason"] != UNFINISHED),
        )
        log["segments"].append([episode, row, one[START], tokens, ended])
        log["versions"] |= sampled_versions(one)
    return [{**log, "versions": sorted(log["versions"])} for log in logs.values()]


def read(client: QueueClient, place: LogPlace) -> dict[int, list[Row]]:
    """Rows in a log by episode, without rewards, as far as they were generated, under the ids of
    the log's ticket.

    ShardError: what it says cannot be read.
    """
    files = files_of(client.run, client.config)
    found: dict[int, dict[int, Row]] = defaultdict(dict)
    for shard in place.shards:
        for name, segment in files.read(dict(shard)).items():
            ticket, episode, number = parse_row_id(name)
            if ticket == place.ticket:
                rows = found[episode]
                rows[number] = joined(rows[number], segment) if number in rows else segment
    return {episode: [row for _, row in sorted(rows.items())] for episode, rows in found.items()}


def joined(row: Row, segment: Row) -> Row:
    """``row`` with what ``segment`` adds, which may begin before its end: that is the same then."""
    known = row["prompt_len"] + segment[START] - segment["prompt_len"]
    per_token = {name for name in segment if name in FIELDS and FIELDS[name].kind == "token"}
    longer = {name: np.concatenate([row[name][:known], segment[name]]) for name in per_token}
    return segment | longer | {"prompt_len": row["prompt_len"], START: row[START]}
