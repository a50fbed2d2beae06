"""A small random Qwen3, Qwen3-VL or Qwen3-Omni model with a character tokenizer, made offline in the Hugging Face
format."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_hpc.config.schema import TinyModelConfig
from relax_hpc.errors import ConfigError
from relax_hpc.imports import many_imports
from relax_hpc.models import tiny_audio, tiny_vision
from relax_hpc.models.families import spec_of
from relax_hpc.models.hf_mapping import published_forms

if TYPE_CHECKING:
    import torch

CHARACTERS = "0123456789+-*=:?,>.abcdefghijklmnopqrstuvwxyz "
SPECIAL = ("<pad>", "<s>", "</s>")
PAD_ID, BOS_ID, EOS_ID = range(3)
VOCAB_SIZE = 64
"""Characters, special tokens, and spare entries up to a round number."""
INIT_STD = 0.02


def make_tiny_model(directory: Path, shape: TinyModelConfig, seed: int) -> None:
    """Write config, generation config, tokenizer and float32 weights drawn from `seed` into a new `directory`.

    The directory appears whole, by rename; one that is there already is kept. ConfigError: it holds another shape,
    or `shape` is impossible.
    """
    config = model_config(shape)
    if directory.exists():
        return _check_same(directory, config)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    _write_json(partial / "config.json", config)
    _write_json(partial / "generation_config.json", ids)
    write_tokenizer(partial, _media_tokens(shape))
    for name, content in _processors(shape).items():
        _write_json(partial / f"{name}.json", content)
    _write_weights(partial / "model.safetensors", shape, seed)
    partial.rename(directory)


def _media_tokens(shape: TinyModelConfig) -> tuple[str, ...]:
    """Special tokens by which a model of `shape` has places for media."""
    return (*(tiny_vision.TOKENS if shape.vision_layers else ()), *(tiny_audio.TOKENS if shape.audio_layers else ()))


def _processors(shape: TinyModelConfig) -> dict[str, dict[str, Any]]:
    """Content of the files that say how media are prepared, by their names."""
    if shape.audio_layers:
        return tiny_audio.processors()
    return tiny_vision.processors("Qwen3VLProcessor", "Qwen3VLVideoProcessor") if shape.vision_layers else {}


def model_config(shape: TinyModelConfig) -> dict[str, Any]:
    """The config.json of `shape`. ConfigError as `qwen3_config`."""
    text, first = qwen3_config(shape), len(SPECIAL) + len(CHARACTERS)
    if shape.audio_layers:
        if not (shape.vision_layers and shape.num_experts):
            raise ConfigError(
                f"model.tiny.audio_layers: found {shape.audio_layers}, allowed beside vision_layers and num_experts: "
                "what hears is a Qwen3-Omni, which sees too, and has experts"
            )
        return tiny_audio.hearing(shape, text, first)
    if not shape.vision_layers:
        return text
    return tiny_vision.seeing(shape, text, first)


def qwen3_config(shape: TinyModelConfig) -> dict[str, Any]:
    """The config.json of the language model of `shape`. ConfigError if attention cannot have it."""
    if shape.num_attention_heads % shape.num_key_value_heads:
        raise ConfigError(
            f"model.tiny.num_attention_heads: found {shape.num_attention_heads}, allowed multiples of "
            f"num_key_value_heads ({shape.num_key_value_heads})"
        )
    if shape.head_dim % 2:
        raise ConfigError(f"model.tiny.head_dim: found {shape.head_dim}, allowed even numbers (rotary embedding)")
    return {
        **_family(shape),
        "vocab_size": VOCAB_SIZE,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 2048 if shape.vision_layers else 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "attention_bias": False,
        "hidden_act": "silu",
        "initializer_range": INIT_STD,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": "float32",
    }


def _family(shape: TinyModelConfig) -> dict[str, Any]:
    """Entries of config.json that say which model it is."""
    if not shape.num_experts:
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    if shape.num_experts_per_tok > shape.num_experts:
        raise ConfigError(
            f"model.tiny.num_experts_per_tok: found {shape.num_experts_per_tok}, allowed at most num_experts "
            f"({shape.num_experts})"
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
    return {name: form.shape for name, form in published_forms(spec_of(model_config(shape))).items()}


def _write_weights(path: Path, shape: TinyModelConfig, seed: int) -> None:
    with many_imports():
        import torch
        from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, size: tuple[int, ...]) -> torch.Tensor:
        if name.endswith(".bias"):
            return torch.zeros(size)
        if len(size) == 1:
            # The scales of norms.
            return torch.ones(size)
        std = math.sqrt(2 / math.prod(size[1:])) if tiny_audio.PLACE in name else INIT_STD
        return torch.randn(size, generator=generator) * std

    weights = {name: draw(name, size) for name, size in parameter_shapes(shape).items()}
    save_file(weights, path, metadata={"format": "pt"})


def write_tokenizer(directory: Path, more: tuple[str, ...] = ()) -> None:
    """One token a character, BOS in front; unknown characters become <pad>. ``more``: special tokens after all
    others."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    words = [*SPECIAL, *CHARACTERS, *more]
    words += [f"<unused{index}>" for index in range(VOCAB_SIZE - len(words))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([*SPECIAL, *more])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS_ID)])
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True, "model_max_length": 256}
    _write_json(
        directory / "tokenizer_config.json", settings | names | ({"extra_special_tokens": _named(more)} if more else {})
    )


def _named(tokens: tuple[str, ...]) -> dict[str, str]:
    """Names of ``tokens`` by which transformers' processors of Qwen3-Omni ask for them."""
    words = {"pad": "token", "start": "bos_token", "end": "eos_token"}
    parts = ((token, *token.strip("<|>").split("_")) for token in tokens)
    return {f"{sense}_{words[what]}": token for token, sense, what in parts}


def _check_same(directory: Path, config: dict[str, Any]) -> None:
    try:
        found = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory}: not a model made here ({error}); remove the directory") from error
    differing = [key for key, value in config.items() if found.get(key) != value]
    if differing:
        key = differing[0]
        raise ConfigError(
            f"{directory}: holds a model with {key} {found.get(key)}, model.tiny asks for {config[key]}; "
            "use another run directory"
        )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
