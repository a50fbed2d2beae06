"""Thinker of Qwen3-Omni: Qwen3 with experts behind towers for images, videos and sounds. arXiv
2509.17765.

The talker and the vocoder, which produce speech, are not trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from relax_hpc.training.models.qwen3_moe import Qwen3Moe
from relax_hpc.training.models.rules import (
    ANYWHERE,
    FLAG,
    MAPPING,
    NUMBER,
    SIZE,
    TOKEN,
    Rule,
    Section,
    one_of,
)
from relax_hpc.training.models.towers.audio import AudioTower
from relax_hpc.training.models.towers.vision import VisionTower
from relax_hpc.training.models.vision_language import VisionLanguage


@dataclass(frozen=True, kw_only=True)
class OmniVisionTower(VisionTower):
    """Vision tower of Qwen3-Omni: the same as in Qwen3-VL, with other names."""

    extra_rules: ClassVar[Mapping[str, Rule]] = {
        **dict.fromkeys(
            ("image_size", "in_chans", "spatial_patch_size", "tokens_per_second"), SIZE
        ),
        "apply_vit_abs_pos_embed": one_of(True),
    }
    built_by = "qwen3_omni_moe", "Qwen3OmniMoeVisionEncoder"
    mergers = "merger_list"
    merger_modules = ("ln_q", "mlp.0", "mlp.2")


@dataclass(frozen=True, kw_only=True)
class Qwen3OmniMoeThinker(VisionLanguage, Qwen3Moe):
    """Thinker of Qwen3-Omni without the rest of the model."""

    model_type = "qwen3_omni_moe_thinker"
    architecture = "Qwen3OmniMoeThinkerForConditionalGeneration"
    text_type = "qwen3_omni_moe_text"
    vision_types = ("qwen3_omni_moe_vision_encoder",)
    extra_rules: ClassVar[Mapping[str, Rule]] = {
        **Qwen3Moe.extra_rules,
        "shared_expert_intermediate_size": one_of(0),
        "use_qk_norm": one_of(True),
    }
    placeholder_keys = ("image_token_id", "video_token_id", "audio_token_id")
    top_rules: ClassVar[Mapping[str, Rule]] = {
        **dict.fromkeys(("vision_start_token_id", "vision_end_token_id", "user_token_id"), TOKEN),
        **dict.fromkeys(("audio_start_token_id", "audio_end_token_id"), TOKEN),
        **dict.fromkeys(("position_id_per_seconds", "seconds_per_chunk"), SIZE),
        "audio_config": MAPPING,
        "initializer_range": NUMBER,
    }
    vision = OmniVisionTower
    tower_width_keys: ClassVar[Mapping[str, str]] = {
        **VisionLanguage.tower_width_keys,
        "audio_config": "output_dim",
    }
    tower_prefix = "visual."
    audio_prefix: ClassVar[str] = "audio_tower."
    """Beginning of the names of the audio tower's tensors in Hugging Face files."""

    @classmethod
    def sections(cls) -> dict[str, Section]:
        """See `ModelSpec.sections`."""
        return super().sections() | {f"{cls.config_prefix}audio_config.": AudioTower.section()}

    @classmethod
    def sizes(cls, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """See `ModelSpec.sizes`."""
        found = super().sizes(hf_config)
        return found | {
            "towers": (
                *found["towers"],
                AudioTower.from_config(hf_config["audio_config"], cls.audio_prefix),
            )
        }


@dataclass(frozen=True, kw_only=True)
class Qwen3OmniMoe(Qwen3OmniMoeThinker):
    """Published Qwen3-Omni."""

    model_type = "qwen3_omni_moe"
    architecture = "Qwen3OmniMoeForConditionalGeneration"
    config_prefix = "thinker_config."
    decoder = "thinker.model."
    output = "thinker.lm_head.weight"
    tower_prefix = "thinker.visual."
    audio_prefix = "thinker.audio_tower."
    untrained_prefixes = ("talker.", "code2wav.")

    @classmethod
    def sections(cls) -> dict[str, Section]:
        """See `ModelSpec.sections`."""
        tokens = [
            "assistant",
            "im_start",
            "im_end",
            "system",
            "user",
            "tts_bos",
            "tts_eos",
            "tts_pad",
        ]
        top = {
            **ANYWHERE,
            "architectures": one_of([cls.architecture]),
            **dict.fromkeys(("thinker_config", "talker_config", "code2wav_config"), MAPPING),
            **dict.fromkeys((f"{name}_token_id" for name in tokens), TOKEN),
            "enable_audio_output": FLAG,
            "initializer_range": NUMBER,
            "tie_word_embeddings": FLAG,
        }
        return {"": Section(top, ("thinker_config",))} | super().sections()

    @classmethod
    def sizes(cls, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """See `ModelSpec.sizes`."""
        return super().sizes(hf_config["thinker_config"])
