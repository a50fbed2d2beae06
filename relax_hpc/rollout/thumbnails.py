"""Media as people see them beside a sample: small pictures, which stay when the media themselves
are gone."""

from __future__ import annotations

import functools
import io
from pathlib import Path

import numpy as np

from relax_hpc.data.multimodal.bad_media import BadMedium
from relax_hpc.data.multimodal.features import waveform
from relax_hpc.data.multimodal.medium import Kind, Medium
from relax_hpc.data.rows import data_uri
from relax_hpc.queue.storage.media import MediaError, MediaStore

SIDE = 96
"""Pixels of the longer side, at most."""
_QUALITY = 70
_WAVE_HEIGHT = 32
"""Pixels of the height of a sound."""
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
    """{kind, about: its size, picture: a JPEG as a data URI}."""
    pixels, about = _waveform(medium) if medium.kind is Kind.AUDIO else _middle(medium)
    return {
        "kind": str(medium.kind),
        "about": about,
        "picture": data_uri(_jpeg(pixels), "image/jpeg"),
    }


def _middle(medium: Medium) -> tuple[np.ndarray, str]:
    """Middle frame of what is seen, and its size."""
    frames = medium.data[None] if medium.kind is Kind.IMAGE else medium.data
    count, height, width, _ = frames.shape
    size = f"{width} x {height}"
    return frames[count // 2], size if medium.kind is Kind.IMAGE else f"{size}, {count} frames"


def _waveform(medium: Medium) -> tuple[np.ndarray, str]:
    """Loudness of a sound from left to right, a bar a column, and its length."""
    columns = np.array_split(np.abs(waveform(medium)), SIDE)
    loud = np.array([column.max(initial=0.0) for column in columns])
    beyond = np.abs(np.linspace(-1, 1, _WAVE_HEIGHT))[:, None] > loud
    return np.repeat(
        np.where(beyond, 255, 64).astype(np.uint8)[..., None], 3, axis=2
    ), f"{medium.data.size} samples"


def _jpeg(pixels: np.ndarray) -> bytes:
    from PIL import Image

    image = Image.fromarray(pixels)
    image.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()
