"""Decoders behind the vision tower of Qwen3-VL: a nested config.json, three positions per token,
and placeholders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from relax_hpc.training.models.rules import (
    ANYWHERE,
    FLAG,
    MAPPING,
    ROPE,
    SIZE,
    TOKEN,
    Rule,
    Section,
    one_of,
    rope,
)
from relax_hpc.training.models.spec import ModelSpec
from relax_hpc.training.models.towers.vision import VisionTower

# Sections of a model without `mrope_section`, as in transformers 5.
_USUAL_SECTIONS = (24, 20, 20)
_SECTIONS = Rule(
    "three positive integers",
    lambda value: isinstance(value, list) and len(value) == 3 and all(map(SIZE.fits, value)),
)
_MROPE = {
    "mrope_section": _SECTIONS,
    "mrope_interleaved": one_of(True),
    "interleaved": one_of(True),
}


@dataclass(frozen=True, kw_only=True)
class VisionLanguage(ModelSpec):
    """Mixin for a decoder's specification. `vision_config` describes the tower, `text_config` the
    decoder."""

    text_type: ClassVar[str]
    """Value of `text_config.model_type`."""
    vision_types: ClassVar[tuple[str, ...]]
    """Values of `vision_config.model_type`, as transformers 5 and other programs write it."""
    config_prefix: ClassVar[str] = ""
    """Prefix of the mapping that contains both mappings, such as `thinker_config.`."""
    placeholder_keys: ClassVar[tuple[str, ...]] = ("image_token_id", "video_token_id")
    """Keys of the tokens that media replace."""
    top_rules: ClassVar[Mapping[str, Rule]] = {
        "vision_start_token_id": TOKEN,
        "vision_end_token_id": TOKEN,
    }
    """Rules for further keys on the level of `text_config`."""
    vision: ClassVar[type[VisionTower]] = VisionTower
    tower_width_keys: ClassVar[Mapping[str, str]] = {"vision_config": "out_hidden_size"}
    """Key of a tower's output width, by the mapping that describes the tower."""
    tower_prefix: ClassVar[str] = "model.visual."
    """Beginning of the names of the vision tower's tensors in Hugging Face files."""

    @classmethod
    def sections(cls) -> dict[str, Section]:
        """See `ModelSpec.sections`."""
        text = {**cls.rules(), "model_type": one_of(cls.text_type)}
        text.pop("architectures")
        for name in ROPE:
            text |= {f"{name}.{key}": rule for key, rule in _MROPE.items()}
        top = {
            **ANYWHERE,
            **dict.fromkeys(cls.placeholder_keys, TOKEN),
            "text_config": MAPPING,
            "vision_config": MAPPING,
            "tie_word_embeddings": FLAG,
            "architectures": one_of([cls.architecture]),
            **cls.top_rules,
        }
        required = ("text_config", "vision_config", *cls.placeholder_keys)
        prefix = cls.config_prefix
        return {
            prefix: Section(top, required, cls.mismatches),
            f"{prefix}text_config.": Section(text, cls.required_keys, cls.contradictions),
            f"{prefix}vision_config.": cls.vision.section(cls.vision_types),
        }

    @classmethod
    def sizes(cls, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """See `ModelSpec.sizes`."""
        text = hf_config["text_config"] | {
            "tie_word_embeddings": hf_config.get("tie_word_embeddings", False)
        }
        return super().sizes(text) | {
            "towers": (cls.vision.from_config(hf_config["vision_config"], cls.tower_prefix),),
            "rotary_sections": tuple(rope(text).get("mrope_section", _USUAL_SECTIONS)),
            "placeholders": tuple(sorted({hf_config[key] for key in cls.placeholder_keys})),
        }

    @classmethod
    def contradictions(cls, hf_config: Mapping[str, Any]) -> Iterator[str]:
        """See `ModelSpec.contradictions`, of `text_config`."""
        yield from super().contradictions(hf_config)
        if "rope_theta" not in hf_config and "rope_theta" not in rope(hf_config):
            yield "rope_theta is missing; the engine and transformers have different defaults"
        sections = rope(hf_config).get("mrope_section", list(_USUAL_SECTIONS))
        dim = hf_config.get("head_dim")
        if _SECTIONS.fits(sections) and SIZE.fits(dim) and 2 * sum(sections) != dim:
            yield (
                f"mrope_section is {sections}, supported are three numbers whose sum is half of "
                f"head_dim, {dim}"
            )

    @classmethod
    def mismatches(cls, hf_config: Mapping[str, Any]) -> Iterator[str]:
        """Contradictions between the parts of a model, one line each."""
        text = hf_config.get("text_config")
        for name, key in cls.tower_width_keys.items():
            tower = hf_config.get(name)
            # The rule MAPPING reports other types.
            if not isinstance(text, dict) or not isinstance(tower, dict):
                continue
            width, hidden = tower.get(key), text.get("hidden_size")
            if width != hidden:
                yield f"{name}.{key} is {width}, supported is text_config.hidden_size, {hidden}"
