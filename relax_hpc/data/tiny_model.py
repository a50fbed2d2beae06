"""A small random Qwen3 or Qwen3-VL model with a character tokenizer, made offline in the Hugging Face format."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_hpc.config.schema import TinyModelConfig
from relax_hpc.data import tiny_vision
from relax_hpc.errors import ConfigError
from relax_hpc.imports import many_imports

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
    write_tokenizer(partial, tiny_vision.TOKENS if shape.vision_layers else ())
    if shape.vision_layers:
        tiny_vision.write_processor(partial)
    _write_weights(partial / "model.safetensors", shape, seed)
    partial.rename(directory)


def model_config(shape: TinyModelConfig) -> dict[str, Any]:
    """The config.json of `shape`. ConfigError as `qwen3_config`."""
    text = qwen3_config(shape)
    if not shape.vision_layers:
        return text
    if shape.num_experts:
        raise ConfigError("model.tiny.vision_layers: found it beside num_experts, allowed: one of both")
    return tiny_vision.seeing(shape, text, len(SPECIAL) + len(CHARACTERS))


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
    hidden = shape.hidden_size
    query, value = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (value, hidden),
        "self_attn.v_proj": (value, hidden),
        "self_attn.o_proj": (hidden, query),
        "self_attn.q_norm": (shape.head_dim,),
        "self_attn.k_norm": (shape.head_dim,),
        "post_attention_layernorm": (hidden,),
        **_mlp_shapes(shape),
    }
    text = "model.language_model" if shape.vision_layers else "model"
    shapes = tiny_vision.tower_shapes(shape) if shape.vision_layers else {}
    shapes[f"{text}.embed_tokens.weight"] = (VOCAB_SIZE, hidden)
    for index in range(shape.num_layers):
        shapes |= {f"{text}.layers.{index}.{name}.weight": size for name, size in layer.items()}
    shapes[f"{text}.norm.weight"] = (hidden,)
    if not shape.tie_word_embeddings:
        shapes["lm_head.weight"] = (VOCAB_SIZE, hidden)
    return shapes


def _mlp_shapes(shape: TinyModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's feed-forward part, or of its router and experts."""

    def gated(place: str, inner: int) -> dict[str, tuple[int, ...]]:
        hidden = shape.hidden_size
        up_gate = {f"{place}.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        return up_gate | {f"{place}.down_proj": (hidden, inner)}

    if not shape.num_experts:
        return gated("mlp", shape.intermediate_size)
    found: dict[str, tuple[int, ...]] = {"mlp.gate": (shape.num_experts, shape.hidden_size)}
    for expert in range(shape.num_experts):
        found |= gated(f"mlp.experts.{expert}", shape.moe_intermediate_size)
    return found


def _write_weights(path: Path, shape: TinyModelConfig, seed: int) -> None:
    with many_imports():
        import torch
        from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, size: tuple[int, ...]) -> torch.Tensor:
        if name.endswith(".bias"):
            return torch.zeros(size)
        # One-dimensional parameters are norms' scales.
        return torch.ones(size) if len(size) == 1 else torch.randn(size, generator=generator) * INIT_STD

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
    _write_json(directory / "tokenizer_config.json", settings | names)


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
