"""Claims whose rows are as they should be. Prompt groups that nobody can use are quarantined, and the run goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from relax_hpc.transfer_queue.media import BadMedia, MediaError, MediaStore, check_media, media_ids
from relax_hpc.transfer_queue.schema import Row
from relax_hpc.transfer_queue.shard import ShardError

if TYPE_CHECKING:
    from relax_hpc.transfer_queue.client import Claim, QueueClient

DAMAGED = "damaged_shard"
Wrong = Iterator[tuple[str, int]]
"""Reasons, and the tickets that they are about."""


def sound_claim(
    client: QueueClient, task: str, budget: int, boundary: int = 0, placeholders: Mapping[str, int] | None = None
) -> Claim | None:
    """The next claim of ``task`` all of whose rows pass `check_claim`; None when the run is finished."""
    while claim := client.claim(task, budget, boundary):
        if check_claim(client, claim, placeholders):
            return claim
    return None


def check_claim(client: QueueClient, claim: Claim, placeholders: Mapping[str, int] | None = None) -> bool:
    """Whether all rows of ``claim`` can be read, and their media are there with the tokens that rollout has counted.

    If not, the prompt groups that are wrong are quarantined: dropped and counted under the reason, and others are
    generated in their place. The claim is given back, as it is if rows of it were lost with their maker.
    ``placeholders``: see `check_media`. ShardError if a shard is not there although the queue knows it as saved.
    """
    wrong: dict[str, set[int]] = {}
    try:
        for reason, ticket in list(_damaged(client, claim)) or list(_bad_media(client, claim, placeholders)):
            wrong.setdefault(reason, set()).add(ticket)
    except ShardError:
        # Only a maker had it, who cannot be reached: the queue says when it is decided what becomes of it.
        if len(client.call("settled", leases=[claim.lease])["tickets"]) == len(claim.tickets):
            raise
        client.give_back(claim)
        return False
    for reason, tickets in wrong.items():
        client.call("quarantine", lease=claim.lease, tickets=sorted(tickets), reason=reason)
    if wrong:
        client.give_back(claim)
    return not wrong


def _damaged(client: QueueClient, claim: Claim) -> Wrong:
    for descriptor in claim.shards:
        try:
            client.store.read(descriptor)
        except ShardError as error:
            if not client.store.files.has(descriptor["name"]):
                raise
            print(f"quarantined: {error}", flush=True)
            yield from ((DAMAGED, ticket) for ticket in descriptor["tickets"])


def _bad_media(client: QueueClient, claim: Claim, placeholders: Mapping[str, int] | None) -> Wrong:
    if not claim.with_media:
        return
    store = MediaStore(client.run.media)
    for row in client.rows(claim):
        try:
            _check(store, row, placeholders)
        except BadMedia as bad:
            print(f"quarantined: {bad}", flush=True)
            yield bad.reason, int(row["sample_id"].partition(".")[0])


def _check(store: MediaStore, row: Row, placeholders: Mapping[str, int] | None) -> None:
    if row["spans"] and not row.get("media_tokens"):
        raise BadMedia(
            "media_mismatch", f"{row['sample_id']}: it names media, and nobody says how many tokens they have"
        )
    check_media(row, placeholders)
    for media_id in sorted(media_ids([row])):
        try:
            store.read(media_id)
        except MediaError as error:
            raise BadMedia("media_missing", f"{row['sample_id']}: {error}") from error
