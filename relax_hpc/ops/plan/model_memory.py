"""Memory of a model on one rank: parameters, activations and logits.

The activations that a layer keeps were counted tensor by tensor in the layers of megatron-core
0.16.1 and `models.layer_spec`. A test compares them with the bytes that autograd holds. The method
is that of Korthikanti et al., arXiv 2205.05198.
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
"""Bytes of an element of gradients, main parameters and moments in float32."""
BUSIEST = 1.5
"""Tokens of the busiest rank of experts, divided by the mean of all ranks. An assumption."""
ROUTER_ELEMENTS = 6
"""Elements of 2 bytes that a router keeps per expert and token: three float32 values."""
CHUNKS = 2**22, 2**28
"""Minimum and maximum of a chunk of logits in `training.logprobs`; between them 1/8 of all."""


def parameters(spec: ModelSpec, parallel: ParallelConfig, stage: int) -> int:
    """Parameters of the largest rank of pipeline ``stage``."""
    return sum(_counts(spec, parallel, stage))


def own_share(spec: ModelSpec, parallel: ParallelConfig, stage: int) -> float:
    """Parameters of a rank, each divided by the number of ranks that have the same one."""
    dense, experts = _counts(spec, parallel, stage)
    copies = parallel.data * parallel.context
    expert_ranks = parallel.expert * parallel.expert_tensor
    return dense / copies + experts * expert_ranks / (parallel.tensor * copies)


def expert_parameters(spec: ModelSpec, parallel: ParallelConfig, stage: int) -> int:
    """Parameters of a rank that belong to experts."""
    return _counts(spec, parallel, stage)[1]


def _counts(spec: ModelSpec, parallel: ParallelConfig, stage: int) -> tuple[int, int]:
    """Parameters of a rank outside of experts, and in its experts."""
    layers = len(stage_layers(spec.layers, parallel)[stage])
    is_last = stage == parallel.pipeline - 1
    # Count one layer and multiply: all are alike, and large models have 10,000 experts and more.
    layer = _count_entries(spec, parallel, stage_entries(spec, range(1), False, False))
    ends = _count_entries(spec, parallel, stage_entries(spec, range(0), stage == 0, is_last))
    return layers * layer[0] + ends[0], layers * layer[1] + ends[1]


def _count_entries(
    spec: ModelSpec, parallel: ParallelConfig, entries: list[FusedParameter]
) -> tuple[int, int]:
    """Parameters of ``entries`` on a rank outside of experts, and in its experts."""
    dense, experts = 0, 0
    for entry in select_experts(entries, range(spec.experts // parallel.expert)):
        is_expert = entry.expert is not None
        tensor = parallel.expert_tensor if is_expert else parallel.tensor
        count = sum(_elements(piece, tensor) for piece in entry.pieces)
        if is_expert:
            experts += count
        else:
            dense += count
    return dense, experts


def _elements(piece: Piece, tensor: int) -> int:
    """Elements of a piece on one of ``tensor`` ranks that split it."""
    if piece.axis is None:
        return math.prod(piece.shape)
    length = -(-piece.shape[piece.axis] // tensor)
    return math.prod(piece.shape) // piece.shape[piece.axis] * length


def kept_elements(
    spec: ModelSpec, parallel: ParallelConfig, recompute: str, kernels: Kernels = "plain"
) -> int:
    """Elements per token that a layer keeps for the backward pass."""
    widths = _widths(spec, parallel, kernels)
    return {
        # Inputs and outputs of the two norms, and the inside of attention and feed-forward block.
        "none": 4 * widths.stream + widths.attention + widths.inner,
        "selective": 2 * widths.stream + widths.attention,
        "full": widths.stream,
    }[recompute]


def working_elements(
    spec: ModelSpec, parallel: ParallelConfig, recompute: str, kernels: Kernels = "plain"
) -> int:
    """Additional elements per token of the backward pass of one layer.

    They are recomputed activations and gradients.
    """
    widths = _widths(spec, parallel, kernels)
    recomputed = {
        "none": 0,
        "selective": 2 * widths.stream + widths.inner,
        "full": 3 * widths.stream + widths.attention + widths.inner,
    }[recompute]
    # The feed-forward block frees its activations while gradients are computed. At most the
    # gradients of the product and of both halves exist, and those of some of the copies.
    inner_gradients = 3 * widths.product + widths.copy_gradients
    gradients = 2 * widths.stream + max(widths.attention // 2, inner_gradients)
    return recomputed + gradients


def scored_elements(spec: ModelSpec, parallel: ParallelConfig, kernels: Kernels = "plain") -> int:
    """Elements per token of one layer in a forward pass that keeps nothing."""
    widths = _widths(spec, parallel, kernels)
    return 3 * widths.stream + max(widths.attention, widths.inner)


class _Widths(NamedTuple):
    """Elements per token."""

    stream: int
    """Elements of the residual stream."""
    attention: int
    """Elements kept inside of attention."""
    inner: int
    """Elements kept inside of the feed-forward block."""
    product: int
    """Elements between the two matrices of the feed-forward block."""
    copies: int
    """Elements of the copies of tokens before and after the experts."""
    copy_gradients: int
    """Elements of the gradients of these copies that exist at a time."""


def _widths(spec: ModelSpec, parallel: ParallelConfig, kernels: Kernels) -> _Widths:
    tensor = parallel.tensor
    stream = spec.hidden // (tensor if parallel.sequence_parallel else 1)
    query = spec.heads * spec.head_dim // tensor
    value = max(spec.groups // tensor, 1) * spec.head_dim
    # Queries, keys and values together. Ranks that share a key-value head hold those of all ranks.
    qkv = query + 2 * value
    if tensor > spec.groups:
        qkv = spec.groups * spec.group_rows
    # Besides them: rotated queries and keys, the result, and a contiguous copy for the next
    # matrix. Normalisation of heads keeps the queries once more.
    attention = qkv + (3 + spec.qk_norm) * query + value
    if parallel.context > 1:
        # Keys and values of all context ranks that this rank's two pieces of each row attend to.
        attention += (2 * parallel.context + 1) * value
    product, copies, copy_gradients = spec.inner // tensor, 0, 0
    if spec.experts:
        product, copies, copy_gradients = _expert_widths(spec, parallel)
    # Both halves of the first matrix's output and their product. Without a fused kernel, which
    # experts do not have, also the activated half and the other half before multiplication.
    kept_products = 3 if kernels == "fused" and not spec.experts else 5
    if spec.experts and _has_all_experts(parallel):
        kept_products += 1  # The product before its multiplication by the router's probability.
    inner = kept_products * product
    inner += copies + ROUTER_ELEMENTS * spec.experts // tensor
    return _Widths(stream, attention, inner, product, copies, copy_gradients)


def _has_all_experts(parallel: ParallelConfig) -> bool:
    """Whether each rank has all experts completely."""
    return parallel.expert == parallel.tensor == 1


def _expert_widths(spec: ModelSpec, parallel: ParallelConfig) -> tuple[int, int, int]:
    """`_Widths.product`, `copies` and `copy_gradients` of a layer of experts."""
    product, dispatched = spec.chosen * spec.inner / parallel.tensor, spec.chosen * spec.hidden
    if _has_all_experts(parallel):
        # `LocalDispatcher` copies tokens only for the input of the experts.
        return round(product), dispatched, dispatched
    if parallel.expert == 1:
        return round(product), 2 * dispatched, dispatched
    # Each rank of the expert and tensor groups has different tokens. Sent and received tokens
    # exist at the same time, and the busiest rank receives BUSIEST times the mean.
    copies = round((1 + 2 * BUSIEST) * dispatched / parallel.tensor)
    return round(BUSIEST * product), copies, copies // 2


def logits_bytes(
    spec: ModelSpec,
    parallel: ParallelConfig,
    tokens: int,
    item: int,
    kernels: Kernels,
    entropy: bool,
) -> int:
    """Bytes of the output layer on a rank of the last stage: one chunk of logits and its gradient.

    ``item``: bytes of a logit.
    """
    smallest, largest = CHUNKS
    logits = tokens * (spec.padded_vocab(parallel.tensor) // parallel.tensor)
    chunk = min(logits, max(logits // 8, smallest), largest)
    if kernels == "fused":
        # The gradient overwrites the logits.
        return item * chunk
    # float32 logits are overwritten too. bfloat16 logits also have a float32 copy and a gradient.
    per_logit = item if item == MAIN_BYTES else 2 * item + MAIN_BYTES
    if entropy:
        per_logit += MAIN_BYTES  # Probabilities.
    return per_logit * chunk
