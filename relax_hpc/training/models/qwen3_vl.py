"""Dense Qwen3-VL: Qwen3 behind a vision tower. arXiv 2511.21631."""

from __future__ import annotations

from dataclasses import dataclass

from relax_hpc.training.models.qwen3 import Qwen3
from relax_hpc.training.models.vision_language import VisionLanguage


@dataclass(frozen=True, kw_only=True)
class Qwen3VL(VisionLanguage, Qwen3):
    """Qwen3-VL. `tie_word_embeddings` on the level of `text_config` decides whether the embedding
    is the output layer."""

    model_type = "qwen3_vl"
    architecture = "Qwen3VLForConditionalGeneration"
    text_type = "qwen3_vl_text"
    vision_types = ("qwen3_vl_vision", "qwen3_vl")
    decoder = "model.language_model."
