"""Form of a model in the files of its versions, where that is not a tensor for each that is
published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from relax_hpc.training.weights.tensors import InnerTensor, TensorInfo


@dataclass(frozen=True, slots=True)
class FileForm:
    """Form of the files of a family."""

    holders: Mapping[str, TensorInfo] = field(default_factory=dict)
    """Tensors that hold several of a version's, by name."""
    inside: Mapping[str, InnerTensor] = field(default_factory=dict)
    """Places of those that lie in one of them, by name."""
    untrained: Sequence[str] = ()
    """Beginnings of the names of tensors of a run's model that are not trained, and are in files of
    versions too."""

    def stored(self, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """Tensors of files of a version that has ``tensors``."""
        return {
            name: one for name, one in tensors.items() if name not in self.inside
        } | self.holders
