"""Messages: msgpack, bounded in size, authenticated in their order on their connection.

Messages are never pickled, because unpickling received bytes can run code.
"""

from __future__ import annotations

import hmac
import struct
from hashlib import blake2b
from typing import Any

import msgpack

MAX_MESSAGE_BYTES = 8 << 20
"""Bytes of a message, at most. Requests and answers are smaller. A hostile message of this size
takes a few hundred MB of memory when unpacked."""
MAC_BYTES = 16
_POSITION = struct.Struct("<8sQ")
"""Position of a frame: its direction, and its number."""
Bytes = bytes | bytearray | memoryview


class BadMessage(ValueError):
    """A frame that is not the next one of the other end, or a malformed message."""


def controller_purpose(incarnation: int) -> bytes:
    """Purpose of the listener of the controller in this incarnation of the hub, see `proof`."""
    return b"queue controller %d" % incarnation


class Seal:
    """Authentication of one direction of one connection; each end has one object for it.

    The receiver accepts each frame once and in order. Frames of the other direction, of another
    connection, or repeated frames are refused.
    """

    __slots__ = ("_count", "_direction", "_key")

    def __init__(self, key: bytes, to_listener: bool) -> None:
        """``key``: key of the connection, see `proof`. ``to_listener``: its direction."""
        self._key, self._count = key, 0
        self._direction = b"request" if to_listener else b"answer"

    def frame(self, payload: Bytes) -> bytes:
        """Frame of ``payload``."""
        return self._mac(payload) + payload

    def payload(self, frame: bytearray) -> memoryview:
        """Payload of ``frame``. BadMessage: it is not the next frame of the other end."""
        payload = memoryview(frame)[MAC_BYTES:]
        if not hmac.compare_digest(frame[:MAC_BYTES], self._mac(payload)):
            raise BadMessage("not the next frame of this connection")
        return payload

    def _mac(self, payload: Bytes) -> bytes:
        # The position is BLAKE2's personalization parameter. As a prefix of the payload, it would
        # need a copy of the payload.
        position = _POSITION.pack(self._direction, self._count)
        self._count += 1
        return blake2b(payload, key=self._key, person=position, digest_size=MAC_BYTES).digest()


def pack(message: dict[str, Any]) -> bytes:
    """Payload of a frame."""
    # With use_bin_type, bytes and text stay different types.
    return msgpack.packb(message, use_bin_type=True)


def unpack(payload: Bytes) -> dict[str, Any]:
    """The message in ``payload``. BadMessage: it is malformed, or not a map."""
    # msgpack 1 refuses keys other than text by default; messages have maps with integer keys.
    try:
        message = msgpack.unpackb(payload, raw=False, strict_map_key=False)
    except Exception as error:  # msgpack raises exceptions without a common base
        raise BadMessage(f"not msgpack: {error}") from error
    if not isinstance(message, dict):
        raise BadMessage(f"a {type(message).__name__} instead of a map")
    return message
