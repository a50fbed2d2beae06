"""Form of the files of a run's versions: the published form of the model's family, which other
programs read."""

from __future__ import annotations

from relax_hpc.training.models.hf_mapping import published_forms
from relax_hpc.training.models.spec import ModelSpec
from relax_hpc.training.models.stored_pieces import piece_positions
from relax_hpc.training.weights.file_form import FileForm
from relax_hpc.training.weights.tensors import InnerTensor, TensorInfo


def published_form(spec: ModelSpec, dtype: str) -> FileForm:
    """Form of the files of a model with tensors of ``dtype``, as safetensors names it."""
    holders: dict[str, TensorInfo] = {}
    inner: dict[str, InnerTensor] = {}
    for name, form in published_forms(spec).items():
        # A tensor with one piece has the same form in files as in memory.
        if len(form.pieces) == 1:
            continue
        holders[name] = TensorInfo(dtype, form.shape)
        for piece, block, first in piece_positions(form):
            info = TensorInfo(dtype, piece.shape)
            inner[piece.name] = InnerTensor(info, name, block, first, form.transposed)
    return FileForm(holders, inner, spec.untrained_prefixes)
