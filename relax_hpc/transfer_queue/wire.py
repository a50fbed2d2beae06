"""Messages: msgpack, authenticated with the run's token, bounded in size. Nothing is ever unpickled."""

from __future__ import annotations

import hmac
from hashlib import blake2b
from typing import Any

import msgpack

MAX_MESSAGE_BYTES = 8 << 20
"""Larger than any request or answer; a hostile one of this size takes a few hundred MB once it is unpacked."""
_MAC_BYTES = 16


class BadMessage(ValueError):
    """A frame that was not written by a holder of the run's token, or is malformed."""


def _mac(token: bytes, payload: bytes | memoryview) -> bytes:
    return blake2b(payload, key=token, digest_size=_MAC_BYTES).digest()


def seal(token: bytes, message: dict[str, Any]) -> bytes:
    """One authenticated frame."""
    payload = msgpack.packb(message, use_bin_type=True)
    return _mac(token, payload) + payload


def is_sealed(token: bytes, frame: bytes | bytearray) -> bool:
    """Whether a holder of the run's token has written ``frame``."""
    payload = memoryview(frame)[_MAC_BYTES:]
    return hmac.compare_digest(frame[:_MAC_BYTES], _mac(token, payload))


def unseal(token: bytes, frame: bytes | bytearray) -> dict[str, Any]:
    """The message in ``frame``; BadMessage if it is too large, not ours, or not a map."""
    if not _MAC_BYTES < len(frame) <= MAX_MESSAGE_BYTES:
        raise BadMessage(f"frame of {len(frame)} bytes")
    if not is_sealed(token, frame):
        raise BadMessage("wrong token")
    try:
        message = msgpack.unpackb(memoryview(frame)[_MAC_BYTES:], raw=False, strict_map_key=False)
    except Exception as error:
        raise BadMessage(f"not msgpack: {error}") from error
    if not isinstance(message, dict):
        raise BadMessage(f"a {type(message).__name__} instead of a map")
    return message
