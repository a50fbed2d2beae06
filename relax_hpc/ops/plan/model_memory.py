"""Bytes of a model on one rank: parameters, what a layer keeps for the backward pass, logits.

What a layer keeps was counted, tensor by tensor, along megatron-core 0.16.1's layers and
`models.layer_spec`; a test compares it with the bytes that autograd holds. Korthikanti et al.,
arXiv 2205.05198, have the method.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from relax_hpc.config.schema import Kernels, ParallelConfig
from relax_hpc.training.models.hf_mapping import select_experts, stage_entries
from relax_hpc.training.models.pieces import FusedParameter, Piece
from relax_hpc.training.models.spec import ModelSpec
from relax_hpc.training.models.stages import stage_layers

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
MAIN_BYTES = 4
"""Bytes of an element of gradients, of the optimizer's main parameters and of each of its two
moments: float32."""
BUSIEST = 1.5
"""Ratio of the tokens that come to the experts of the busiest rank to the mean of those who share a
layer's. An assumption."""
ROUTER_ELEMENTS = 6
"""Elements that a router keeps of an expert and a token: three of float32, in elements of 2
bytes."""
CHUNKS = 2**22, 2**28
"""Logits that `training.logprobs` has at once, at least and at most; between these an eighth of
all."""


def parameters(spec: ModelSpec, parallel: ParallelConfig, stage: int) -> int:
    """Parameters of the rank of pipeline ``stage`` with the most."""
    return sum(_counts(spec, parallel, stage))


def own_share(spec: ModelSpec, parallel: ParallelConfig, stage: int) -> float:
    """Parameters of a rank, each divided by the number of ranks that have the same one."""
    dense, experts = _counts(spec, parallel, stage)
    copies = parallel.data * parallel.context
    return dense / copies + experts * parallel.expert * parallel.expert_tensor / (
        parallel.tensor * copies
    )


def expert_parameters(spec: ModelSpec, parallel: ParallelConfig, stage: int) -> int:
    """Parameters of a rank that belong to experts."""
    return _counts(spec, parallel, stage)[1]


def _counts(spec: ModelSpec, parallel: ParallelConfig, stage: int) -> tuple[int, int]:
    """Parameters of a rank: those outside of experts, and those of its experts."""
    layers = len(stage_layers(spec.layers, parallel)[stage])
    # All layers are alike, and a large model has tens of thousands of experts.
    layer = _counted(spec, parallel, stage_entries(spec, range(1), False, False))
    rest = _counted(
        spec, parallel, stage_entries(spec, range(0), stage == 0, stage == parallel.pipeline - 1)
    )
    return layers * layer[0] + rest[0], layers * layer[1] + rest[1]


