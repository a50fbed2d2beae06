"""Thumbnails of media for people who read samples. They remain when the media were removed."""

from __future__ import annotations

import functools
import io
from pathlib import Path

import numpy as np

from relax_hpc.data.multimodal.bad_media import UnusableMedium
from relax_hpc.data.multimodal.features import waveform
from relax_hpc.data.multimodal.medium import Kind, Medium
from relax_hpc.data.rows import data_uri
from relax_hpc.queue.storage.media import MediaError, MediaStore

SIDE = 96
"""Most pixels of the longer side."""
_QUALITY = 70
_WAVE_HEIGHT = 32
"""Height of the picture of a sound in pixels."""
_CACHED = 64
"""Thumbnails in memory: all samples of a prompt group have the same media."""


@functools.lru_cache(maxsize=_CACHED)
def thumbnail_of(blob: Path) -> dict[str, str] | None:
    """Thumbnail of the medium in ``blob``; None: the medium was removed or cannot be read."""
    try:
        return thumbnail(Medium.from_bytes(MediaStore(blob.parent, durable=False).read(blob.name)))
    except (MediaError, UnusableMedium):
        return None


def thumbnail(medium: Medium) -> dict[str, str]:
    """{kind, about: the size in words, picture: a JPEG as a data URI}."""
    if medium.kind is Kind.AUDIO:
        pixels, size = _waveform(medium)
    else:
        pixels, size = _middle_frame(medium)
    return {
        "kind": str(medium.kind),
        "about": size,
        "picture": data_uri(_jpeg(pixels), "image/jpeg"),
    }


def _middle_frame(medium: Medium) -> tuple[np.ndarray, str]:
    """Middle frame of an image or a video [height, width, 3], and its size."""
    frames = medium.data[None] if medium.kind is Kind.IMAGE else medium.data
    count, height, width, _ = frames.shape
    size = f"{width} x {height}"
    return frames[count // 2], size if medium.kind is Kind.IMAGE else f"{size}, {count} frames"


def _waveform(medium: Medium) -> tuple[np.ndarray, str]:
    """Bars with the loudness of a sound over time [height, width, 3], and its length."""
    columns = np.array_split(np.abs(waveform(medium)), SIDE)
    loudness = np.array([column.max(initial=0.0) for column in columns])
    is_background = np.abs(np.linspace(-1, 1, _WAVE_HEIGHT))[:, None] > loudness
    gray = np.where(is_background, 255, 64).astype(np.uint8)
    return np.repeat(gray[..., None], 3, axis=2), f"{medium.data.size} samples"


def _jpeg(pixels: np.ndarray) -> bytes:
    from PIL import Image

    image = Image.fromarray(pixels)
    image.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()
