"""Qwen3-VL, dense: Qwen3 behind a vision tower. arXiv 2511.21631."""

from __future__ import annotations

from dataclasses import dataclass

from relax_hpc.training.models.qwen3 import Qwen3
from relax_hpc.training.models.vision_language import VisionLanguage


@dataclass(frozen=True, kw_only=True)
class Qwen3VL(VisionLanguage, Qwen3):
    """Qwen3-VL. Its embedding is the output layer if `tie_word_embeddings` beside `text_config`
    says so."""

    model_type = "qwen3_vl"
    architecture = "Qwen3VLForConditionalGeneration"
    text_type = "qwen3_vl_text"
    vision_types = ("qwen3_vl_vision", "qwen3_vl")
    decoder = "model.language_model."
