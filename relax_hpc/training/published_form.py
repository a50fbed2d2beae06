"""Form of the files of a run's versions: that in which the model's family is published, so that
others read them."""

from __future__ import annotations

from relax_hpc.training.models.hf_mapping import published_forms
from relax_hpc.training.models.spec import ModelSpec
from relax_hpc.training.models.stored_pieces import piece_positions
from relax_hpc.training.weights.file_form import FileForm
from relax_hpc.training.weights.tensors import InnerTensor, TensorInfo


def published_form(spec: ModelSpec, dtype: str) -> FileForm:
    """Form of files of a model whose tensors are of ``dtype``, as safetensors names it."""
    packed = {name: form for name, form in published_forms(spec).items() if len(form.pieces) > 1}
    holders = {name: TensorInfo(dtype, form.shape) for name, form in packed.items()}
    inside = {
        piece.name: InnerTensor(TensorInfo(dtype, piece.shape), name, block, first, form.turned)
        for name, form in packed.items()
        for piece, block, first in piece_positions(form)
    }
    return FileForm(holders, inside, spec.untrained_prefixes)
