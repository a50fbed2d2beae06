"""Names of parameters in megatron-core's distributed checkpoint: layers and experts stacked along
leading axes.

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
class Parameter:
    """One parameter of one layer (and expert)."""

    entry: FusedParameter
    key: str
    """Name of the stacked tensor."""
    index: tuple[int, ...]
    """Place on the leading axes: layer and expert, as far as the parameter has them."""
    stack: tuple[int, ...]
    """Sizes of the leading axes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape without the leading axes."""
        return self.entry.shape

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of the stacked tensor."""
        return self.stack + self.shape

    @property
    def own_key(self) -> str:
        """The key that older checkpoints, which stack nothing, have instead."""
        return (
            self.key.replace("decoder.layers.", f"decoder.layers.{self.index[0]}.")
            if self.index
            else self.key
        )

    @property
    def extra_state(self) -> str | None:
        """The key of the (empty) extra state that megatron-core keeps for each linear layer; None:
        not its weight."""
        if not self.index or ".linear_" not in self.key or not self.key.endswith(".weight"):
            return None
        index, stack = (".".join(map(str, numbers)) for numbers in (self.index, self.stack))
        return f"{self.key.removesuffix('weight')}_extra_state/shard_{index}_{stack}"


def parameters(spec: ModelSpec) -> list[Parameter]:
    """Parameters of the whole model, in the order of its layers."""
    # Both layer specs have the keys of Transformer Engine's names.
    entries = stage_entries(spec, range(spec.layers), first=True, last=True, modules="te")
    return [_parameter(entry, spec) for entry in entries]


def _parameter(entry: FusedParameter, spec: ModelSpec) -> Parameter:
    layer, expert = _LAYER.match(entry.name), _EXPERT.search(entry.name)
    index = tuple(int(found[1]) for found in (layer, expert) if found)
    key = _EXPERT.sub(".experts.", _LAYER.sub("decoder.layers.", entry.name))
    return Parameter(entry, key, index, (spec.layers, spec.experts)[: len(index)])
