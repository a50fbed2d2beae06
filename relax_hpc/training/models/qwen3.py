"""Qwen3, dense: queries and keys are normalised by head. arXiv 2505.09388."""

from __future__ import annotations

from dataclasses import dataclass

from relax_hpc.training.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Qwen3(ModelSpec):
    """Qwen3. Without num_key_value_heads transformers takes 32, whatever the other sizes are, and
    without head_dim 128."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    needed = (*ModelSpec.needed, "num_key_value_heads", "head_dim")
    qk_norm = True
