"""Choice between experts that are computed in one product and experts one after the other."""

from __future__ import annotations

from collections.abc import Iterator

from relax_hpc.config.schema import Experts, ModelConfig, ParallelConfig
from relax_hpc.training.models.spec import ModelSpec

_WIDTH_MULTIPLE = 8
"""torch 2.11 and 2.13 refuse matrices whose rows are no multiple of 16 bytes, 8 bfloat16 values."""


def groups_experts(
    choice: Experts, spec: ModelSpec, model: ModelConfig, parallel: ParallelConfig
) -> bool:
    """Whether the experts of a rank are computed in one product, under the setting ``choice``.

    `auto` groups them on GPUs if nothing prevents it: tools/bench/results/gpu-nvidia-h200.json has
    6.7 times the speed of single experts. torch computes the product as a loop on CPUs.
    """
    if not spec.experts or choice == "sequential":
        return False
    if choice == "grouped":
        return True
    return model.device == "cuda" and not any(grouping_errors(spec, model, parallel))


def grouping_errors(spec: ModelSpec, model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Reasons why `experts: grouped` does not run, lines that begin with the field. CPUs have
    none."""
    if not spec.experts or model.device == "cpu":
        return
    allowed = "allowed: sequential, or auto, which chooses it here"
    if model.dtype != "bfloat16":
        yield (
            f"experts: found grouped with model.dtype {model.dtype}, {allowed}; torch's grouped "
            "product needs bfloat16 on a GPU"
        )
    # Experts that ranks share are whole; see `ParallelConfig.expert`.
    inner = spec.inner // parallel.expert_tensor
    for name, width in (("hidden_size", spec.hidden), ("moe_intermediate_size", inner)):
        if width % _WIDTH_MULTIPLE:
            yield (
                f"experts: found grouped with a {name} of {width} in each tensor rank, {allowed}; "
                f"torch's grouped product needs multiples of {_WIDTH_MULTIPLE} on a GPU"
            )
