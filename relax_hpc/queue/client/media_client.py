"""Media of rollout: those of a prompt group are stored. Whoever reads rows counts them again:
`claims`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from relax_hpc.queue.storage.media import BadMedia, hash_content

if TYPE_CHECKING:
    from relax_hpc.queue.client import QueueClient

TOO_LARGE = "media_too_large"
"""Reason of BadMedia, for whoever counts the prompt group as failed."""


def store_media(
    client: QueueClient,
    ticket: int,
    media: Sequence[bytes | memoryview | np.ndarray],
    ids: Sequence[str] = (),
) -> list[str]:
    """Store the media of a prompt group that this client generates; their ids, in order.

    ``ids``: what `hash_content` has said of them; empty: nobody has asked. The queue hears first
    who needs them, so what lies there without having been named can be removed. Asked again, or by
    another group, it stores nothing twice. BadMedia: one of them, or all together, is larger than
    `queue` allows.
    """
    limits, sizes = client.config.queue, [memoryview(data).nbytes for data in media]
    found = {"max_medium_bytes": max(sizes, default=0), "max_group_media_bytes": sum(sizes)}
    for name, size in found.items():
        if size > (allowed := getattr(limits, name)):
            what = "a medium" if name == "max_medium_bytes" else f"{len(media)} media"
            text = (
                f"{what} of {size} bytes, allowed queue.{name}={allowed}; shrink it, or raise "
                "the limit"
            )
            raise BadMedia(TOO_LARGE, f"ticket {ticket}: {text}")
    if 0 in sizes:
        raise BadMedia(
            "bad_media",
            f"ticket {ticket}: a medium of 0 bytes, allowed 1 or more; mend the prompt's file",
        )
    ids = list(ids) or [hash_content(data) for data in media]
    if ids and client.tickets.name_media(ticket, ids).result():
        for media_id, data in zip(ids, media, strict=True):
            client.media.put(data, media_id)
    return ids
