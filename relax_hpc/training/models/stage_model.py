"""Models of pipeline stages: megatron-core's GPT without logits, with towers, for packed rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from relax_hpc.config.schema import Kernels
from relax_hpc.training.models.layer_spec import layer_spec
from relax_hpc.training.models.packs import PackedRows
from relax_hpc.training.models.towers.front import Towers
from relax_hpc.training.models.towers.tower import Tower

if TYPE_CHECKING:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding


class PackRotary(torch.nn.Module):
    """Replacement of megatron-core's module, with the same frequencies. It computes the angles for
    the positions of a pack.

    megatron-core 0.16.1 reads the ends of a pack's rows back from the device in each layer, which
    synchronizes.
    """

    def __init__(self, plain: RotaryEmbedding, device: str, sections: Sequence[int] = ()) -> None:
        """``sections``: see `ModelSpec.rotary_sections`."""
        super().__init__()
        # Not a buffer: buffers are cast together with weights, which would round the frequencies.
        self.frequencies = plain.inv_freq.to(device)
        self.axes = torch.tensor(rotary_axes(len(self.frequencies), sections), device=device)

    def get_rotary_seq_len(self, *arguments: Any) -> Tensor:
        """Argument of `forward`: the positions of the pack instead of a length.

        megatron-core calls it with the pack as last argument, and passes the result to `forward`.
        """
        rows: PackedRows = arguments[-1]
        return rows.positions

    def forward(self, positions: Tensor, **_: Any) -> Tensor:
        """[t], or [3, t] by axis -> angles [t, 1, 1, dim], float32."""
        if positions.dim() == 1:
            by_frequency = positions[:, None]
        else:
            by_frequency = positions.index_select(0, self.axes).t()
        half = by_frequency.to(self.frequencies.dtype) * self.frequencies
        return torch.cat((half, half), dim=-1)[:, None, None, :]


def rotary_axes(frequencies: int, sections: Sequence[int]) -> list[int]:
    """Axis (0: time, 1: height, 2: width) of each frequency.

    The axes alternate until height and width have the numbers in ``sections``. The remaining
    frequencies belong to time (interleaved mRoPE, arXiv 2511.21631, section 2.2).

    >>> rotary_axes(8, (4, 2, 2))
    [0, 1, 2, 0, 1, 2, 0, 0]
    """
    axes = [0] * frequencies
    for axis in range(1, len(sections)):
        axes[axis : 3 * sections[axis] : 3] = [axis] * sections[axis]
    return axes


class HiddenStateModel(GPTModel):
    """A GPT whose last stage returns the hidden states after the final norm, [s, b, h].

    Under sequence parallelism s is this rank's share. Logits of all tokens would not fit into
    memory, and only few are needed.
    """

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states

    @property
    def output_weight(self) -> Tensor:
        """[v, h]: this rank's rows of the output layer, on the last stage."""
        weight = self.output_layer.weight
        # megatron-core's output layer has no weight if it is tied to the embedding.
        return self.shared_embedding_or_output_weight() if weight is None else weight

    def logits(self, hidden: Tensor) -> Tensor:
        """[b, s, v] of this rank's columns, from the last stage's hidden states. For tests and
        inspection."""
        return self.output_layer(hidden, weight=self.output_weight)[0].transpose(0, 1)


class MediaModel(HiddenStateModel):
    """A first stage with towers, whose embeddings replace tokens."""

    def add_towers(self, towers: Towers) -> None:
        """Add ``towers`` as the first module.

        megatron-core's buckets of gradients follow the order of parameters, and towers come first
        in the forward pass.
        """
        modules = dict(self._modules)
        self._modules.clear()
        self.towers = towers
        self._modules.update(modules)
        towers.register_levels(self.decoder.layers)

    def _preprocess(self, *args: Any, packed_seq_params: PackedRows, **named: Any) -> Any:
        embedded, *results = super()._preprocess(
            *args, packed_seq_params=packed_seq_params, **named
        )
        return (self.towers(embedded, packed_seq_params.media), *results)


def build_stage(
    config: TransformerConfig,
    device: str,
    kernels: Kernels,
    *,
    first: bool,
    last: bool,
    vocabulary: int,
    positions: int,
    tied: bool,
    rotary: Mapping[str, Any],
    rotary_sections: Sequence[int],
    towers: Sequence[Tower],
) -> HiddenStateModel:
    """A pipeline stage with random weights.

    The ``first`` stage holds the embedding and the ``towers``, the ``last`` one the output layer.
    ``vocabulary``: rows of the embedding. ``rotary``: settings by which megatron-core's model
    rotates positions. For the others see `ModelSpec`.
    """
    model = (MediaModel if first and towers else HiddenStateModel)(
        config=config,
        transformer_layer_spec=layer_spec(config, kernels),
        vocab_size=vocabulary,
        max_sequence_length=positions,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=tied,
        **rotary,
    )
    # Replaces megatron-core's module, whose frequencies it takes over.
    model.rotary_pos_emb = PackRotary(model.rotary_pos_emb, device, rotary_sections)
    if isinstance(model, MediaModel):
        model.add_towers(Towers(towers, config))
    return model.to(device)
