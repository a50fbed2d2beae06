"""The rows of a claim, put together from the shards in which their fields lie."""

from __future__ import annotations

from collections.abc import Sequence

from relax_hpc.queue.client.answers import Claim
from relax_hpc.queue.row_ids import row_ids
from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.storage.columns import Column, column_of
from relax_hpc.queue.storage.shard import ShardError, aligned
from relax_hpc.queue.storage.shard_store import ShardReader


def read_rows(reader: ShardReader, claim: Claim) -> list[Row]:
    """The rows of ``claim`` in the order of their ids: the fields that its task needs, and what was
    put with those.

    ShardError, naming the file, if one is damaged or is another's.
    """
    names = {
        ticket: row_ids(ticket, rows)
        for ticket, rows in zip(claim.tickets, claim.episodes, strict=True)
    }
    merged: dict[str, Row] = {name: {} for ticket in claim.tickets for name in names[ticket]}
    for descriptor in claim.shards:
        rows = reader.read(descriptor)
        # A shard may also hold dropped rows of tickets that were generated again: only its own
        # count.
        for ticket in descriptor["tickets"]:
            for name in names[ticket]:
                if name not in rows:
                    raise ShardError(
                        f"{descriptor['name']}: has no row {name}; another file has its name"
                    )
                merged[name].update(rows[name])
    reader.forget({descriptor["name"] for descriptor in claim.shards})
    return list(merged.values())


def read_columns(
    reader: ShardReader, claim: Claim, fields: Sequence[str], room: memoryview | None = None
) -> dict[str, Column]:
    """``fields`` of all rows of ``claim`` in the order of their ids, those of numbers as `flat`,
    rows end to end.

    They are views of the maker's memory where it can be mapped, which stays until the claim is
    answered; where there is ``room`` for the claim's shards (bytes, 64 more for each), they are
    copied to it, to be kept. LookupError if a field is not there, ShardError as `read_rows`.
    """
    names = claim.row_ids()
    found: dict[str, Column] = {}
    for descriptor in claim.shards:
        # A shard may also hold dropped rows of tickets that were generated again.
        columns = (
            reader.columns(descriptor, room)
            if descriptor["tickets"] == list(claim.tickets)
            else None
        )
        room = room[aligned(descriptor["bytes"]) :] if room else room
        if columns is None or columns.row_ids != names:
            break
        found |= {column.name: column for column in columns.columns}
    else:
        return {field: found[field] for field in fields}
    rows = read_rows(reader, claim)
    return {field: column_of(field, [row[field] for row in rows]) for field in fields}
