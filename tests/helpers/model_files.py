"""Hugging Face directories as far as checks read them: config.json, a tokenizer, headers of weights
without bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from relax_hpc.training.models.families import FAMILIES
from relax_hpc.training.models.hf_mapping import all_pieces
from relax_hpc.training.models.tiny_tokenizer import write_tokenizer
from relax_hpc.training.weights.tensors import header_text

SMALL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
}


def model_directory(path: Path, **changes: Any) -> Path:
    """A new directory `path` with a model of `SMALL` sizes and `changes`; its tensors are holes of
    bfloat16."""
    config = {key: value for key, value in (SMALL | changes).items() if value is not None}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    write_tokenizer(path)
    pieces = all_pieces(FAMILIES[config["model_type"]].from_config(config))
    text = header_text(
        [(name, "BF16", piece.shape) for name, piece in pieces.items()], {"format": "pt"}
    ).encode()
    ends = [
        one["data_offsets"][1] for name, one in json.loads(text).items() if name != "__metadata__"
    ]
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + max(ends))
    return path
