"""Size of the files of a model, and an upper bound of the time to read them."""

from __future__ import annotations

from pathlib import Path

READ_BYTES_PER_S = 100e6
"""Bytes a second that a process reads from a busy shared file system. It is a low estimate, from
which deadlines are computed."""


def weights_bytes(directory: Path | str) -> int:
    """Bytes of the weights in a Hugging Face directory; 0 if there are none."""
    return sum(file.stat().st_size for file in Path(directory).glob("*.safetensors"))


def read_seconds(directory: Path | str) -> float:
    """Seconds that reading the weights of a Hugging Face directory takes, at most."""
    return weights_bytes(directory) / READ_BYTES_PER_S
