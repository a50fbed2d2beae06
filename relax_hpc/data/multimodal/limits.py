"""Limits of a file of media. What is beyond them by its header is refused before anything is
decoded; time and memory are those of the worker that has it."""

from __future__ import annotations

from dataclasses import dataclass

from relax_hpc.config.schema import MultimodalConfig


@dataclass(frozen=True, slots=True)
class Limits:
    """Most that a file may have and take."""

    bytes: int = 1 << 31
    pixels: int = 1 << 26
    """Pixels of an image or a frame."""
    frames: int = 1 << 17
    """Frames of a video, taken or not."""
    seconds: float = 3600.0
    """Seconds of a video or sound."""
    rate: int = 768000
    """Samples of a second of sound."""
    time_s: float = 60.0
    """Seconds that a worker may be at a file."""
    memory_mb: int = 4096
    """Megabytes that a worker may take."""

    @classmethod
    def of(cls, settings: MultimodalConfig) -> Limits:
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
