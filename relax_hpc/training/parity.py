"""Comparison of kernels with plain layers: one layer of the run's model, forward and backward,
before the training."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.schema import Kernels, ModelConfig, ParallelConfig
from relax_hpc.training import parallel as ranks
from relax_hpc.training.logprobs import PLAIN, ChunkKernels, scored_states, token_logprobs
from relax_hpc.training.models import megatron
from relax_hpc.training.models.batches import PAD, Batch, collate
from relax_hpc.training.models.hf_mapping import select_experts, stage_entries
from relax_hpc.training.models.kernels import interprets, transformer_settings
from relax_hpc.training.models.packs import PackSplit
from relax_hpc.training.models.pieces import FusedParameter
from relax_hpc.training.models.spec import ModelSpec
from relax_hpc.training.models.stage_model import HiddenStateModel

LENGTHS = (61, 33, 2, 31)
"""Tokens of the rows of a pack."""
COLUMNS = 1000
"""Columns of the vocabulary, for each tensor rank."""
FACTOR = 2.0
"""Largest ratio of the kernels' distance from float32 to that of plain layers. Both distances are
norms over many elements, so chance changes them little."""
# Distance between float32 sums in different orders.
_FLOOR = 1e-5
_RELEASES = {"fused": "triton", "te": "transformer-engine"}
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class LayerSlice:
    """One layer of a model with its embedding and output layer, split over the ranks of a stage."""

    spec: ModelSpec
    model: ModelConfig
    parallel: ParallelConfig
    further: Mapping[str, Any]
    """Settings of megatron-core's transformer configuration, for all kernels."""

    @classmethod
    def from_spec(
        cls,
        spec: ModelSpec,
        model: ModelConfig,
        parallel: ParallelConfig,
        further: Mapping[str, Any],
    ) -> LayerSlice:
        """Slice of the model that these describe, equal in all pipeline stages."""
        vocab = min(spec.vocab, COLUMNS * parallel.tensor)
        small = replace(spec, layers=1, towers=(), vocab=vocab)
        one_stage = replace(parallel, pipeline=1, first_stage_layers=0, last_stage_layers=0)
        return cls(small, model, one_stage, further)

    def build(self, kernels: Kernels, dtype: Literal["float32", "bfloat16"]) -> HiddenStateModel:
        """Build it with random weights. Plain layers always compute one expert after the other."""
        settings = {**self.further, **transformer_settings(kernels, bool(self.spec.experts))}
        if kernels == "plain":
            settings["moe_grouped_gemm"] = False
        config = megatron.transformer_config(
            self.spec, replace(self.model, dtype=dtype), self.parallel, settings
        )
        return self.spec.build(config, self.model.device, True, True, kernels)

    def names(self, kernels: Kernels) -> dict[str, str]:
        """Names of the parameters in layers of ``kernels``, by their names in plain layers."""
        modules: Literal["local", "te"] = "te" if kernels == "te" else "local"
        plain, tested = self._entries("local"), self._entries(modules)
        return {entry.name: other.name for entry, other in zip(plain, tested, strict=True)}

    def _entries(self, modules: Literal["local", "te"]) -> list[FusedParameter]:
        entries = stage_entries(self.spec, range(1), True, True, modules)
        return select_experts(entries, ranks.layout().local_experts(self.spec.experts))


@dataclass(frozen=True, slots=True)
class Distance:
    """Distances of values from float32, relative to their norm."""

    kernels: float
    plain: float
    """Distance of plain layers in the run's type."""

    @property
    def ratio(self) -> float:
        """Ratio of the kernels' distance to that of plain layers plus `_FLOOR`, which is due to
        chance."""
        return self.kernels / (self.plain + _FLOOR)


def check(layer: LayerSlice, kernels: Kernels, chunk_kernels: ChunkKernels) -> float:
    """Compare ``kernels`` with plain layers. Returns the seconds that it took.

    ConfigError: log-probabilities or gradients of ``kernels`` are further from float32 than those
    of plain layers. Collective over the ranks of a stage.
    """
    started = time.monotonic()
    by_kind = distances(layer, kernels, chunk_kernels)
    if layer.model.device == "cuda":
        torch.cuda.empty_cache()
    # Triton's interpreter truncates to bfloat16, a GPU rounds: twice the error of each value.
    limit = 2 * FACTOR if kernels == "fused" and interprets() else FACTOR
    # Written as `not <=`, so that a ratio that is not a number is far.
    far = [kind for kind, distance in by_kind.items() if not distance.ratio <= limit]
    if far:
        details = [
            f"{kind} {by_kind[kind].kernels:.2g}, of plain layers {by_kind[kind].plain:.2g}"
            for kind in far[:3]
        ]
        raise ConfigError(
            f"actor.kernels: found {kernels}, with which this model computes different values; "
            f"distance from float32, at most {limit:g} times that of plain layers: "
            f"{'; '.join(details)}; set plain, or install another release of {_release(kernels)}"
        )
    return time.monotonic() - started


