"""Sizes of prompt groups, by which their rows are dealt to ranks: tokens, and those of them that
stand for media."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.samplers import GroupSize


def group_sizes(rows: Sequence[Row]) -> list[GroupSize]:
    """Sizes of the prompt groups of ``rows``, in the order in which these lie side by side."""
    return [size_of(list(group)) for _, group in groupby(rows, _ticket)]


def size_of(rows: Sequence[Row]) -> GroupSize:
    """Size of the prompt group that ``rows`` are all of, or of a part of one."""
    media = [_tokens_by_id(row) for row in rows]
    distinct = {name: tokens for one in media for name, tokens in one.items()}
    return GroupSize(
        [len(row["token_ids"]) for row in rows],
        [sum(one.values()) for one in media],
        sum(distinct.values()),
    )


def _ticket(row: Row) -> str:
    return str(row.get("row_id", "")).partition(".")[0]


def _tokens_by_id(row: Row) -> dict[Any, int]:
    found: dict[Any, int] = {}
    for span in row.get("spans") or ():
        found[span["media_id"]] = found.get(span["media_id"], 0) + span["length"]
    return found
