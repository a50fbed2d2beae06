"""Images, a model that sees, and prompts with media for tests."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from relax_hpc.config.schema import TinyModelConfig
from relax_hpc.data.media import PromptMedium
from relax_hpc.data.tiny_model import make_tiny_model
from relax_hpc.multimodal.image import load
from relax_hpc.multimodal.medium import Medium
from relax_hpc.multimodal.rules import Rules
from relax_hpc.transfer_queue.storage.media import MediaStore

SEEING = TinyModelConfig(vision_layers=2)
IMAGE = 51
"""Placeholder of an image in the tiny model."""
START, END = 49, 50
"""Tokens around it."""


def seeing_model(directory: Path, seed: int = 0) -> Path:
    """A tiny Qwen3-VL."""
    make_tiny_model(directory, SEEING, seed)
    return directory


def png(height: int = 64, width: int = 64, seed: int = 0) -> bytes:
    """A picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def placed(model: Path, store: MediaStore, *images: bytes) -> tuple[list[int], tuple[PromptMedium, ...]]:
    """A prompt with a place for each of some images, which are stored, and text around them."""
    rules, ids, media = Rules.of(model), [1, 5], list[PromptMedium]()
    for image in images:
        medium = load(image, rules)
        ids.append(START)
        blob = store.folder / store.put(medium.to_bytes())
        media.append(PromptMedium(medium.kind, image, ((len(ids), rules.tokens(medium)),), blob))
        ids += [IMAGE] * rules.tokens(medium) + [END, 7]
    return ids, tuple(media)


def stored(medium: PromptMedium) -> Medium:
    """The medium in the blob of one of a prompt."""
    assert medium.blob
    return Medium.from_bytes(MediaStore(medium.blob.parent).read(medium.blob.name))
