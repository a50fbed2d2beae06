"""Messages between a process and its workers: JSON, each after its length in 4 bytes.

Messages are not pickled, because a worker that runs a user's code could then run code in its
parent.
"""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO

HEAD = struct.Struct("<I")
MOST_BYTES = 1 << 30
"""Bytes of a message, at most."""
# One encoder for all messages, because json.dumps creates a new one for each call with options.
_encode = json.JSONEncoder(separators=(",", ":")).encode


def pack(message: Any) -> bytes:
    """``message`` as bytes. ValueError, TypeError: JSON cannot represent it, or it is too long."""
    body = _encode(message).encode()
    if len(body) > MOST_BYTES:
        raise ValueError(f"{len(body)} bytes, allowed {MOST_BYTES}")
    return HEAD.pack(len(body)) + body


def read_size(head: bytes) -> int:
    """Bytes of the message after ``head``. ValueError: they are too many."""
    # Checked before memory is allocated, because a damaged head can have any value.
    (length,) = HEAD.unpack(head)
    if length > MOST_BYTES:
        raise ValueError(f"{length} bytes, allowed {MOST_BYTES}")
    return length


def read(file: BinaryIO) -> Any:
    """The next message of ``file``. EOFError: the file ends before."""
    head = file.read(HEAD.size)
    body = file.read(read_size(head)) if len(head) == HEAD.size else b""
    if len(head) < HEAD.size or len(body) < read_size(head):
        raise EOFError
    return json.loads(body)
