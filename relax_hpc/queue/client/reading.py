"""The rows of a claim, merged from the shards that contain their fields."""

from __future__ import annotations

from collections.abc import Sequence

from relax_hpc.queue.client.answers import Claim
from relax_hpc.queue.row_ids import row_ids
from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.storage.columns import Column, make_column
from relax_hpc.queue.storage.shard import ShardError, align
from relax_hpc.queue.storage.shard_store import ShardReader


def read_rows(reader: ShardReader, claim: Claim) -> list[Row]:
    """The rows of ``claim`` in the order of their ids, with all fields of the shards of the claim:
    those that its task needs, and others that were put with them.

    ShardError, naming the file: a shard is damaged or does not belong to the claim.
    """
    names = {
        ticket: row_ids(ticket, rows)
        for ticket, rows in zip(claim.tickets, claim.episodes, strict=True)
    }
    merged: dict[str, Row] = {name: {} for name in claim.row_ids()}
    for descriptor in claim.shards:
        rows = reader.read(descriptor)
        # A shard may also contain dropped rows of tickets that were generated again. Only the
        # tickets in the descriptor are valid.
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
    reader: ShardReader, claim: Claim, fields: Sequence[str], buffer: memoryview | None = None
) -> dict[str, Column]:
    """``fields`` of all rows of ``claim`` in the order of their ids, numbers as `flat` arrays
    without gaps between rows.

    They are views of the producer's memory where it can be mapped, valid until the claim is
    acknowledged. With a ``buffer`` for the claim's shards (their bytes, and 64 more for each), they
    are copied to it, and stay valid. LookupError: a field is missing. ShardError: as `read_rows`.
    """
    names = claim.row_ids()
    by_name: dict[str, Column] = {}
    for descriptor in claim.shards:
        # A shard with rows of other tickets cannot be used as a whole.
        columns = (
            reader.columns(descriptor, buffer)
            if descriptor["tickets"] == list(claim.tickets)
            else None
        )
        buffer = buffer[align(descriptor["bytes"]) :] if buffer else buffer
        if columns is None or columns.row_ids != names:
            break
        by_name |= {column.name: column for column in columns.columns}
    else:
        return {field: by_name[field] for field in fields}
    rows = read_rows(reader, claim)
    return {field: make_column(field, [row[field] for row in rows]) for field in fields}
