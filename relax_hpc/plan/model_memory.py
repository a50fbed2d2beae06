"""Bytes of a model on one rank: parameters, what a layer keeps for the backward pass, logits.

What a layer keeps was counted, tensor by tensor, along megatron-core 0.16.1's layers and `models.layer_spec`; a test
compares it with the bytes that autograd holds. Korthikanti et al., arXiv 2205.05198, have the method.
"""

from __future__ import annotations

import math

from relax_hpc.config.schema import Kernels, ParallelConfig
from relax_hpc.models.hf_mapping import Piece, of_experts, stage_entries
from relax_hpc.models.spec import ModelSpec
from relax_hpc.models.stages import stage_layers

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
MAIN_BYTES = 4
"""Of an element of gradients, of the optimizer's main parameters and of each of its two moments: float32."""
CHUNKS = 2**22, 2**28
"""Logits that `training.logprobs` has at once, at least and at most; between these an eighth of all."""


def parameters(spec: ModelSpec, parallel: ParallelConfig, stage: int) -> int:
    """Of the rank of pipeline ``stage`` with the most."""
    return sum(_counts(spec, parallel, stage))


def own_share(spec: ModelSpec, parallel: ParallelConfig, stage: int) -> float:
    """Parameters of a rank, each divided by the number of ranks that have the same one."""
    dense, experts = _counts(spec, parallel, stage)
    copies = parallel.data * parallel.context
    return dense / copies + experts * parallel.expert * parallel.expert_tensor / (parallel.tensor * copies)


def _counts(spec: ModelSpec, parallel: ParallelConfig, stage: int) -> tuple[int, int]:
    """Parameters of a rank: those outside of experts, and those of its experts."""
    held = stage_layers(spec.layers, parallel)[stage]
    entries = stage_entries(spec, held, stage == 0, stage == parallel.pipeline - 1)
    found = [0, 0]
    for entry in of_experts(entries, range(spec.experts // parallel.expert)):
        one_expert = entry.expert is not None
        tensor = parallel.expert_tensor if one_expert else parallel.tensor
        found[one_expert] += sum(_elements(piece, tensor) for piece in entry.pieces)
    return found[0], found[1]


def _elements(piece: Piece, tensor: int) -> int:
    if piece.axis is None:
        return math.prod(piece.shape)
    length = -(-piece.shape[piece.axis] // tensor)
    return math.prod(piece.shape) // piece.shape[piece.axis] * length


def kept_elements(spec: ModelSpec, parallel: ParallelConfig, recompute: str, kernels: Kernels = "plain") -> int:
    """Elements a token that a layer keeps for the backward pass."""
    stream, attention, inner, _ = _widths(spec, parallel, kernels)
    return {
        # Two inputs of norms and what they give, and what is inside of the two blocks.
        "none": 4 * stream + attention + inner,
        "selective": 2 * stream + attention,
        "full": stream,
    }[recompute]


def working_elements(spec: ModelSpec, parallel: ParallelConfig, recompute: str, kernels: Kernels = "plain") -> int:
    """Elements a token that the backward pass of one layer takes beside: what it computes again, and gradients."""
    stream, attention, inner, product = _widths(spec, parallel, kernels)
    again = {"none": 0, "selective": 2 * stream + inner, "full": 3 * stream + attention + inner}[recompute]
    # What the feed-forward block keeps goes while gradients come: at most the product's and both halves' are there.
    return again + 2 * stream + max(attention // 2, 3 * product)


def scored_elements(spec: ModelSpec, parallel: ParallelConfig, kernels: Kernels = "plain") -> int:
    """Elements a token that one layer takes at most while nothing is kept."""
    stream, attention, inner, _ = _widths(spec, parallel, kernels)
    return 3 * stream + max(attention, inner)


def _widths(spec: ModelSpec, parallel: ParallelConfig, kernels: Kernels) -> tuple[int, int, int, int]:
    """Elements a token: of the residual stream, kept inside of attention and of the feed-forward block, and of what is
    between its two matrices."""
    stream = spec.hidden // (parallel.tensor if parallel.sequence_parallel else 1)
    query, value = spec.heads * spec.head_dim // parallel.tensor, max(spec.groups // parallel.tensor, 1) * spec.head_dim
    # Ranks that share a key-value head have the three of all ranks.
    together = query + 2 * value if parallel.tensor <= spec.groups else spec.groups * spec.group_rows
    # The three together, rotated queries, keys, the result and its copy in the order of the next matrix; normalising
    # by head keeps the queries once more.
    attention = together + (3 + spec.qk_norm) * query + value
    # Of all context ranks: the keys and values that this one's two pieces of each row look at.
    attention += (2 * parallel.context + 1) * value if parallel.context > 1 else 0
    # Both halves of what the first matrix gives, and the product; and, unless one kernel makes it, the one half
    # activated and the other as it is multiplied. Experts, which have no such kernel, take copies of their tokens.
    chosen = getattr(spec, "chosen", 1)
    product = chosen * spec.inner // parallel.tensor
    inner = (3 if kernels == "fused" and not spec.experts else 5) * product
    if spec.experts:
        inner += 2 * chosen * spec.hidden // (parallel.tensor if parallel.expert > 1 else 1)
    return stream, attention, inner, product


def logits_bytes(
    spec: ModelSpec, parallel: ParallelConfig, tokens: int, item: int, kernels: Kernels, entropy: bool
) -> int:
    """Of the output layer, on a rank of the last stage: of a chunk of logits of ``item`` bytes."""
    smallest, largest = CHUNKS
    all_of_them = tokens * (spec.padded_vocab(parallel.tensor) // parallel.tensor)
    at_once = min(all_of_them, max(all_of_them // 8, smallest), largest)
    if kernels == "fused":
        # Their gradient is written over them.
        return item * at_once
    # In bfloat16 float32 ones and the gradient beside them, in float32 all is in their place; and probabilities.
    return ((item if item == MAIN_BYTES else 2 * item + MAIN_BYTES) + MAIN_BYTES * entropy) * at_once
