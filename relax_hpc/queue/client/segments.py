"""Segments in the rollout process: append them to logs of attempts, and read the log of an earlier
attempt to continue it.

A segment is a row with the tokens since the previous segment: its per-token fields continue those.
The first segment of a row begins with the prompt, later ones have no prompt (`prompt_len` 0).
`finish_reason` is that of the last segment.
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
from relax_hpc.queue.storage.shard_store import shard_files

if TYPE_CHECKING:
    from relax_hpc.queue.client import QueueClient
    from relax_hpc.queue.client.answers import AttemptLog

UNFINISHED = "partial"
"""Value of `finish_reason` in a segment after which the episode continues."""
START = "start"
"""Field of a segment: tokens after the prompt that its row had before the segment."""


def append_segments(
    client: QueueClient,
    segments: Sequence[Row],
    attempts: Mapping[int, int],
    spare: bool = False,
    timeout: float | None = None,
) -> dict[int, str]:
    """Append to the logs of ``attempts`` (by ticket). After the return, ``segments`` survive the
    death of this process.

    ``spare``: they are of whole attempts that no ticket can use now. Returns why tickets were
    refused, by ticket. OSError: the write failed.
    """
    rows, fields = add_optional_fields(segments, UNSCORED)
    name, origin = client.next_shard(), {"group": client.group, "incarnation": client.incarnation}
    try:
        record = pack(rows, (*fields, START), origin)
    except BadRow as error:
        raise RefusedError(f"append: {error}") from error
    shard = shard_files(client.run, client.config).write(name, record)
    logs = summarize_logs(segments, attempts)
    return client.tickets.append(shard, logs, fields, spare, timeout).result()


def summarize_logs(segments: Sequence[Row], attempts: Mapping[int, int]) -> list[dict[str, Any]]:
    """Summary of ``segments`` for the controller, by log."""
    logs: dict[int, dict[str, Any]] = {}
    for segment in segments:
        ticket, episode, row = parse_row_id(segment["row_id"])
        log = logs.setdefault(
            ticket,
            {"ticket": ticket, "attempt": attempts[ticket], "segments": [], "versions": set()},
        )
        tokens = len(segment["token_ids"]) - segment["prompt_len"]
        ended = int(segment["finish_reason"] != UNFINISHED)
        log["segments"].append([episode, row, segment[START], tokens, ended])
        log["versions"] |= sampled_versions(segment)
    return [{**log, "versions": sorted(log["versions"])} for log in logs.values()]


def read_log(client: QueueClient, log: AttemptLog) -> dict[int, list[Row]]:
    """Rows of a log by episode, without rewards, as far as they were generated, with the ids of the
    log's ticket.

    ShardError: the log cannot be read.
    """
    files = shard_files(client.run, client.config)
    by_episode: dict[int, dict[int, Row]] = defaultdict(dict)
    for shard in log.shards:
        for name, segment in files.read(dict(shard)).items():
            ticket, episode, number = parse_row_id(name)
            if ticket == log.ticket:
                rows = by_episode[episode]
                rows[number] = join_segment(rows[number], segment) if number in rows else segment
    return {
        episode: [row for _, row in sorted(rows.items())] for episode, rows in by_episode.items()
    }


def join_segment(row: Row, segment: Row) -> Row:
    """``row`` continued by ``segment``. The segment may begin before the end of the row; the tokens
    of both are then the same there."""
    start = row["prompt_len"] + segment[START] - segment["prompt_len"]
    per_token = {name for name in segment if name in FIELDS and FIELDS[name].kind == "token"}
    longer = {name: np.concatenate([row[name][:start], segment[name]]) for name in per_token}
    return segment | longer | {"prompt_len": row["prompt_len"], START: row[START]}
