"""Media as people see them beside a sample: small pictures, which stay when the media themselves are gone."""

from __future__ import annotations

import functools
import io
from pathlib import Path

import numpy as np

from relax_hpc.data.rows import data_uri
from relax_hpc.multimodal.bad import BadMedium
from relax_hpc.multimodal.medium import Kind, Medium
from relax_hpc.transfer_queue.storage.media import MediaError, MediaStore

SIDE = 96
"""Pixels of the longer side, at most."""
_QUALITY = 70
_KEPT = 64
"""Thumbnails in memory: the samples of a prompt group have the same."""


@functools.lru_cache(maxsize=_KEPT)
def thumbnail_of(blob: Path) -> dict[str, str] | None:
    """Thumbnail of what is stored at ``blob``; None: it cannot be had any more."""
    try:
        return thumbnail(Medium.from_bytes(MediaStore(blob.parent, durable=False).read(blob.name)))
    except (MediaError, BadMedium):
        return None


def thumbnail(medium: Medium) -> dict[str, str]:
    """{kind, about: its size, picture: a JPEG as a data URI}; a sound has no picture."""
    if medium.kind is Kind.AUDIO:
        return {"kind": str(medium.kind), "about": f"{medium.data.size} samples"}
    frames = medium.data[None] if medium.kind is Kind.IMAGE else medium.data
    count, height, width, _ = frames.shape
    size = f"{width} x {height}"
    about = size if medium.kind is Kind.IMAGE else f"{size}, {count} frames"
    return {"kind": str(medium.kind), "about": about, "picture": data_uri(_jpeg(frames[count // 2]), "image/jpeg")}


def _jpeg(pixels: np.ndarray) -> bytes:
    from PIL import Image

    image = Image.fromarray(pixels)
    image.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()