def _counted(
    spec: ModelSpec, parallel: ParallelConfig, entries: list[FusedParameter]
) -> tuple[int, int]:
    """Parameters of a rank out of ``entries``: those outside of experts, and those of its
    experts."""
    found = [0, 0]
    for entry in select_experts(entries, range(spec.experts // parallel.expert)):
        one_expert = entry.expert is not None
        tensor = parallel.expert_tensor if one_expert else parallel.tensor
        found[one_expert] += sum(_elements(piece, tensor) for piece in entry.pieces)
    return found[0], found[1]


def _elements(piece: Piece, tensor: int) -> int:
    if piece.axis is None:
        return math.prod(piece.shape)
    length = -(-piece.shape[piece.axis] // tensor)
    return math.prod(piece.shape) // piece.shape[piece.axis] * length


def kept_elements(
    spec: ModelSpec, parallel: ParallelConfig, recompute: str, kernels: Kernels = "plain"
) -> int:
    """Elements a token that a layer keeps for the backward pass."""
    wide = _widths(spec, parallel, kernels)
    return {
        # Two inputs of norms and what they give, and what is inside of the two blocks.
        "none": 4 * wide.stream + wide.attention + wide.inner,
        "selective": 2 * wide.stream + wide.attention,
        "full": wide.stream,
    }[recompute]


def working_elements(
    spec: ModelSpec, parallel: ParallelConfig, recompute: str, kernels: Kernels = "plain"
) -> int:
    """Elements a token that the backward pass of one layer takes beside: what it computes again,
    and gradients."""
    wide = _widths(spec, parallel, kernels)
    again = {
        "none": 0,
        "selective": 2 * wide.stream + wide.inner,
        "full": 3 * wide.stream + wide.attention + wide.inner,
    }[recompute]
    # What the feed-forward block keeps goes while gradients come: at most the product's and both
    # halves' are there, and those of half of the copies.
    return again + 2 * wide.stream + max(wide.attention // 2, 3 * wide.product + wide.copies // 2)


def scored_elements(spec: ModelSpec, parallel: ParallelConfig, kernels: Kernels = "plain") -> int:
    """Elements a token that one layer takes at most while nothing is kept."""
    wide = _widths(spec, parallel, kernels)
    return 3 * wide.stream + max(wide.attention, wide.inner)


class _Widths(NamedTuple):
    """Elements a token."""

    stream: int
    """Elements of the residual stream."""
    attention: int
    """Elements kept inside of attention."""
    inner: int
    """Elements kept inside of the feed-forward block."""
    product: int
    """Elements between the two matrices of the feed-forward block."""
    copies: int
    """Elements of tokens as experts take them and give them back."""


def _widths(spec: ModelSpec, parallel: ParallelConfig, kernels: Kernels) -> _Widths:
    stream = spec.hidden // (parallel.tensor if parallel.sequence_parallel else 1)
    query, value = (
        spec.heads * spec.head_dim // parallel.tensor,
        max(spec.groups // parallel.tensor, 1) * spec.head_dim,
    )
    # Ranks that share a key-value head have the three of all ranks.
    together = (
        query + 2 * value if parallel.tensor <= spec.groups else spec.groups * spec.group_rows
    )
    # The three together, rotated queries, keys, the result and its copy in the order of the next
    # matrix; normalising by head keeps the queries once more.
    attention = together + (3 + spec.qk_norm) * query + value
    # Of all context ranks: the keys and values that this one's two pieces of each row look at.
    attention += (2 * parallel.context + 1) * value if parallel.context > 1 else 0
    product, copies = (
        _of_experts(spec, parallel) if spec.experts else (spec.inner // parallel.tensor, 0)
    )
    # Both halves of what the first matrix gives, and the product; and, unless one kernel makes it,
    # which experts do not have, the one half activated and the other as it is multiplied. A router
    # has logits and probabilities.
    inner = (3 if kernels == "fused" and not spec.experts else 5) * product
    inner += copies + ROUTER_ELEMENTS * spec.experts // parallel.tensor
    return _Widths(stream, attention, inner, product, copies)


def _of_experts(spec: ModelSpec, parallel: ParallelConfig) -> tuple[int, int]:
    """`_Widths.product` and `copies` of a layer of experts."""
    product, taken = spec.chosen * spec.inner / parallel.tensor, spec.chosen * spec.hidden
    if parallel.expert == 1:
        return round(product), 2 * taken
    # Ranks that share experts have different tokens each, tensor ranks too. What is sent is there
    # beside what comes.
    return round(BUSIEST * product), round((1 + 2 * BUSIEST) * taken / parallel.tensor)


def logits_bytes(
    spec: ModelSpec,
    parallel: ParallelConfig,
    tokens: int,
    item: int,
    kernels: Kernels,
    entropy: bool,
) -> int:
    """Bytes that the output layer takes on a rank of the last stage: those of a chunk of logits of
    ``item`` bytes."""
    smallest, largest = CHUNKS
    all_of_them = tokens * (spec.padded_vocab(parallel.tensor) // parallel.tensor)
    at_once = min(all_of_them, max(all_of_them // 8, smallest), largest)
    if kernels == "fused":
        # Their gradient is written over them.
        return item * at_once
    # In bfloat16 float32 ones and the gradient beside them, in float32 all is in their place; and
    # probabilities.
    return (
        (item if item == MAIN_BYTES else 2 * item + MAIN_BYTES) + MAIN_BYTES * entropy
    ) * at_once
