"""Limits of a media file. A file whose header exceeds a limit is refused before it is decoded. Time
and memory are limits of the worker that decodes it."""

from __future__ import annotations

from dataclasses import dataclass

from relax_hpc.config.schema import MultimodalConfig


@dataclass(frozen=True, slots=True)
class Limits:
    """Maximum values of a file."""

    bytes: int = 1 << 31
    pixels: int = 1 << 26
    """Pixels of an image or a frame."""
    frames: int = 1 << 17
    """Frames of a video, also those that are not used."""
    seconds: float = 3600.0
    """Seconds of a video or sound."""
    rate: int = 768000
    """Sample rate of a sound in Hz."""
    time_s: float = 60.0
    """Seconds that a worker may work on a file."""
    memory_mb: int = 4096
    """Megabytes of memory of a worker."""

    @classmethod
    def from_config(cls, settings: MultimodalConfig) -> Limits:
        """Limits of a run."""
        return cls(
            bytes=settings.max_file_mb * 1_000_000,
            pixels=settings.max_pixels,
            frames=settings.max_frames,
            seconds=settings.max_seconds,
            rate=settings.max_sample_rate,
            time_s=settings.file_timeout_s,
            memory_mb=settings.memory_mb,
        )
