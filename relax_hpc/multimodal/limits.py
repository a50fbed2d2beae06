"""Limits of a file of media: what is beyond them is refused by its header, before anything is decoded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Most that a file may have."""

    bytes: int = 1 << 31
    pixels: int = 1 << 26
    """Pixels of an image or a frame."""
    frames: int = 1 << 17
    """Frames of a video, taken or not."""
    seconds: float = 3600.0
    """Seconds of a video or sound."""
    rate: int = 768000
    """Samples of a second of sound."""
