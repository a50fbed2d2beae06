"""How large the files of a model are, and how long it may take to read them."""

from __future__ import annotations

from pathlib import Path

READ_BYTES_PER_S = 100e6
"""What a process gets of a busy shared filesystem, with much to spare: deadlines are made of it."""


def weights_bytes(directory: Path | str) -> int:
    """Of the weights in a Hugging Face directory; 0 where there is none."""
    return sum(file.stat().st_size for file in Path(directory).glob("*.safetensors"))


def read_seconds(directory: Path | str) -> float:
    """In which the weights of a Hugging Face directory are read, however slowly."""
    return weights_bytes(directory) / READ_BYTES_PER_S
