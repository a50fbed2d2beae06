"""Media of rollout: store the media of a prompt group. Readers of rows check them in `claims`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from relax_hpc.queue.storage.media import MediaMismatch, hash_content

if TYPE_CHECKING:
    from relax_hpc.queue.client import QueueClient

TOO_LARGE = "media_too_large"
"""Reason of MediaMismatch with which the prompt group fails."""


def store_media(
    client: QueueClient,
    ticket: int,
    media: Sequence[bytes | memoryview | np.ndarray],
    ids: Sequence[str] = (),
) -> list[str]:
    """Store the media of a prompt group that this client generates; their ids, in order.

    ``ids``: results of `hash_content`; empty: compute them. The queue first records the ids, so
    that stored media without a record can be deleted. A repeated call, or a call by another group,
    stores nothing twice. MediaMismatch: a medium, or all together, is larger than `queue` allows.
    """
    limits, sizes = client.config.queue, [_size_bytes(data) for data in media]
    checks = {"max_medium_bytes": max(sizes, default=0), "max_group_media_bytes": sum(sizes)}
    for name, size in checks.items():
        allowed = getattr(limits, name)
        if size > allowed:
            subject = "a medium" if name == "max_medium_bytes" else f"{len(media)} media"
            text = (
                f"{subject} of {size} bytes, allowed queue.{name}={allowed}; shrink it, or raise "
                "the limit"
            )
            raise MediaMismatch(TOO_LARGE, f"ticket {ticket}: {text}")
    if 0 in sizes:
        raise MediaMismatch(
            "bad_media",
            f"ticket {ticket}: a medium of 0 bytes, allowed 1 or more; correct the prompt's file",
        )
    ids = list(ids) or [hash_content(data) for data in media]
    if ids and client.tickets.register_media(ticket, ids).result():
        for media_id, data in zip(ids, media, strict=True):
            client.media.put(data, media_id)
    return ids


def _size_bytes(data: bytes | memoryview | np.ndarray) -> int:
    return len(data) if isinstance(data, bytes) else data.nbytes
