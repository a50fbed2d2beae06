"""Qwen3-VL with experts: Qwen3 with experts behind a vision tower. arXiv 2511.21631."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from relax_hpc.training.models.qwen3_moe import Qwen3Moe
from relax_hpc.training.models.rules import SIZE, Rule, one_of
from relax_hpc.training.models.vision_language import VisionLanguage


@dataclass(frozen=True, kw_only=True)
class Qwen3VLMoe(VisionLanguage, Qwen3Moe):
    """Qwen3-VL with experts. The probabilities of the chosen experts always add up to 1."""

    model_type = "qwen3_vl_moe"
    architecture = "Qwen3VLMoeForConditionalGeneration"
    text_type = "qwen3_vl_moe_text"
    vision_types = ("qwen3_vl_moe_vision", "qwen3_vl_moe")
    extra_rules: ClassVar[Mapping[str, Rule]] = {
        **Qwen3Moe.extra_rules,
        "norm_topk_prob": one_of(True),
    }
    decoder = "model.language_model."
    # In published files each expert is transposed, as transformers and SGLang read it. transformers
    # 5 saves it not transposed.
    published_packed = True

    @classmethod
    def contradictions(cls, hf_config: Mapping[str, Any]) -> Iterator[str]:
        """See `ModelSpec.contradictions`, of `text_config`."""
        yield from super().contradictions(hf_config)
        hidden: Any = hf_config.get("hidden_size")
        inner = hf_config.get("moe_intermediate_size")
        if SIZE.fits(hidden) and inner in (hidden, hidden / 2):
            yield (
                f"moe_intermediate_size is {inner}, supported is neither hidden_size, {hidden}, "
                "nor half of it; the shapes would not show whether the experts of a file are "
                "transposed"
            )

    @classmethod
    def sizes(cls, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """See `ModelSpec.sizes`."""
        return super().sizes(hf_config) | {"normalizes_topk": True}
