"""`ChunkKernels` in Triton. The forward pass reads a chunk's logits once; the backward pass
overwrites them with their gradient. No other tensor of their size is needed."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from relax_hpc.training.logprobs import Chunk, Terms, Upstream

_BLOCK = 4096
_WARPS = 8
# Elements that a thread reads at once: 16 bytes of bfloat16.
_LANE = 8
# Replacement of minus infinity, whose difference to itself is not a number.
_LOWEST = tl.constexpr(-1e30)
_LOG2_E, _LOG_2 = tl.constexpr(1 / math.log(2)), tl.constexpr(math.log(2))


class TritonKernels:
    """`ChunkKernels` in Triton; see the module. An entropy is only one more sum over the same
    logits."""

    entropy_is_free = True
    row_multiple = 16

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
            _readable_columns(chunk.logits),
            1.0 / chunk.temperature,
            TARGETS=targets,
            ENTROPY=entropy,
            **_lanes(columns),
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
            _readable_columns(chunk.logits),
            1.0 / chunk.temperature,
            TARGETS=chunk.targets.shape[1],
            ENTROPY=upstream.d_entropies is not None,
            **_block(columns),
        )
        return chunk.logits


def _lanes(columns: int) -> dict[str, int]:
    """`_block` as lanes of consecutive elements."""
    lanes = max(1, _block(columns)["BLOCK"] // _LANE)
    return {"LANES": lanes, "LANE": _LANE, "num_warps": _WARPS}


def _block(columns: int) -> dict[str, int]:
    """Elements that a program processes in one step."""
    return {"BLOCK": min(triton.next_power_of_2(columns), _BLOCK), "num_warps": _WARPS}


def _readable_columns(logits: Tensor) -> int:
    """Columns of ``logits`` [n, v] that kernels may read and overwrite: v and the padding of a row.
    Triton accesses 16 bytes at once only if their number and the stride are multiples of 16."""
    columns, multiple = logits.shape[1], TritonKernels.row_multiple
    padded = triton.cdiv(columns, multiple) * multiple
    fits = logits.stride(0) % multiple == 0 and logits.stride(0) >= padded
    return padded if fits else columns


# Tensors of a value for each token are slices that may begin at any address. They are read and
# written one value at a time. So their alignment must not select another compiled variant.
@triton.jit(do_not_specialize_on_alignment=["T", "TOP", "TOTAL", "MEAN", "CHOSEN"])
def _terms(
    X,
    T,
    TOP,
    TOTAL,
    MEAN,
    CHOSEN,
    stride,
    columns,
    readable,
    inverse,
    TARGETS: tl.constexpr,
    ENTROPY: tl.constexpr,
    LANES: tl.constexpr,
    LANE: tl.constexpr,
):
    BLOCK: tl.constexpr = LANES * LANE
    row = tl.program_id(0).to(tl.int64)
    # A lane is the elements that a thread reads at once.
    x, at = X + row * stride, tl.arange(0, LANES)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    # Each lane keeps its own running maximum m of the logits and, relative to it, sum exp(z - m)
    # and sum exp(z - m) (z - m), where z - m is in units of log 2.
    top = tl.full((LANES,), _LOWEST, tl.float32)
    total, mean = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    factor = inverse * _LOG2_E
    whole = columns // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        logits = tl.load(x + start + at).to(tl.float32)
        top, total, mean = _add_logits(logits, factor, top, total, mean, ENTROPY)
    if whole < columns:
        logits = tl.load(x + whole + at, mask=whole + at < readable, other=0.0).to(tl.float32)
        logits = tl.where(whole + at < columns, logits, _LOWEST)
        top, total, mean = _add_logits(logits, factor, top, total, mean, ENTROPY)
    # Combine the lanes: rescale their sums to the common maximum.
    best = tl.max(top, 0)
    lower = (top - best) * factor
    scale = tl.exp2(lower)
    tl.store(TOP + row, best * inverse)
    tl.store(TOTAL + row, tl.sum(total * scale, 0))
    tl.store(MEAN + row, tl.sum((mean + lower * total) * scale, 0) * _LOG_2)
    # A target of -1 belongs to another rank; the mask gives 0 for it.
    for number in range(row * TARGETS, row * TARGETS + TARGETS):
        target = tl.load(T + number)
        tl.store(
            CHOSEN + number,
            tl.load(x + target, mask=target >= 0, other=0.0).to(tl.float32) * inverse,
        )


@triton.jit
def _add_logits(logits, factor, top, total, mean, ENTROPY: tl.constexpr):
    """Sums of `_terms` with further ``logits`` [lanes, elements of a lane]."""
    new = tl.maximum(top, tl.max(logits, 1))
    lower = (top - new) * factor
    scale = tl.exp2(lower)
    z = (logits - new[:, None]) * factor
    p = tl.exp2(z)
    if ENTROPY:
        mean = (mean + lower * total) * scale + tl.sum(p * z, 1)
    return new, total * scale + tl.sum(p, 1), mean


@triton.jit(do_not_specialize_on_alignment=["T", "LSE", "G", "SUM", "H", "GH"])
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
    readable,
    inverse,
    TARGETS: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x, lane = X + row * stride, tl.arange(0, BLOCK)
    log_total, slope = tl.load(LSE + row) * _LOG2_E, tl.load(SUM + row) * inverse
    factor = inverse * _LOG2_E
    if ENTROPY:
        entropy_slope, entropy = tl.load(GH + row) * inverse, tl.load(H + row)
        # d_z = -p (slope + entropy_slope (log p + H)), where log p is a multiple of log 2.
        slope += entropy_slope * entropy
        entropy_slope *= _LOG_2
    for start in range(0, columns, BLOCK):
        at = start + lane
        logits = tl.load(x + at, mask=at < readable, other=0.0).to(tl.float32)
        logp = logits * factor - log_total
        p = tl.exp2(logp)
        d_z = -p * (slope + entropy_slope * logp) if ENTROPY else -p * slope
        for number in range(row * TARGETS, row * TARGETS + TARGETS):
            target = tl.load(T + number)
            # Most blocks have none of the targets.
            if (target >= start) & (target < start + BLOCK):
                d_z += tl.where(at == target, tl.load(G + number) * inverse, 0.0)
        tl.store(x + at, d_z.to(X.dtype.element_ty), mask=at < readable)
