"""Summary of rows that are put, for the controller: by prompt group which rows, their lengths,
their versions."""

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
class _Group:
    """Tokens by (episode, row), and versions of one prompt group."""

    lengths: dict[tuple[int, int], int] = field(default_factory=dict)
    versions: set[int] = field(default_factory=set)


def summarise(rows: Sequence[Row], fields: Sequence[str]) -> list[dict[str, Any]]:
    """Summary of each prompt group for the controller: ticket, rows of each episode, their lengths,
    versions.

    BadRow: an id is none.
    """
    groups: defaultdict[int, _Group] = defaultdict(_Group)
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
        return [_told(ticket, group, generated) for ticket, group in groups.items()]
    except ValueError as error:
        raise BadRow(str(error)) from error


def media_of_groups(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Media of prompt groups for the controller: ticket, ids, tokens that stand for them, of each
    row and of all media together, each counted once. BadRow: a row's spans, or its id, are none."""
    named, groups = media_by_ticket(rows), defaultdict[int, list[Row]](list)
    for row in sorted(rows, key=lambda row: parse_row_id(row["row_id"])):
        groups[parse_row_id(row["row_id"])[0]].append(row)
    sizes = {ticket: group_size(groups[ticket]) for ticket in named}
    tokens = {ticket: pack_lengths([*size.media, size.distinct]) for ticket, size in sizes.items()}
    return [
        {"ticket": ticket, "media": ids, "tokens": tokens[ticket]} for ticket, ids in named.items()
    ]


def _told(ticket: int, group: _Group, generated: bool) -> dict[str, Any]:
    places = tuple(sorted(group.lengths))
    lengths = pack_lengths([group.lengths[place] for place in places]) if generated else b""
    return {
        "ticket": ticket,
        "episodes": rows_by_episode(places),
        "lengths": lengths,
        "versions": sorted(group.versions),
    }
