"""Images, a model that sees, and prompts with media for tests."""

from __future__ import annotations

import functools
import io
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from relax_hpc.config.schema import DataConfig, MultimodalConfig, TinyModelConfig
from relax_hpc.data.media import MediaRules, PromptMedium
from relax_hpc.data.multimodal.loading import load
from relax_hpc.data.multimodal.medium import Kind, Medium
from relax_hpc.data.named_media import Columns
from relax_hpc.data.rows import data_uri
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.queue.storage.media import MediaStore
from relax_hpc.training.models.tiny_model import make_tiny_model

SEEING = TinyModelConfig(vision_layers=2)
IMAGE = 51
"""Placeholder of an image in the tiny model."""
VIDEO = 52
START, END = 49, 50
"""Tokens around it."""


HEARING = TinyModelConfig(
    num_layers=3, vision_layers=2, audio_layers=2, num_experts=4, tie_word_embeddings=False
)
"""Fewer levels of DeepStack than the three that SGLang adds of itself."""


def hearing_model(directory: Path, seed: int = 0) -> Path:
    """A tiny Qwen3-Omni."""
    make_tiny_model(directory, HEARING, seed)
    return directory


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


def placed(
    model: Path, store: MediaStore, *media: tuple[Kind, bytes], heard: bool = False
) -> tuple[list[int], tuple[PromptMedium, ...]]:
    """A prompt with a place for each of some media, which are stored, and text around them;
    ``heard``: whether videos are heard, too."""
    data = DataConfig(multimodal=MultimodalConfig(use_audio_in_video=heard))
    tokenizer, rules = load_tokenizer(model), MediaRules.from_config(data, model, Path())
    assert rules
    sources: Columns = {
        kind: deque(data_uri(one) for found, one in media if found is kind) for kind in Kind
    }
    text = "a" + "".join(f"<{kind}>b" for kind, _ in media)
    encode = functools.partial(tokenizer.encode, special=False)
    named = {kind: some for kind, some in sources.items() if some}
    ids, found = rules.expand_placeholders(
        rules.encode_with_marks(text, named, tokenizer, False), named, encode
    )

    def kept(medium: PromptMedium) -> PromptMedium:
        blob = store.put(load(medium.kind, medium.source, rules.rules).to_bytes())
        return replace(medium, blob=store.folder / blob)

    return ids, tuple(map(kept, found))


def stored(medium: PromptMedium) -> Medium:
    """The medium in the blob of one of a prompt."""
    assert medium.blob
    return Medium.from_bytes(MediaStore(medium.blob.parent).read(medium.blob.name))
