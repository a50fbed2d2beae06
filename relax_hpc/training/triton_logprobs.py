"""`ChunkKernels` in Triton. The forward pass reads a chunk's logits once; the backward pass
overwrites them with their gradient. No other tensor of their size is needed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from relax_hpc.training.logprobs import Chunk, Terms, Upstream

_BLOCK = 4096
# Replacement of minus infinity, whose difference to itself is not a number.
_LOWEST = tl.constexpr(-1e30)


class TritonKernels:
    """`ChunkKernels` in Triton; see the module. An entropy is only one more sum over the same
    logits."""

    entropy_is_free = True

    def terms(self, chunk: Chunk, entropy: bool) -> Terms:
        """See `ChunkKernels`."""
        (tokens, columns), targets = chunk.logits.shape, chunk.targets.shape[1]
        top, total, mean = torch.empty((3, tokens), dtype=torch.float32, device=chunk.logits.device)
        chosen = torch.empty((tokens, targets), dtype=torch.float32, device=chunk.logits.device)
        _terms[(tokens,)](
            chunk.logits,
            chunk.targets.contiguous(),
            top,
            total,
            mean,
            chosen,
            chunk.logits.stride(0),
            columns,
            1.0 / chunk.temperature,
            TARGETS=targets,
            ENTROPY=entropy,
            **_block(columns),
        )
        return top, total, mean, chosen

    def slopes(self, chunk: Chunk, upstream: Upstream) -> Tensor:
        """See `ChunkKernels`. The result overwrites the logits."""
        tokens, columns = chunk.logits.shape
        # Without an entropy the kernel does not read this argument.
        d_entropies = upstream.entropies
        if upstream.d_entropies is not None:
            d_entropies = upstream.d_entropies.contiguous()
        _slopes[(tokens,)](
            chunk.logits,
            chunk.targets.contiguous(),
            upstream.log_total,
            upstream.d_logprobs.contiguous(),
            upstream.d_logprobs.sum(-1),
            upstream.entropies,
            d_entropies,
            chunk.logits.stride(0),
            columns,
            1.0 / chunk.temperature,
            TARGETS=chunk.targets.shape[1],
            ENTROPY=upstream.d_entropies is not None,
            **_block(columns),
        )
        return chunk.logits


def _block(columns: int) -> dict[str, int]:
    return {"BLOCK": min(triton.next_power_of_2(columns), _BLOCK), "num_warps": 8}


@triton.jit
def _terms(
    X,
    T,
    TOP,
    TOTAL,
    MEAN,
    CHOSEN,
    stride,
    columns,
    inverse,
    TARGETS: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x, lane = X + row * stride, tl.arange(0, BLOCK)
    # Each lane keeps its own running maximum m and, relative to it, sum exp(z - m) and sum exp(z -
    # m) (z - m).
    top = tl.full((BLOCK,), _LOWEST, tl.float32)
    total, mean = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        inside = start + lane < columns
        z = tl.load(x + start + lane, mask=inside, other=0.0).to(tl.float32) * inverse
        new = tl.where(inside, tl.maximum(top, z), top)
        scale, p = tl.exp(top - new), tl.where(inside, tl.exp(z - new), 0.0)
        if ENTROPY:
            mean = (mean + (top - new) * total) * scale + p * (z - new)
        total = total * scale + p
        top = new
    # Combine the lanes: rescale their sums to the common maximum.
    best = tl.max(top, 0)
    scale = tl.exp(top - best)
    tl.store(TOP + row, best)
    tl.store(TOTAL + row, tl.sum(total * scale, 0))
    tl.store(MEAN + row, tl.sum((mean + (top - best) * total) * scale, 0))
    # A target of -1 belongs to another rank; the mask gives 0 for it.
    for number in range(row * TARGETS, row * TARGETS + TARGETS):
        target = tl.load(T + number)
        tl.store(
            CHOSEN + number,
            tl.load(x + target, mask=target >= 0, other=0.0).to(tl.float32) * inverse,
        )


@triton.jit
def _slopes(
    X,
    T,
    LSE,
    G,
    SUM,
    H,
    GH,
    stride,
    columns,
    inverse,
    TARGETS: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x, lane = X + row * stride, tl.arange(0, BLOCK)
    log_total, slope = tl.load(LSE + row), tl.load(SUM + row)
    for start in range(0, columns, BLOCK):
        at = start + lane
        logp = tl.load(x + at, mask=at < columns, other=0.0).to(tl.float32) * inverse - log_total
        p = tl.exp(logp)
        d_z = -slope * p
        for number in range(row * TARGETS, row * TARGETS + TARGETS):
            target = tl.load(T + number)
            # Most blocks have none of the targets.
            if (target >= start) & (target < start + BLOCK):
                d_z += tl.where(at == target, tl.load(G + number), 0.0)
        if ENTROPY:
            d_z -= tl.load(GH + row) * p * (logp + tl.load(H + row))
        tl.store(x + at, (d_z * inverse).to(X.dtype.element_ty), mask=at < columns)
