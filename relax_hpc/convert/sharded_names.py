"""Names of parameters in megatron-core's distributed checkpoint.

Equal parameters of all layers and experts are stacked along leading axes of one tensor.

The names and shapes of single parameters come from
`relax_hpc.training.models.pieces.FusedParameter`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from relax_hpc.training.models.hf_mapping import stage_entries
from relax_hpc.training.models.pieces import FusedParameter
from relax_hpc.training.models.spec import ModelSpec

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class StackedParameter:
    """One parameter of one layer (and expert), as a slice of a stacked tensor."""

    entry: FusedParameter
    key: str
    """Name of the stacked tensor."""
    index: tuple[int, ...]
    """Index on the leading axes: layer and expert, as far as the parameter has them."""
    stack: tuple[int, ...]
    """Sizes of the leading axes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape without the leading axes."""
        return self.entry.shape

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """Shape of the stacked tensor."""
        return self.stack + self.shape

    @property
    def unstacked_key(self) -> str:
        """Key in older checkpoints, which have one tensor per layer."""
        if not self.index:
            return self.key
        return self.key.replace("decoder.layers.", f"decoder.layers.{self.index[0]}.")

    @property
    def extra_state(self) -> str | None:
        """Key of the (empty) extra state that megatron-core stores with each linear layer.

        None unless the parameter is the weight of a linear layer.
        """
        if not self.index or ".linear_" not in self.key or not self.key.endswith(".weight"):
            return None
        index, stack = ".".join(map(str, self.index)), ".".join(map(str, self.stack))
        return f"{self.key.removesuffix('weight')}_extra_state/shard_{index}_{stack}"


def parameters(spec: ModelSpec) -> list[StackedParameter]:
    """Parameters of the whole model, in the order of its layers."""
    # Checkpoints have the names of Transformer Engine's modules, also without that package.
    entries = stage_entries(spec, range(spec.layers), first=True, last=True, modules="te")
    return [_parameter(entry, spec) for entry in entries]


def _parameter(entry: FusedParameter, spec: ModelSpec) -> StackedParameter:
    matches = _LAYER.match(entry.name), _EXPERT.search(entry.name)
    index = tuple(int(match[1]) for match in matches if match)
    key = _EXPERT.sub(".experts.", _LAYER.sub("decoder.layers.", entry.name))
    return StackedParameter(entry, key, index, (spec.layers, spec.experts)[: len(index)])
