"""Small random Qwen3, Qwen3-VL or Qwen3-Omni models with a character tokenizer, written offline in
the Hugging Face format."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import read_json_object
from relax_hpc.base.imports import fast_imports
from relax_hpc.config.schema import TinyModelConfig
from relax_hpc.training.models import tiny_audio, tiny_vision
from relax_hpc.training.models.families import spec_from_config
from relax_hpc.training.models.hf_mapping import published_forms
from relax_hpc.training.models.tiny_tokenizer import (
    BOS_ID,
    CHARACTERS,
    PAD_ID,
    SPECIAL,
    end_of_response,
    vocabulary,
    write_tokenizer,
)

if TYPE_CHECKING:
    import torch

INIT_STD = 0.02


def make_tiny_model(directory: Path, shape: TinyModelConfig, seed: int) -> None:
    """Write config, generation config, tokenizer and float32 weights drawn from `seed` into a new
    `directory`.

    The complete directory appears by rename; an existing one is kept. ConfigError: it holds another
    shape, or `shape` is impossible.
    """
    config = model_config(shape)
    if directory.exists():
        return _check_same(directory, config)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    _write_json(partial / "config.json", config)
    _write_json(partial / "generation_config.json", _special_ids(shape))
    write_tokenizer(partial, _media_tokens(shape), shape.chat, shape.words)
    for name, content in _processors(shape).items():
        _write_json(partial / f"{name}.json", content)
    _write_weights(partial / "model.safetensors", shape, seed)
    partial.rename(directory)


def _media_tokens(shape: TinyModelConfig) -> tuple[str, ...]:
    """Special tokens for media of a model of `shape`."""
    vision = tiny_vision.TOKENS if shape.vision_layers else ()
    audio = tiny_audio.TOKENS if shape.audio_layers else ()
    return (*vision, *audio)


def _special_ids(shape: TinyModelConfig) -> dict[str, int]:
    end = end_of_response(_media_tokens(shape), shape.chat)
    return {"bos_token_id": BOS_ID, "eos_token_id": end, "pad_token_id": PAD_ID}


def _processors(shape: TinyModelConfig) -> dict[str, dict[str, Any]]:
    """Content of the configuration files of media processors, by their names."""
    if shape.audio_layers:
        return tiny_audio.processors()
    if shape.vision_layers:
        return tiny_vision.processors("Qwen3VLProcessor", "Qwen3VLVideoProcessor")
    return {}


def model_config(shape: TinyModelConfig) -> dict[str, Any]:
    """The config.json of `shape`. ConfigError as in `qwen3_config`."""
    text, first = qwen3_config(shape), len(SPECIAL) + len(CHARACTERS)
    if shape.audio_layers:
        if not (shape.vision_layers and shape.num_experts):
            raise ConfigError(
                f"model.tiny.audio_layers: found {shape.audio_layers}, allowed only with "
                "vision_layers and num_experts, because the model is a Qwen3-Omni"
            )
        return tiny_audio.omni_config(shape, text, first)
    if not shape.vision_layers:
        return text
    return tiny_vision.vision_language_config(shape, text, first)


def qwen3_config(shape: TinyModelConfig) -> dict[str, Any]:
    """The config.json of the language model of `shape`. ConfigError: impossible sizes of
    attention."""
    if shape.num_attention_heads % shape.num_key_value_heads:
        raise ConfigError(
            f"model.tiny.num_attention_heads: found {shape.num_attention_heads}, allowed "
            f"multiples of num_key_value_heads ({shape.num_key_value_heads})"
        )
    if shape.head_dim % 2:
        raise ConfigError(
            f"model.tiny.head_dim: found {shape.head_dim}, allowed even numbers (rotary embedding)"
        )
    return {
        **_family(shape),
        "vocab_size": len(vocabulary(_media_tokens(shape), shape.chat, shape.words)),
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 2048 if shape.vision_layers or shape.chat else 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "attention_bias": False,
        "hidden_act": "silu",
        "initializer_range": INIT_STD,
        **_special_ids(shape),
        "torch_dtype": "float32",
    }


def _family(shape: TinyModelConfig) -> dict[str, Any]:
    """Entries of config.json that name the family, with its experts."""
    if not shape.num_experts:
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    if shape.num_experts_per_tok > shape.num_experts:
        raise ConfigError(
            f"model.tiny.num_experts_per_tok: found {shape.num_experts_per_tok}, allowed at most "
            f"num_experts ({shape.num_experts})"
        )
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.num_experts_per_tok,
        "moe_intermediate_size": shape.moe_intermediate_size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def parameter_shapes(shape: TinyModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every stored tensor; tied output weights are not stored."""
    forms = published_forms(spec_from_config(model_config(shape)))
    return {name: form.shape for name, form in forms.items()}


def _write_weights(path: Path, shape: TinyModelConfig, seed: int) -> None:
    with fast_imports():
        import torch
        from safetensors.torch import save_file

    # The order of the names decides which tensor gets which random numbers.
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, size: tuple[int, ...]) -> torch.Tensor:
        if name.endswith(".bias"):
            return torch.zeros(size)
        if len(size) == 1:
            # Scales of norms.
            return torch.ones(size)
        std = math.sqrt(2 / math.prod(size[1:])) if tiny_audio.PREFIX in name else INIT_STD
        return torch.randn(size, generator=generator) * std

    weights = {name: draw(name, size) for name, size in parameter_shapes(shape).items()}
    save_file(weights, path, metadata={"format": "pt"})


def _check_same(directory: Path, config: dict[str, Any]) -> None:
    stored = read_json_object(
        directory / "config.json", "remove the directory, so that the model is created again"
    )
    for key, value in config.items():
        if stored.get(key) != value:
            raise ConfigError(
                f"{directory}: holds a model with {key} {stored.get(key)}, model.tiny asks for "
                f"{value}; use another run directory"
            )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
