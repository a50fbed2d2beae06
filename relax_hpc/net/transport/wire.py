"""Messages: msgpack, bounded in size, each authenticated as the next one in its direction of its
connection.

Nothing is ever unpickled.
"""

from __future__ import annotations

import hmac
import struct
from hashlib import blake2b
from typing import Any

import msgpack

MAX_MESSAGE_BYTES = 8 << 20
"""Bytes of a message at most, more than any request or answer has; a hostile one takes a few
hundred MB unpacked."""
MAC_BYTES = 16
_PLACE = struct.Struct("<8sQ")
Bytes = bytes | bytearray | memoryview


class BadMessage(ValueError):
    """A frame that is not what the other end sent next, or a message that is malformed."""


def controller_purpose(incarnation: int) -> bytes:
    """Purpose that the controller of this hub incarnation listens for."""
    return b"queue controller %d" % incarnation


class Seal:
    """One direction of one connection. Both ends have one: what one seals the other can open, once
    and in order.

    What was sent the other way, before, or on another connection is no frame of it.
    """

    __slots__ = ("_count", "_direction", "_key")

    def __init__(self, key: bytes, to_listener: bool) -> None:
        """``key``: key of the connection, see `proof`."""
        self._key, self._direction, self._count = key, b"request" if to_listener else b"answer", 0

    def frame(self, payload: Bytes) -> bytes:
        """Frame of ``payload``."""
        return self._mac(payload) + payload

    def payload(self, frame: bytearray) -> memoryview:
        """Payload of ``frame``; BadMessage if that is not what the other end sealed next."""
        payload = memoryview(frame)[MAC_BYTES:]
        if not hmac.compare_digest(frame[:MAC_BYTES], self._mac(payload)):
            raise BadMessage("not the next frame of this connection")
        return payload

    def _mac(self, payload: Bytes) -> bytes:
        # BLAKE2 takes what a hash is for as a parameter of its own: so nothing is copied to be
        # hashed with it.
        place = _PLACE.pack(self._direction, self._count)
        self._count += 1
        return blake2b(payload, key=self._key, person=place, digest_size=MAC_BYTES).digest()


def pack(message: dict[str, Any]) -> bytes:
    """Payload of a frame."""
    return msgpack.packb(message, use_bin_type=True)


def unpack(payload: Bytes) -> dict[str, Any]:
    """The message in ``payload``; BadMessage if it is malformed or not a map."""
    try:
        message = msgpack.unpackb(payload, raw=False, strict_map_key=False)
    except Exception as error:
        raise BadMessage(f"not msgpack: {error}") from error
    if not isinstance(message, dict):
        raise BadMessage(f"a {type(message).__name__} instead of a map")
    return message
