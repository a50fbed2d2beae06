"""Whether layers of other kernels compute what plain ones do: one layer of the model's sizes, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from relax_hpc.config.schema import Kernels
from relax_hpc.errors import ConfigError
from relax_hpc.models.hf_mapping import NAMES
from relax_hpc.models.layer_spec import layer_spec
from relax_hpc.models.packs import PackSplit, Places
from relax_hpc.models.spec import ModelSpec

_TOKENS = 128
_VALUES = ("output", "input gradient")
_FACTOR, _FLOOR = 3.0, 1e-5
"""How much further from float32 than the plain layer's a value may be, as a share of its norm."""


def check(
    spec: ModelSpec, config: TransformerConfig, kernels: Kernels, device: str, plain: TransformerConfig | None = None
) -> None:
    """ConfigError unless a layer of ``kernels`` is as near to a plain one in float32 as one in the run's type is, in
    its output and in its gradients, of a smooth loss.

    ``plain``: the configuration of that if it is another. Collective over the tensor ranks.
    """
    far = list(differences(spec, config, kernels, device, plain or config))
    if far:
        raise ConfigError(
            f"actor.kernels: found {kernels}, one layer of which differs from a plain one: {'; '.join(far[:3])}; set "
            "plain, or install another release"
        )


def differences(
    spec: ModelSpec, config: TransformerConfig, kernels: Kernels, device: str, plain: TransformerConfig
) -> Iterator[str]:
    """What is further from float32 than it may be, each as `value: distance, distance of the plain layer's`."""
    devices = [torch.cuda.current_device()] if device == "cuda" else []
    with torch.random.fork_rng(devices):
        exact, usual = (_layer(plain, "plain", device) for _ in range(2))
        _vary_norms(exact)
        other = _layer(config, kernels, device)
        hidden = torch.randn(_TOKENS, 1, spec.hidden, device=device).to(config.params_dtype)
        direction = torch.randn(hidden.shape, device=device)
    usual.load_state_dict(exact.state_dict())
    _copy(spec, exact, other, kernels)
    expected = _run(spec, exact.float(), hidden.float(), direction)
    near = _run(spec, usual, hidden, direction)
    found = _run(spec, other, hidden, direction)
    for name, usual_name in (*((name, name) for name in _VALUES), *_names(spec, kernels)):
        distance = _distance(found[name], expected[usual_name])
        allowed = _distance(near[usual_name], expected[usual_name])
        if not distance <= _FACTOR * allowed + _FLOOR:
            yield f"{name}: {distance:.2g}, {allowed:.2g}"


def _layer(config: TransformerConfig, kernels: Kernels, device: str) -> torch.nn.Module:
    return build_module(layer_spec(config, kernels).layer_specs[0], config=config, layer_number=1).to(device)


def _names(spec: ModelSpec, kernels: Kernels) -> list[tuple[str, str]]:
    """Of a layer's parameters in ``kernels`` and in the plain layer."""
    made = NAMES["te" if kernels == "te" else "local"], NAMES["local"]
    ours, theirs = ([entry.name for entry in spec.layer_entries("", "", names)] for names in made)
    return list(zip(ours, theirs, strict=True))


@torch.no_grad()
def _vary_norms(layer: torch.nn.Module) -> None:
    """Ones would hide a scale that is not applied."""
    for value in layer.parameters():
        if value.dim() == 1:
            value.add_(0.3 * torch.randn_like(value))


@torch.no_grad()
def _copy(spec: ModelSpec, source: torch.nn.Module, target: torch.nn.Module, kernels: Kernels) -> None:
    parameters, given = dict(target.named_parameters()), dict(source.named_parameters())
    for ours, theirs in _names(spec, kernels):
        parameters[ours].copy_(given[theirs])


def _run(spec: ModelSpec, layer: torch.nn.Module, hidden: Tensor, direction: Tensor) -> dict[str, Tensor]:
    """Output, and gradients by name, of the sum of the output in ``direction``."""
    hidden = hidden.detach().requires_grad_()
    powers = torch.arange(0, spec.head_dim, 2, device=hidden.device) / spec.head_dim
    tokens = layer.config.tensor_model_parallel_size if layer.config.sequence_parallel else 1
    rows = Places.of([tokens * len(hidden)], PackSplit()).rows(0, hidden.device)
    angles = rows.positions[:, None] * spec.rope_base**-powers
    angles = torch.cat([angles, angles], 1)[:, None, None]
    output, _ = layer(hidden, attention_mask=None, rotary_pos_emb=angles, packed_seq_params=rows)
    (output.float() * direction).sum().backward()
    found = dict(zip(_VALUES, (output.detach(), hidden.grad), strict=True))
    return found | {name: value.grad for name, value in layer.named_parameters()}


def _distance(found: Tensor | None, expected: Tensor) -> float:
    if found is None:
        return float("inf")
    return float((found.float() - expected).norm() / expected.norm().clamp(min=1e-30))
