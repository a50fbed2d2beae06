"""Claims with valid rows. Prompt groups with damaged rows are quarantined, and the run
continues."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from relax_hpc.base.routes import BAD_ROUTES, RouteShape
from relax_hpc.queue.row_ids import ticket_of
from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.storage.media import (
    MediaError,
    MediaMismatch,
    MediaStore,
    check_media,
    media_ids,
)
from relax_hpc.queue.storage.shard import ShardError

if TYPE_CHECKING:
    from relax_hpc.queue.client import Claim, QueueClient

DAMAGED, MISSING = "damaged_shard", "missing_shard"
APPEARS_S = 60.0
"""Longest time until a file that another node has written is visible on a network filesystem."""
_POLL_S = 0.5
Faults = Iterator[tuple[str, int]]
"""Reasons, and the tickets that they concern."""


def claim_valid(
    client: QueueClient,
    task: str,
    budget: int,
    boundary: int = 0,
    placeholders: Mapping[str, int] | None = None,
) -> Claim | None:
    """The next claim of ``task`` whose rows all pass `check_claim`; None: the run is finished."""
    while claim := client.claim(task, budget, boundary):
        if check_claim(client, claim, placeholders):
            return claim
    return None


def check_claim(
    client: QueueClient,
    claim: Claim,
    placeholders: Mapping[str, int] | None = None,
    routes: RouteShape | None = None,
) -> bool:
    """Whether all rows of ``claim`` are valid.

    They are valid if they can be read, their media exist with the tokens that rollout has counted,
    and they have ``routes``, if some are required. Invalid prompt groups are quarantined: dropped,
    counted under the reason, and replaced. The claim is then returned, as it is if rows were lost
    with their producer. ``placeholders``: see `check_media`. ShardError: a shard does not have the
    rows that the queue has recorded.
    """
    try:
        faults = list(_damaged(client, claim)) or [
            *_bad_media(client, claim, placeholders),
            *_bad_routes(client, claim, routes),
        ]
        if not faults:
            return True
    except ShardError:
        if not _absent_shards(client, claim):
            raise
        # Only its producer had the shard, and the producer cannot be reached.
        faults = list(_missing(client, claim)) if is_on_disk(client, claim) else []
    by_reason: dict[str, set[int]] = {}
    for reason, ticket in faults:
        by_reason.setdefault(reason, set()).add(ticket)
    for reason, tickets in by_reason.items():
        client.quarantine(claim, sorted(tickets), reason)
    client.return_claim(claim)
    return False


def is_on_disk(client: QueueClient, claim: Claim) -> bool:
    """Whether all rows of ``claim`` are on disk. Waits until the queue knows it. If not, some rows
    were lost."""
    return len(client.training.settled([claim.lease]).result()) == len(claim.tickets)


def _damaged(client: QueueClient, claim: Claim) -> Faults:
    for descriptor in claim.shards:
        try:
            client.store.read(descriptor)
        except ShardError as error:
            if not client.store.files.has(descriptor["name"]):
                raise
            print(f"quarantined: {error}", flush=True)
            yield from ((DAMAGED, ticket) for ticket in descriptor["tickets"])


def _absent_shards(client: QueueClient, claim: Claim) -> list[dict[str, Any]]:
    return [
        descriptor for descriptor in claim.shards if not client.store.files.has(descriptor["name"])
    ]


def _missing(client: QueueClient, claim: Claim) -> Faults:
    """Tickets of shards that were saved, but whose files do not appear."""
    deadline = time.monotonic() + APPEARS_S
    absent = _absent_shards(client, claim)
    while absent and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        absent = _absent_shards(client, claim)
    for descriptor in absent:
        path = client.store.files.folder / descriptor["name"]
        print(f"quarantined: {path}: saved, but the file does not exist", flush=True)
        yield from ((MISSING, ticket) for ticket in descriptor["tickets"])


def _bad_media(client: QueueClient, claim: Claim, placeholders: Mapping[str, int] | None) -> Faults:
    if not claim.with_media:
        return
    for row in client.rows(claim):
        try:
            _check_media(client.media, row, placeholders)
        except MediaMismatch as bad:
            print(f"quarantined: {bad}", flush=True)
            yield bad.reason, ticket_of(row["row_id"])


def _bad_routes(client: QueueClient, claim: Claim, shape: RouteShape | None) -> Faults:
    if shape is None:
        return
    for row in client.rows(claim):
        fault = shape.find_fault(row)
        if fault:
            print(f"quarantined: {row['row_id']}: {fault}", flush=True)
            yield BAD_ROUTES, ticket_of(row["row_id"])


def _check_media(store: MediaStore, row: Row, placeholders: Mapping[str, int] | None) -> None:
    if row["spans"] and not row.get("media_tokens"):
        raise MediaMismatch(
            "media_mismatch",
            f"{row['row_id']}: it refers to media, but has no media_tokens",
        )
    check_media(row, placeholders)
    for media_id in sorted(media_ids([row])):
        try:
            store.check(media_id)
        except MediaError as error:
            raise MediaMismatch("media_missing", f"{row['row_id']}: {error}") from error
