"""Vision part of a small random model: tower, tokens, and settings of the processor."""

from __future__ import annotations

from typing import Any

from relax_hpc.config.schema import TinyModelConfig

TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Special tokens, in the order of their ids."""
# Keys of config.json for the ids of these tokens.
_NAMES = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
_PATCH, _MERGE, _TEMPORAL, _HEADS = 16, 2, 2, 2
# Learned positions of patches: a square of 16 x 16.
_POSITIONS = 256
# Limits for the pixels of an image: one token and 1,024 tokens.
_PIXELS = {"shortest_edge": 1024, "longest_edge": 1 << 20}


def vision_language_config(
    shape: TinyModelConfig, text: dict[str, Any], first: int
) -> dict[str, Any]:
    """The config.json of a Qwen3-VL of `shape`, dense or with experts.

    ``text``: config.json of the language model. ``first``: id of the first of `TOKENS`.
    """
    kind, name = ("qwen3_vl_moe", "Qwen3VLMoe") if shape.num_experts else ("qwen3_vl", "Qwen3VL")
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": kind,
        **model_parts(shape, text, first, (f"{kind}_text", kind)),
    }


def model_parts(
    shape: TinyModelConfig, text: dict[str, Any], first: int, types: tuple[str, str]
) -> dict[str, Any]:
    """Entries of config.json for a language model and its vision tower, of these ``types``. See
    `vision_language_config`."""
    half = shape.head_dim // 2
    side = half // 4
    rope = {
        "rope_type": "default",
        "mrope_interleaved": True,
        "mrope_section": [half - 2 * side, side, side],
    }
    text = {name: value for name, value in text.items() if name != "architectures"}
    return {
        "text_config": {**text, "model_type": types[0], "rope_scaling": rope},
        "vision_config": {"model_type": types[1], **_tower(shape)},
        "tie_word_embeddings": shape.tie_word_embeddings,
        "torch_dtype": text["torch_dtype"],
        **{name: first + number for number, name in enumerate(_NAMES)},
    }


def _tower(shape: TinyModelConfig) -> dict[str, Any]:
    return {
        "depth": shape.vision_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": 2 * shape.hidden_size,
        "num_heads": _HEADS,
        "out_hidden_size": shape.hidden_size,
        "num_position_embeddings": _POSITIONS,
        "deepstack_visual_indexes": list(range(min(shape.vision_layers, shape.num_layers))),
        "patch_size": _PATCH,
        "temporal_patch_size": _TEMPORAL,
        "spatial_merge_size": _MERGE,
        "in_channels": 3,
        "hidden_act": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
    }


def processors(family: str, videos: str) -> dict[str, dict[str, Any]]:
    """Content of the configuration files of the processors of images and videos.

    ``family``: class of the whole processor. ``videos``: class of the processor of videos.
    """
    common = {
        "patch_size": _PATCH,
        "temporal_patch_size": _TEMPORAL,
        "merge_size": _MERGE,
        "size": _PIXELS,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "processor_class": family,
    }
    images = {"image_processor_type": "Qwen2VLImageProcessor"}
    video = {"video_processor_type": videos, "fps": 2, "min_frames": 4}
    return {
        "preprocessor_config": common | images,
        "video_preprocessor_config": common | video,
    }
