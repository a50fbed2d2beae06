"""Dense Qwen3: queries and keys are normalized per head. arXiv 2505.09388."""

from __future__ import annotations

from dataclasses import dataclass

from relax_hpc.training.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Qwen3(ModelSpec):
    """Qwen3. The defaults of transformers are 32 for num_key_value_heads and 128 for head_dim,
    independent of the other sizes, so both keys are required."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    required_keys = (*ModelSpec.required_keys, "num_key_value_heads", "head_dim")
    qk_norm = True
