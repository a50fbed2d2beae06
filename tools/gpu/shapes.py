"""Shapes of measured models with random weights, and rows for their training."""

from __future__ import annotations

from typing import Any

import numpy as np

QWEN3 = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "tie_word_embeddings": True,
    }
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512},
    "0.6B": QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "1.7B": QWEN3
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "8B": QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "tie_word_embeddings": False,
    }
    | {"num_attention_heads": 32},
}


def hf_config(name: str) -> dict[str, Any]:
    """config.json of Qwen3 with the shape ``name``."""
    family = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 40960,
    }
    return SHAPES[name] | family


def rows(count: int, length: int, vocab: int) -> list[dict[str, np.ndarray]]:
    """``count`` rows of ``length`` random tokens. The first eighth of a row is the prompt."""
    generator = np.random.default_rng(0)
    samples = []
    for _ in range(count):
        mask = np.arange(length) >= length // 8
        old = generator.normal(-11.0, 0.3, length).astype(np.float32) * mask
        advantages = generator.normal(size=length).astype(np.float32) * mask
        row: dict[str, np.ndarray] = {
            "token_ids": generator.integers(3, vocab - 1, length).astype(np.int32)
        }
        row |= {"loss_mask": mask.astype(np.uint8), "old_logprobs": old, "rollout_logprobs": old}
        samples.append(row | {"advantages": advantages})
    return samples
