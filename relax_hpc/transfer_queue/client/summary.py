"""Summary of rows that are put, for the controller: by prompt group which rows, their lengths, their versions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from relax_hpc.transfer_queue.lengths import packed
from relax_hpc.transfer_queue.row_ids import place_of, rows_by_episode
from relax_hpc.transfer_queue.row_schema import BadRow, Row, sampled_versions


@dataclass(slots=True)
class _Group:
    """Tokens by (episode, row), and versions of one prompt group."""

    lengths: dict[tuple[int, int], int] = field(default_factory=dict)
    versions: set[int] = field(default_factory=set)


def summarise(rows: Sequence[Row], fields: Sequence[str]) -> list[dict[str, Any]]:
    """Summary of each prompt group for the controller: ticket, rows of each episode, their lengths, versions.

    BadRow: an id is none.
    """
    groups: defaultdict[int, _Group] = defaultdict(_Group)
    generated, scored = "token_ids" in fields, "old_logprob_version" in fields
    try:
        for row in rows:
            ticket, episode, number = place_of(row["row_id"])
            group = groups[ticket]
            group.lengths[episode, number] = len(row["token_ids"]) if generated else 0
            if generated:
                group.versions |= sampled_versions(row)
            if scored:
                group.versions.add(int(row["old_logprob_version"]))
        return [_told(ticket, group, generated) for ticket, group in groups.items()]
    except ValueError as error:
        raise BadRow(str(error)) from error


def _told(ticket: int, group: _Group, generated: bool) -> dict[str, Any]:
    places = tuple(sorted(group.lengths))
    lengths = packed([group.lengths[place] for place in places]) if generated else b""
    return {
        "ticket": ticket,
        "episodes": rows_by_episode(places),
        "lengths": lengths,
        "versions": sorted(group.versions),
    }
