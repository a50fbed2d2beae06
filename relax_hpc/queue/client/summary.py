"""Summary of a put for the controller: the rows of each prompt group, their lengths and
versions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from relax_hpc.queue.group_sizes import group_size
from relax_hpc.queue.lengths import pack_lengths
from relax_hpc.queue.row_ids import parse_row_id, rows_by_episode
from relax_hpc.queue.row_schema import BadRow, Row, sampled_versions
from relax_hpc.queue.storage.media import media_by_ticket


@dataclass(slots=True)
class _GroupSummary:
    """Tokens by (episode, row), and versions, of one prompt group."""

    lengths: dict[tuple[int, int], int] = field(default_factory=dict)
    versions: set[int] = field(default_factory=set)


def summarize_groups(rows: Sequence[Row], fields: Sequence[str]) -> list[dict[str, Any]]:
    """Summary of each prompt group for the controller: ticket, rows of each episode, their lengths,
    versions.

    BadRow: a row id is malformed.
    """
    groups: defaultdict[int, _GroupSummary] = defaultdict(_GroupSummary)
    generated, scored = "token_ids" in fields, "old_logprob_version" in fields
    try:
        for row in rows:
            ticket, episode, number = parse_row_id(row["row_id"])
            group = groups[ticket]
            group.lengths[episode, number] = len(row["token_ids"]) if generated else 0
            if generated:
                group.versions |= sampled_versions(row)
            if scored:
                group.versions.add(int(row["old_logprob_version"]))
        return [_message(ticket, group, generated) for ticket, group in groups.items()]
    except ValueError as error:
        raise BadRow(str(error)) from error


def summarize_media(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Media of each prompt group for the controller: ticket, media ids, and tokens of media: of
    each row, then of all distinct media. BadRow: a row's spans, or its id, are malformed."""
    ids_by_ticket, groups = media_by_ticket(rows), defaultdict[int, list[Row]](list)
    for row in sorted(rows, key=lambda row: parse_row_id(row["row_id"])):
        groups[parse_row_id(row["row_id"])[0]].append(row)
    summaries = []
    for ticket, ids in ids_by_ticket.items():
        size = group_size(groups[ticket])
        tokens = pack_lengths([*size.media, size.distinct])
        summaries.append({"ticket": ticket, "media": ids, "tokens": tokens})
    return summaries


def _message(ticket: int, group: _GroupSummary, generated: bool) -> dict[str, Any]:
    keys = tuple(sorted(group.lengths))
    lengths = pack_lengths([group.lengths[key] for key in keys]) if generated else b""
    return {
        "ticket": ticket,
        "episodes": rows_by_episode(keys),
        "lengths": lengths,
        "versions": sorted(group.versions),
    }
