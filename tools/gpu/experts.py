"""Experts that are computed one by one (single) or together (grouped).

`width N`: gradients of a small model in bfloat16, compared with float32. `layers`: seconds and
memory of a forward and backward pass of a few layers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from cases import Cases
from child import answer
from passes import host_and_total_s, peak_gib, reset_peak
from policies import PATIENCE_S, settings_of
from shapes import rows

from relax_hpc.base.fields import ROUTES, declare_fields
from relax_hpc.config.schema import ModelConfig, ParallelConfig
from relax_hpc.training import parallel

if TYPE_CHECKING:
    from torch import Tensor

    from relax_hpc.training.model import PolicyModel
    from relax_hpc.training.models.batches import Batch

_FAMILY = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "small": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
    # The vocabulary is small, because only the layers are measured.
    "4 layers of 30B-A3B": {
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
}
# Values of the setting `actor.experts` by the prefix of their figures.
_EXPERTS = {"grouped": "grouped", "single": "sequential"}
_ROWS, _TOKENS = 3, 40
"""Rows of the comparison with float32, and tokens of each row."""
_UNUSED_EXPERTS = 2
"""Experts without a token in the comparison with float32."""
_NUMBER = re.compile(r"\d+")


def build_model(
    shape: Mapping[str, Any],
    dtype: Literal["float32", "bfloat16"],
    actor: dict[str, Any],
    device: str,
    routing_replay: Literal["on", "off"] = "off",
) -> PolicyModel:
    """A model with random weights, which are equal for equal shapes."""
    from megatron.core import tensor_parallel

    from relax_hpc.training.model import PolicyModel

    torch.manual_seed(0)
    tensor_parallel.model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    model = ModelConfig(dtype=dtype, device=device, routing_replay=routing_replay)
    return PolicyModel({**_FAMILY, **shape}, model, ParallelConfig(), settings_of(actor, device))


def run_pass(model: PolicyModel, batch: Batch) -> Tensor:
    """Mean loss of a forward and backward pass. Previous gradients are discarded."""
    model.module.zero_grad()
    logprobs, _ = model.logprobs(batch, 1.0)
    loss = -(logprobs * batch.mask).sum() / batch.mask.sum()
    loss.backward()
    return loss.detach()


def routed_batch(shape: Mapping[str, Any], device: str) -> Batch:
    """Micro-batch whose rows determine the experts of each token.

    Without these routes, a rounding could send a token to another expert, which changes gradients
    more than any error of a kernel. The last experts get no token.
    """
    from relax_hpc.base.routes import RouteShape
    from relax_hpc.training.models.batches import collate

    layers, chosen = shape["num_hidden_layers"], shape["num_experts_per_tok"]
    generator = np.random.default_rng(0)
    used = shape["num_experts"] - _UNUSED_EXPERTS
    samples = rows(_ROWS, _TOKENS, shape["vocab_size"])
    for row in samples:
        scores = generator.random((_TOKENS, layers, used))
        experts = scores.argsort(-1)[..., :chosen]
        row[ROUTES.name] = RouteShape(layers, shape["num_experts"], chosen).pack(experts)
    return collate(samples, 0, device, also=(ROUTES.name,))


def compare_gradients(
    width: int, experts: str, kernels: str, device: str, figures: dict[str, Any]
) -> None:
    """Add distances of gradients in bfloat16 from those in float32 to ``figures``, for experts of
    ``width``. They are relative to the norm of the gradients."""
    shape = {**SHAPES["small"], "moe_intermediate_size": width}
    batch = routed_batch(shape, device)
    exact = build_model(shape, "float32", {"kernels": "plain"}, device, "on")
    with torch.no_grad():
        for value in exact.module.parameters():
            # Both models have the same weights.
            value.copy_(value.bfloat16())
    expected_loss = float(run_pass(exact, batch))
    weights = dict(exact.module.named_parameters())
    actor = {"kernels": kernels, "experts": experts}
    model = build_model(shape, "bfloat16", actor, device, "on")
    with torch.no_grad():
        for name, value in model.module.named_parameters():
            value.copy_(weights[name])
    loss = float(run_pass(model, batch))
    distances = gradient_distances(dict(model.module.named_parameters()), weights)
    worst = max(distances, key=distances.__getitem__)
    figures |= {
        "gradient_error": distances[worst],
        "gradient_error_in": worst,
        "experts_error": max(
            distance for kind, distance in distances.items() if ".experts." in kind
        ),
        "loss_error": abs(loss - expected_loss) / abs(expected_loss),
        "modules": type(model.module.decoder.layers[0].mlp.experts).__name__,
    }


def gradient_distances(
    parameters: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> dict[str, float]:
    """Distances of the gradients of ``parameters`` from those of ``expected``, relative to their
    norm. Parameters whose names differ only in numbers are one kind."""
    errors, norms = defaultdict[str, float](float), defaultdict[str, float](float)
    for name, parameter in parameters.items():
        kind = _NUMBER.sub("*", name)
        gradient, exact = _gradient(parameter), _gradient(expected[name])
        errors[kind] += float((gradient - exact).square().sum())
        norms[kind] += float(exact.square().sum())
    return {kind: (errors[kind] / max(norms[kind], 1e-60)) ** 0.5 for kind in errors}


def _gradient(parameter: Tensor) -> Tensor:
    """Gradient of a parameter in float32. A parameter without a gradient has zeros."""
    if parameter.grad is None:
        return torch.zeros_like(parameter, dtype=torch.float32)
    return parameter.grad.float()


def time_layers(
    shape: str,
    experts: str,
    kernels: str,
    count: int,
    length: int,
    rounds: int,
    device: str,
    figures: dict[str, Any],
) -> None:
    """Add seconds and memory of a pass over ``count`` rows of ``length`` tokens with full
    recomputation to ``figures``."""
    from relax_hpc.training.models.batches import collate

    actor = {"kernels": kernels, "recompute": "full", "experts": experts}
    model = build_model(SHAPES[shape], "bfloat16", actor, device)
    batch = collate(rows(count, length, model.spec.vocab), 0, device)
    first_s = host_and_total_s(partial(run_pass, model, batch), 1, device)[1]
    # The comparison of kernels at the start is not part of the peak.
    reset_peak(device)
    host_s, pass_s = host_and_total_s(partial(run_pass, model, batch), rounds, device)
    figures |= {
        "pass_s": pass_s,
        "host_s": host_s,
        "first_pass_s": first_s,
        "tokens_per_s": count * length / pass_s,
        "memory_gib": peak_gib(device),
        "compared_s": model.compared_s,
    }


def measure(
    device: str,
    shape: str,
    count: int,
    length: int,
    kernels: str = "fused",
    widths: Sequence[int] = (48, 40, 768),
    rounds: int = 3,
) -> dict[str, Any]:
    """``widths``: of the experts of the small model. ``shape``: name of the model that is timed,
    with ``count`` rows of ``length`` tokens."""
    parallel.initialize_alone(device, 0, PATIENCE_S)
    declare_fields("experts", [ROUTES])
    cases = Cases(device)
    for width in widths:
        for name, experts in _EXPERTS.items():
            case = partial(compare_gradients, width, experts, kernels, device)
            cases.run(f"width {width} {name}", case)
    for name, experts in _EXPERTS.items():
        case = partial(time_layers, shape, experts, kernels, count, length, rounds, device)
        cases.run(f"layers {name}", case)
    return cases.figures


if __name__ == "__main__":
    answer(measure)
