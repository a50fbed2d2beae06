"""Sizes of prompt groups, by which their rows are assigned to ranks: tokens, and tokens of
media."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.samplers import GroupSize


def group_sizes(rows: Sequence[Row]) -> list[GroupSize]:
    """Sizes of the prompt groups of ``rows``. Rows of a prompt group are adjacent."""
    return [group_size(list(group)) for _, group in groupby(rows, _ticket)]


def group_size(rows: Sequence[Row]) -> GroupSize:
    """Size of the prompt group that ``rows`` belong to, counting these rows only."""
    media = [_tokens_by_id(row) for row in rows]
    distinct: dict[Any, int] = {}
    for tokens_by_id in media:
        distinct |= tokens_by_id
    return GroupSize(
        [len(row["token_ids"]) for row in rows],
        [sum(tokens_by_id.values()) for tokens_by_id in media],
        sum(distinct.values()),
    )


def _ticket(row: Row) -> str:
    return str(row.get("row_id", "")).partition(".")[0]


def _tokens_by_id(row: Row) -> dict[Any, int]:
    tokens: dict[Any, int] = {}
    for span in row.get("spans") or ():
        tokens[span["media_id"]] = tokens.get(span["media_id"], 0) + span["length"]
    return tokens
