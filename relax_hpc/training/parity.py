"""Whether kernels compute what plain layers do: a slice of the run's model, forward and backward,
before it trains."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

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
from relax_hpc.training.models.spec import ModelSpec
from relax_hpc.training.models.stage_model import HiddenStateModel

LENGTHS = (61, 33, 2, 31)
"""Tokens of the rows of a pack."""
COLUMNS = 1000
"""Columns of the vocabulary, for each tensor rank."""
FACTOR = 2.0
"""Factor by which values may be further from float32 than those of plain layers: both distances are
norms over many elements, which chance moves little."""
_FLOOR = 1e-5
"""Distance of float32 sums in another order from float32."""
_RELEASES = {"fused": "triton", "te": "transformer-engine"}
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class LayerSlice:
    """One layer of a model between its embedding and its output layer, as the ranks of a stage
    share it."""

    spec: ModelSpec
    model: ModelConfig
    parallel: ParallelConfig
    further: Mapping[str, Any]
    """Settings of megatron-core's transformer configuration, whatever the kernels are."""

    @classmethod
    def from_spec(
        cls,
        spec: ModelSpec,
        model: ModelConfig,
        parallel: ParallelConfig,
        further: Mapping[str, Any],
    ) -> LayerSlice:
        """Build the slice of the model that these describe, the same in each of its pipeline
        stages."""
        cut = replace(spec, layers=1, towers=(), vocab=min(spec.vocab, COLUMNS * parallel.tensor))
        undivided = replace(parallel, pipeline=1, first_stage_layers=0, last_stage_layers=0)
        return cls(cut, model, undivided, further)

    def build(self, kernels: Kernels, dtype: str) -> HiddenStateModel:
        """Build it with random weights. Plain layers compute expert after expert, whatever the
        others do."""
        settings = {**self.further, **transformer_settings(kernels, bool(self.spec.experts))}
        if kernels == "plain":
            settings["moe_grouped_gemm"] = False
        config = megatron.transformer_config(
            self.spec, replace(self.model, dtype=dtype), self.parallel, settings
        )
        return self.spec.build(config, self.model.device, True, True, kernels)

    def names(self, kernels: Kernels) -> dict[str, str]:
        """Names of the parameters in layers of ``kernels``, by their names in plain layers."""
        mine = ranks.layout().local_experts(self.spec.experts)
        plain, theirs = (
            select_experts(stage_entries(self.spec, range(1), True, True, modules), mine)
            for modules in ("local", "te" if kernels == "te" else "local")
        )
        return {one.name: other.name for one, other in zip(plain, theirs, strict=True)}


@dataclass(frozen=True, slots=True)
class Distance:
    """Distances of values from those in float32, as shares of their norm."""

    kernels: float
    plain: float
    """Distance of plain layers in the run's type."""

    @property
    def ratio(self) -> float:
        """Ratio of the kernels' distance to that of plain layers plus `_FLOOR`, which chance alone
        makes."""
        return self.kernels / (self.plain + _FLOOR)


def check(of: LayerSlice, kernels: Kernels, chunk_kernels: ChunkKernels) -> float:
    """Compare, and return the seconds that it took. ConfigError: a slice of ``kernels`` is further
    from float32 than one of plain layers is, in its log-probabilities or in its gradients.
    Collective over the ranks of a stage."""
    started = time.monotonic()
    found = distances(of, kernels, chunk_kernels)
    if of.model.device == "cuda":
        torch.cuda.empty_cache()
    # Triton's interpreter cuts bfloat16 off where a GPU rounds it: twice the error of each value.
    most = 2 * FACTOR if kernels == "fused" and interprets() else FACTOR
    # What is not a number is not near.
    if far := [kind for kind, one in found.items() if not one.ratio <= most]:
        said = (
            f"{kind} {found[kind].kernels:.2g}, of plain layers {found[kind].plain:.2g}"
            for kind in far[:3]
        )
        raise ConfigError(
            f"actor.kernels: found {kernels}, with which this model computes something else; "
            f"distance from float32, at most {most:g} times that of plain layers: "
            f"{'; '.join(said)}; set plain, or install another release of {_release(kernels)}"
        )
    return time.monotonic() - started


