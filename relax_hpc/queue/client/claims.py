"""Claims whose rows are as they should be. Prompt groups that nobody can use are quarantined, and
the run goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from relax_hpc.base.routes import BAD_ROUTES, RouteShape
from relax_hpc.queue.row_ids import ticket_of
from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.storage.media import (
    BadMedia,
    MediaError,
    MediaStore,
    check_media,
    media_ids,
)
from relax_hpc.queue.storage.shard import ShardError

if TYPE_CHECKING:
    from relax_hpc.queue.client import Claim, QueueClient

DAMAGED, MISSING = "damaged_shard", "missing_shard"
APPEARS_S = 60.0
"""Seconds until a file that another node has written is seen on a network filesystem, at most."""
_LOOK_S = 0.5
Wrong = Iterator[tuple[str, int]]
"""Reasons, and the tickets that they are about."""


def sound_claim(
    client: QueueClient,
    task: str,
    budget: int,
    boundary: int = 0,
    placeholders: Mapping[str, int] | None = None,
) -> Claim | None:
    """The next claim of ``task`` all of whose rows pass `check_claim`; None when the run is
    finished."""
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
    """Whether all rows of ``claim`` can be read, their media are there with the tokens that rollout
    has counted, and they have ``routes``, if some are wanted.

    If not, the prompt groups that are wrong are quarantined: dropped and counted under the reason,
    and others are generated in their place. The claim is given back, as it is if rows of it were
    lost with their maker. ``placeholders``: see `check_media`. ShardError if a shard has not the
    rows that the queue knows to be there.
    """
    try:
        wrong = list(_damaged(client, claim)) or [
            *_bad_media(client, claim, placeholders),
            *_routes(client, claim, routes),
        ]
        if not wrong:
            return True
    except ShardError:
        if not _unseen(client, claim):
            raise
        # Only a maker had it, who cannot be reached.
        wrong = list(_missing(client, claim)) if still_held(client, claim) else []
    by_reason: dict[str, set[int]] = {}
    for reason, ticket in wrong:
        by_reason.setdefault(reason, set()).add(ticket)
    for reason, tickets in by_reason.items():
        client.quarantine(claim, sorted(tickets), reason)
    client.give_back(claim)
    return False


def still_held(client: QueueClient, claim: Claim) -> bool:
    """Whether all rows of ``claim`` are on disk, once the queue knows what becomes of them; else
    some were lost."""
    return len(client.training.settled([claim.lease]).result()) == len(claim.tickets)


def _damaged(client: QueueClient, claim: Claim) -> Wrong:
    for descriptor in claim.shards:
        try:
            client.store.read(descriptor)
        except ShardError as error:
            if not client.store.files.has(descriptor["name"]):
                raise
            print(f"quarantined: {error}", flush=True)
            yield from ((DAMAGED, ticket) for ticket in descriptor["tickets"])


def _unseen(client: QueueClient, claim: Claim) -> list[dict[str, Any]]:
    return [
        descriptor for descriptor in claim.shards if not client.store.files.has(descriptor["name"])
    ]


def _missing(client: QueueClient, claim: Claim) -> Wrong:
    """Tickets of shards that were saved, and whose files do not appear."""
    until = time.monotonic() + APPEARS_S
    while (gone := _unseen(client, claim)) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    for descriptor in gone:
        print(
            f"quarantined: {client.store.files.folder / descriptor['name']}: saved, and not there",
            flush=True,
        )
        yield from ((MISSING, ticket) for ticket in descriptor["tickets"])


def _bad_media(client: QueueClient, claim: Claim, placeholders: Mapping[str, int] | None) -> Wrong:
    if not claim.with_media:
        return
    for row in client.rows(claim):
        try:
            _check(client.media, row, placeholders)
        except BadMedia as bad:
            print(f"quarantined: {bad}", flush=True)
            yield bad.reason, ticket_of(row["row_id"])


def _routes(client: QueueClient, claim: Claim, shape: RouteShape | None) -> Wrong:
    for row in client.rows(claim) if shape else ():
        if fault := shape.find_fault(row):
            print(f"quarantined: {row['row_id']}: {fault}", flush=True)
            yield BAD_ROUTES, ticket_of(row["row_id"])


def _check(store: MediaStore, row: Row, placeholders: Mapping[str, int] | None) -> None:
    if row["spans"] and not row.get("media_tokens"):
        raise BadMedia(
            "media_mismatch",
            f"{row['row_id']}: it names media, and nobody says how many tokens they have",
        )
    check_media(row, placeholders)
    for media_id in sorted(media_ids([row])):
        try:
            store.check(media_id)
        except MediaError as error:
            raise BadMedia("media_missing", f"{row['row_id']}: {error}") from error
