"""The part of a small random Qwen3-VL model that sees: its tower, its tokens, and what its processor is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from relax_hpc.config.schema import TinyModelConfig

TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Special tokens, in the order of their ids."""
_PATCH, _MERGE, _TEMPORAL, _HEADS = 16, 2, 2, 2
_PLACES = 256
"""Places of patches that have an embedding of their own: a square of 16 a side."""
_PIXELS = {"shortest_edge": 1024, "longest_edge": 1 << 20}
"""Fewest and most pixels of an image: one token, and 1,024 of them."""


def seeing(shape: TinyModelConfig, text: dict[str, Any], first: int) -> dict[str, Any]:
    """The config.json of `shape` whose language model has that of ``text``. ``first``: id of the first of `TOKENS`."""
    half, ids = shape.head_dim // 2, range(first, first + len(TOKENS))
    side = half // 4
    turns = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [half - 2 * side, side, side]}
    text = {name: value for name, value in text.items() if name != "architectures"}
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": {**text, "model_type": "qwen3_vl_text", "rope_scaling": turns},
        "vision_config": _tower(shape),
        "tie_word_embeddings": shape.tie_word_embeddings,
        "torch_dtype": text["torch_dtype"],
        **dict(zip(names, ids, strict=True)),
    }


def _tower(shape: TinyModelConfig) -> dict[str, Any]:
    return {
        "model_type": "qwen3_vl",
        "depth": shape.vision_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": 2 * shape.hidden_size,
        "num_heads": _HEADS,
        "out_hidden_size": shape.hidden_size,
        "num_position_embeddings": _PLACES,
        "deepstack_visual_indexes": list(range(min(shape.vision_layers, shape.num_layers))),
        "patch_size": _PATCH,
        "temporal_patch_size": _TEMPORAL,
        "spatial_merge_size": _MERGE,
        "in_channels": 3,
        "hidden_act": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
    }


def tower_shapes(shape: TinyModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor of the tower."""
    tower = _tower(shape)
    width, inner, merged = tower["hidden_size"], tower["intermediate_size"], tower["hidden_size"] * _MERGE**2
    found: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (width, 3, _TEMPORAL, _PATCH, _PATCH),
        "patch_embed.proj.bias": (width,),
        "pos_embed.weight": (_PLACES, width),
    }

    def linear(name: str, out: int, into: int) -> None:
        found.update({f"{name}.weight": (out, into), f"{name}.bias": (out,)})

    def norm(name: str, size: int) -> None:
        found.update({f"{name}.weight": (size,), f"{name}.bias": (size,)})

    for block in (f"blocks.{number}" for number in range(shape.vision_layers)):
        norm(f"{block}.norm1", width)
        norm(f"{block}.norm2", width)
        linear(f"{block}.attn.qkv", 3 * width, width)
        linear(f"{block}.attn.proj", width, width)
        linear(f"{block}.mlp.linear_fc1", inner, width)
        linear(f"{block}.mlp.linear_fc2", width, inner)
    deep = [f"deepstack_merger_list.{number}" for number in range(len(tower["deepstack_visual_indexes"]))]
    for merger in ("merger", *deep):
        # Before patches are merged, and in deepstack's after that.
        norm(f"{merger}.norm", width if merger == "merger" else merged)
        linear(f"{merger}.linear_fc1", merged, merged)
        linear(f"{merger}.linear_fc2", tower["out_hidden_size"], merged)
    return {f"model.visual.{name}": size for name, size in found.items()}


def write_processor(directory: Path) -> None:
    """Write the files by which processors of images and videos are set up."""
    about = {"patch_size": _PATCH, "temporal_patch_size": _TEMPORAL, "merge_size": _MERGE, "size": _PIXELS}
    about |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor"}
    files = {"preprocessor_config": {"image_processor_type": "Qwen2VLImageProcessor"}}
    files["video_preprocessor_config"] = {"video_processor_type": "Qwen3VLVideoProcessor", "fps": 2, "min_frames": 4}
    for name, more in files.items():
        (directory / f"{name}.json").write_text(json.dumps(about | more, indent=2) + "\n")
