"""Decoders behind the vision tower of Qwen3-VL: a nested config.json, three positions a token,
placeholders."""

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

_USUAL_SECTIONS = (24, 20, 20)
"""Sections of a model that does not say, as in transformers 5."""
_SECTIONS = Rule(
    "three positive integers",
    lambda found: isinstance(found, list) and len(found) == 3 and all(map(SIZE.fits, found)),
)
_MROPE = {
    "mrope_section": _SECTIONS,
    "mrope_interleaved": one_of(True),
    "interleaved": one_of(True),
}


@dataclass(frozen=True, kw_only=True)
class VisionLanguage(ModelSpec):
    """Model of a tower and a decoder, which `vision_config` and `text_config` describe. Mixed into
    a decoder's spec."""

    text_type: ClassVar[str]
    """Value of `text_config.model_type`."""
    vision_types: ClassVar[tuple[str, ...]]
    """Values of `vision_config.model_type`, as transformers 5 and others write it."""
    within: ClassVar[str] = ""
    """Beginning of the keys of the mapping that holds all of this, such as `thinker_config.`."""
    placeholder_keys: ClassVar[tuple[str, ...]] = ("image_token_id", "video_token_id")
    """Keys of the tokens in whose places media come."""
    top_rules: ClassVar[Mapping[str, Rule]] = {
        "vision_start_token_id": TOKEN,
        "vision_end_token_id": TOKEN,
    }
    """Rules for further keys beside `text_config`."""
    vision: ClassVar[type[VisionTower]] = VisionTower
    widths_of_towers: ClassVar[Mapping[str, str]] = {"vision_config": "out_hidden_size"}
    """Keys of the width of what a tower gives, by the mapping that describes the tower."""
    tower_place: ClassVar[str] = "model.visual."
    """Beginning of the names of the vision tower's tensors in Hugging Face files."""

    @classmethod
    def sections(cls) -> dict[str, Section]:
        """See `ModelSpec.sections`."""
        text = {**cls.rules(), "model_type": one_of(cls.text_type)}
        text.pop("architectures")
        text |= {f"{name}.{key}": rule for name in ROPE for key, rule in _MROPE.items()}
        top = (
            ANYWHERE
            | dict.fromkeys(cls.placeholder_keys, TOKEN)
            | {
                "text_config": MAPPING,
                "vision_config": MAPPING,
                "tie_word_embeddings": FLAG,
                "architectures": one_of([cls.architecture]),
                **cls.top_rules,
            }
        )
        return {
            cls.within: Section(
                top, ("text_config", "vision_config", *cls.placeholder_keys), cls.mismatches
            ),
            f"{cls.within}text_config.": Section(text, cls.needed, cls.contradictions),
            f"{cls.within}vision_config.": cls.vision.section(cls.vision_types),
        }

    @classmethod
    def sizes(cls, known: Mapping[str, Any]) -> dict[str, Any]:
        """See `ModelSpec.sizes`."""
        text = known["text_config"] | {
            "tie_word_embeddings": known.get("tie_word_embeddings", False)
        }
        return super().sizes(text) | {
            "towers": (cls.vision.from_config(known["vision_config"], cls.tower_place),),
            "rotary_sections": tuple(rope(text).get("mrope_section", _USUAL_SECTIONS)),
            "placeholders": tuple(sorted({known[key] for key in cls.placeholder_keys})),
        }

    @classmethod
    def contradictions(cls, known: Mapping[str, Any]) -> Iterator[str]:
        """See `ModelSpec.contradictions`, of `text_config`."""
        yield from super().contradictions(known)
        if "rope_theta" not in known and "rope_theta" not in rope(known):
            yield "rope_theta is missing; the engine and transformers take different ones then"
        sections, dim = (
            rope(known).get("mrope_section", list(_USUAL_SECTIONS)),
            known.get("head_dim"),
        )
        if _SECTIONS.fits(sections) and SIZE.fits(dim) and 2 * sum(sections) != dim:
            yield (
                f"mrope_section is {sections}, supported are three numbers whose sum is half of "
                f"head_dim, {dim}"
            )

    @classmethod
    def mismatches(cls, known: Mapping[str, Any]) -> Iterator[str]:
        """Contradictions between the parts of a model, one line each."""
        text = known.get("text_config")
        for name, key in cls.widths_of_towers.items():
            tower = known.get(name)
            # What is no mapping is found fault with by its rule.
            if not isinstance(text, dict) or not isinstance(tower, dict):
                continue
            found, wide = tower.get(key), text.get("hidden_size")
            if found != wide:
                yield f"{name}.{key} is {found}, supported is text_config.hidden_size, {wide}"
