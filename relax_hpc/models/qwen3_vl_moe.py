"""Qwen3-VL with experts: Qwen3 with experts behind a vision tower. arXiv 2511.21631."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from relax_hpc.models.qwen3_moe import Qwen3Moe
from relax_hpc.models.rules import Rule, one_of
from relax_hpc.models.vision_language import VisionLanguage


@dataclass(frozen=True, kw_only=True)
class Qwen3VLMoe(VisionLanguage, Qwen3Moe):
    """Qwen3-VL with experts, whose probabilities always add up to 1."""

    model_type = "qwen3_vl_moe"
    architecture = "Qwen3VLMoeForConditionalGeneration"
    text_type = "qwen3_vl_moe_text"
    vision_types = ("qwen3_vl_moe_vision", "qwen3_vl_moe")
    own_rules: ClassVar[Mapping[str, Rule]] = Qwen3Moe.own_rules | {"norm_topk_prob": one_of(True)}
    decoder = "model.language_model."
    # As it is published, and as transformers and SGLang read it.
    turned = True

    @classmethod
    def sizes(cls, known: Mapping[str, Any]) -> dict[str, Any]:
        """See `ModelSpec.sizes`."""
        return super().sizes(known) | {"normalised": True}
