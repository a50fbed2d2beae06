"""Form of a model in the files of its versions, if it differs from the tensors in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from relax_hpc.training.weights.tensors import InnerTensor, TensorInfo


@dataclass(frozen=True, slots=True)
class FileForm:
    """Form of the files of a family."""

    holders: Mapping[str, TensorInfo] = field(default_factory=dict)
    """Tensors of files that hold several tensors of a version, by name."""
    inside: Mapping[str, InnerTensor] = field(default_factory=dict)
    """Tensors of a version inside of a holder, by name."""
    untrained: Sequence[str] = ()
    """Prefixes of the names of untrained tensors. The files of versions contain these too."""

    def stored_tensors(self, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """Tensors in the files of a version with ``tensors``."""
        single = {name: info for name, info in tensors.items() if name not in self.inside}
        return {**single, **self.holders}