def distances(
    layer: LayerSlice, kernels: Kernels, chunk_kernels: ChunkKernels
) -> dict[str, Distance]:
    """Distances by kind of value: log-probabilities with entropies, and the gradient of each kind
    of parameter."""
    devices = [torch.cuda.current_device()] if layer.model.device == "cuda" else []
    with torch.random.fork_rng(devices):
        exact, batch = _build_exact(layer), _random_batch(layer)
        expected = _values_and_gradients(layer, exact, batch, PLAIN)
        weights = {name: value.detach() for name, value in exact.named_parameters()}
        del exact
        plain_values = _compute_with(layer, weights, batch, "plain", PLAIN)
        plain = _relative_distances(plain_values, expected, layer.names("plain"))
        kernel_values = _compute_with(layer, weights, batch, kernels, chunk_kernels)
        tested = _relative_distances(kernel_values, expected, layer.names(kernels))
    return {kind: Distance(tested[kind], plain[kind]) for kind in tested}


def _release(kernels: Kernels) -> str:
    package = _RELEASES.get(kernels, "torch")
    with suppress(metadata.PackageNotFoundError):
        return f"{package} (found {metadata.version(package)})"
    return package


@torch.no_grad()
def _build_exact(layer: LayerSlice) -> HiddenStateModel:
    """Build the slice in float32, with weights that the run's type can represent."""
    module = layer.build("plain", "float32")
    for value in module.parameters():
        # Norms begin with ones, which would hide a scale that is not applied.
        varied = value + 0.3 * torch.randn_like(value) if value.dim() == 1 else value
        value.copy_(varied.to(megatron.DTYPES[layer.model.dtype]))
    return module


def _compute_with(
    layer: LayerSlice,
    weights: Mapping[str, Tensor],
    batch: Batch,
    kernels: Kernels,
    chunk_kernels: ChunkKernels,
) -> dict[str, Tensor | None]:
    """`_values_and_gradients` of layers of ``kernels`` in the run's type, with ``weights``."""
    module = layer.build(kernels, layer.model.dtype)
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for plain, name in layer.names(kernels).items():
            parameters[name].copy_(weights[plain])
    return _values_and_gradients(layer, module, batch, chunk_kernels)


def _random_batch(layer: LayerSlice) -> Batch:
    generator = np.random.default_rng(0)
    spec, parallel = layer.spec, layer.parallel
    rows = [{"token_ids": generator.integers(0, spec.vocab, length)} for length in LENGTHS]
    sequence = parallel.tensor if parallel.sequence_parallel else 1
    split = PackSplit(sequence, parallel.context)
    return collate(rows, PAD, layer.model.device, split, spec.row_fields)


def _values_and_gradients(
    layer: LayerSlice, module: Any, batch: Batch, kernels: ChunkKernels
) -> dict[str, Tensor | None]:
    """Log-probabilities with entropies of the batch, and gradients of a smooth loss of them, by the
    parameters' names. None: a parameter has no gradient."""
    scored, group = batch.scored, module.pg_collection.tp
    hidden = module(**layer.spec.inputs(batch))
    states = scored_states(hidden, scored.states, module.config, group)
    logprobs, entropies = token_logprobs(
        states,
        module.output_weight,
        scored.tokens,
        layer.spec.vocab,
        1.0,
        group,
        entropy=True,
        kernels=kernels,
    )
    assert entropies is not None
    generator = torch.Generator().manual_seed(1)
    directions = torch.randn(2, len(logprobs), generator=generator).to(logprobs.device)
    # One kind of value: entropies of random weights are nearly equal, so that chance would decide
    # their separate distance.
    values = torch.stack([logprobs, entropies])
    (directions * values).sum().backward()
    gradients = {name: value.grad for name, value in module.named_parameters()}
    return {"log-probabilities and entropies": values.detach(), **gradients}


def _relative_distances(
    values: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor | None],
    names: Mapping[str, str],
) -> dict[str, float]:
    """Distance of each kind of value, relative to its norm.

    A parameter of all experts is one kind: if a rounding sends one token to another expert, the
    gradients of both experts change much.
    """
    error, norm = defaultdict[str, float](float), defaultdict[str, float](float)
    for name, value in expected.items():
        # Plain layers in float32 have a gradient for every parameter.
        assert value is not None
        kind = f"gradient of {_NUMBER.sub('*', name)}" if name in names else name
        tested = values[names.get(name, name)]
        if tested is None:
            error[kind] += float("inf")
        else:
            error[kind] += float((tested.float() - value).square().sum())
        norm[kind] += float(value.square().sum())
    return {kind: (error[kind] / max(norm[kind], 1e-60)) ** 0.5 for kind in error}
