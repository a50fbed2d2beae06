"""Size of the files of a model, and time that it may take to read them."""

from __future__ import annotations

from pathlib import Path

READ_BYTES_PER_S = 100e6
"""Bytes a second that a process reads from a busy shared filesystem, a low estimate: deadlines are
made of it."""


def weights_bytes(directory: Path | str) -> int:
    """Bytes of the weights in a Hugging Face directory; 0 where there is none."""
    return sum(file.stat().st_size for file in Path(directory).glob("*.safetensors"))


def read_seconds(directory: Path | str) -> float:
    """Seconds in which the weights of a Hugging Face directory are read, however slowly."""
    return weights_bytes(directory) / READ_BYTES_PER_S