def distances(of: LayerSlice, kernels: Kernels, chunk_kernels: ChunkKernels) -> dict[str, Distance]:
    """Distances by kind of value: log-probabilities with entropies, and the gradient of each kind
    of parameter."""
    devices = [torch.cuda.current_device()] if of.model.device == "cuda" else []
    with torch.random.fork_rng(devices):
        exact, batch = _exact(of), _batch(of)
        right = _learnt(of, exact, batch, PLAIN)
        weights = {name: value.detach() for name, value in exact.named_parameters()}
        del exact
        near = _distances(_as(of, weights, batch, "plain", PLAIN), right, of.names("plain"))
        found = _distances(
            _as(of, weights, batch, kernels, chunk_kernels), right, of.names(kernels)
        )
    return {kind: Distance(found[kind], near[kind]) for kind in found}


def _release(kernels: Kernels) -> str:
    package = _RELEASES.get(kernels, "torch")
    with suppress(metadata.PackageNotFoundError):
        return f"{package} (found {metadata.version(package)})"
    return package


@torch.no_grad()
def _exact(of: LayerSlice) -> HiddenStateModel:
    """Build the slice in float32, with weights that the run's type can hold."""
    module = of.build("plain", "float32")
    for value in module.parameters():
        # Ones of norms would hide a scale that is not applied.
        varied = value + 0.3 * torch.randn_like(value) if value.dim() == 1 else value
        value.copy_(varied.to(megatron.DTYPES[of.model.dtype]))
    return module


def _as(
    of: LayerSlice,
    weights: Mapping[str, Tensor],
    batch: Batch,
    kernels: Kernels,
    chunk_kernels: ChunkKernels,
) -> dict[str, Tensor]:
    """Values and gradients, as `_learnt`, that ``kernels`` make of ``weights`` in the run's
    type."""
    module = of.build(kernels, of.model.dtype)
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for plain, name in of.names(kernels).items():
            parameters[name].copy_(weights[plain])
    return _learnt(of, module, batch, chunk_kernels)


def _batch(of: LayerSlice) -> Batch:
    generator = np.random.default_rng(0)
    rows = [{"token_ids": generator.integers(0, of.spec.vocab, length)} for length in LENGTHS]
    sequence = of.parallel.tensor if of.parallel.sequence_parallel else 1
    return collate(
        rows, PAD, of.model.device, PackSplit(sequence, of.parallel.context), of.spec.row_fields
    )


def _learnt(of: LayerSlice, module: Any, batch: Batch, kernels: ChunkKernels) -> dict[str, Tensor]:
    """Log-probabilities and entropies of the batch, and gradients of a smooth loss of them by the
    parameters' names."""
    scored, group = batch.scored, module.pg_collection.tp
    states = scored_states(module(**of.spec.inputs(batch)), scored.states, module.config, group)
    given = states, module.output_weight, scored.tokens, of.spec.vocab, 1.0, group, True, kernels
    logprobs, entropies = token_logprobs(*given)
    generator = torch.Generator().manual_seed(1)
    directions = torch.randn(2, len(logprobs), generator=generator).to(logprobs.device)
    # In one: entropies of random weights are nearly equal, and their errors small shares of them
    # that chance decides.
    values = torch.stack([logprobs, entropies])
    (directions * values).sum().backward()
    gradients = {name: value.grad for name, value in module.named_parameters()}
    return {"log-probabilities and entropies": values.detach()} | gradients


def _distances(
    found: Mapping[str, Tensor], right: Mapping[str, Tensor], names: Mapping[str, str]
) -> dict[str, float]:
    """Distance of each kind of value, as a share of its norm; a parameter of all experts is one
    kind: a token that goes to another one for a rounding changes much of two of them."""
    off, norm = defaultdict[str, float](float), defaultdict[str, float](float)
    for name, value in right.items():
        kind = f"gradient of {_NUMBER.sub('*', name)}" if name in names else name
        other = found[names.get(name, name)]
        off[kind] += (
            float("inf") if other is None else float((other.float() - value).square().sum())
        )
        norm[kind] += float(value.square().sum())
    return {kind: (off[kind] / max(norm[kind], 1e-60)) ** 0.5 for kind in off}
