"""Names of contents: whoever has the same bytes has the same name for them."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np


def hash_content(*parts: bytes | memoryview | np.ndarray) -> str:
    """Hash of the bytes of all ``parts``, one after the other, 64 hex digits, at about 1 GB/s."""
    found = blake2b(digest_size=32)
    for part in parts:
        found.update(flat_bytes(part))
    return found.hexdigest()


def flat_bytes(data: bytes | memoryview | np.ndarray) -> memoryview:
    """The bytes of ``data``, copied only if they do not lie side by side."""
    view = memoryview(data)
    return (view if view.c_contiguous else memoryview(view.tobytes())).cast("B")
