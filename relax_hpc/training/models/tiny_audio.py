"""Audio part of a small random Qwen3-Omni: tower, tokens, and settings of the processor."""

from __future__ import annotations

from typing import Any

from relax_hpc.config.schema import TinyModelConfig
from relax_hpc.training.models import tiny_vision

TOKENS = ("<|audio_start|>", "<|audio_end|>", "<|audio_pad|>")
"""Special tokens, in the order of their ids, which follow those of vision."""
PREFIX = "audio_tower."
"""Part of the names of its tensors. Their weights are drawn so that activations keep their size (He
et al., arXiv 1502.01852, section 2.2). With smaller weights a sound would be a ten-millionth of its
positions, and a short run would learn nothing from it."""
# Keys of config.json for the ids of these tokens.
_NAMES = ("audio_start_token_id", "audio_end_token_id", "audio_token_id")
# Mel bins, channels of the convolutions, heads.
_BINS, _CHANNELS, _HEADS = 64, 8, 2


def omni_config(shape: TinyModelConfig, text: dict[str, Any], first: int) -> dict[str, Any]:
    """The config.json of a Qwen3-Omni of `shape` without a talker.

    ``text``: config.json of the language model. ``first``: id of the first token of vision.
    """
    types = "qwen3_omni_moe_text", "qwen3_omni_moe_vision_encoder"
    first_audio = first + len(tiny_vision.TOKENS)
    thinker = {
        "model_type": "qwen3_omni_moe_thinker",
        **tiny_vision.model_parts(shape, text, first, types),
        "audio_config": _tower(shape),
        "position_id_per_seconds": 13,
        **{name: first_audio + number for number, name in enumerate(_NAMES)},
    }
    return {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "enable_audio_output": False,
        "thinker_config": thinker,
        "torch_dtype": text["torch_dtype"],
    }


def _tower(shape: TinyModelConfig) -> dict[str, Any]:
    """Tower with the published chunks of one second and windows of eight, but smaller layers."""
    return {
        "model_type": "qwen3_omni_moe_audio_encoder",
        "num_mel_bins": _BINS,
        "encoder_layers": shape.audio_layers,
        "encoder_attention_heads": _HEADS,
        "encoder_ffn_dim": 2 * shape.hidden_size,
        "d_model": shape.hidden_size,
        "downsample_hidden_size": _CHANNELS,
        "output_dim": shape.hidden_size,
        "n_window": 50,
        "n_window_infer": 800,
        "conv_chunksize": 500,
        "max_source_positions": 1500,
        "activation_function": "gelu",
        "initializer_range": 0.02,
    }


def processors() -> dict[str, dict[str, Any]]:
    """Content of the configuration files of the processors of images, videos and sounds."""
    files = tiny_vision.processors("Qwen3OmniMoeProcessor", "Qwen2VLVideoProcessor")
    files["preprocessor_config"] |= {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": _BINS,
        "sampling_rate": 16000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": 300,
        "return_attention_mask": True,
    }
    return files
