"""Norm, rotary embedding and gated activation as one Triton kernel each, instead of a dozen
launches.

All kernels compute in float32, for any type of the tensors. With TRITON_INTERPRET=1 they run slowly
on a CPU.

The number of tokens is not specialized (`do_not_specialize`), so that packs of new lengths compile
nothing. Triton 3.6 would compile other variants for multiples of 16 and for 1.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer import mlp
from torch import Tensor
from torch.autograd.function import once_differentiable

from relax_hpc.base.errors import ConfigError
from relax_hpc.training.models.norm import RMSNorm

# Elements that a program processes in one step.
_BLOCK = 4096
_WARP_ELEMENTS, _MAX_WARPS = 1024, 16
_PROGRAMS_PER_PROCESSOR = 4
# Widths of norms for which 128 registers would spill. They need 128 or 190 without a limit.
_UNLIMITED_COLUMNS = (512, 1024)
# Pairs of a head, and heads, that a program rotates: 8 pairs in each head for a thread.
_ROTARY_PAIRS, _ROTARY_HEADS = 1024, 4


def install() -> None:
    """Replace the kernels of Apex and Transformer Engine in megatron-core.

    megatron-core 0.16.1 calls them only with `apply_rope_fusion` and `bias_activation_fusion`.
    """
    rope_utils.fused_apply_rotary_pos_emb = rotary
    mlp.bias_swiglu_impl = swiglu


def run_small_norm(device: str) -> None:
    """Compile and run the forward kernel of the norm for a few values on ``device``."""
    values = torch.ones(1, 8, device=device)
    _RMSNorm.apply(values, values[0], 1e-6)


class FusedRMSNorm(RMSNorm):
    """`RMSNorm` as a Triton kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape."""
        return _RMSNorm.apply(x, self.weight, self.eps)


def rotary(t: Tensor, freqs: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate queries or keys [s, b, heads, dim] by the angles `freqs` [s, 1, 1, dim] float32, whose
    halves are equal.

    ConfigError: the angles are for a part of a head, differ between rows of a batch, or are for
    interleaved pairs.
    """
    if interleaved or freqs.shape != (t.shape[0], 1, 1, t.shape[3]):
        raise ConfigError(
            f"actor.kernels: found fused with angles of shape {tuple(freqs.shape)} for "
            f"{tuple(t.shape)}, interleaved {interleaved}, allowed for this model: plain"
        )
    return _Rotary.apply(t, freqs)


def swiglu(x: Tensor, bias: None = None, *_: Any) -> Tensor:
    """silu(x[..., :d]) * x[..., d:] of x [..., 2 d]. A bias is not supported; further arguments of
    megatron-core are ignored."""
    if bias is not None:
        raise ConfigError(
            "actor.kernels: found fused with a bias of the gated activation, allowed for this "
            "model: plain"
        )
    return _SwiGLU.apply(x)


class _RMSNorm(torch.autograd.Function):
    """RMS norm: r = (mean x^2 + eps)^-1/2, n = r x, y = w n, dx = r (w dy - n mean(w dy n)), dw =
    sum of dy n."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        rows, columns = flat.shape
        y = torch.empty_like(flat, memory_format=torch.contiguous_format)
        scale = _float_tensor(flat, rows)
        shape = _block_shape(columns)
        _norm_forward[(triton.cdiv(rows, shape["ROWS"]),)](
            flat, weight, y, scale, rows, columns, flat.stride(0), eps, **shape
        )
        ctx.save_for_backward(flat, weight, scale)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        rows, columns = x.shape
        shape = _backward_shape(columns, x.element_size())
        programs = min(triton.cdiv(rows, shape["ROWS"]), _max_programs(x.device))
        d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        # Each program sums the weight's gradient over its rows.
        partial_sums = _float_tensor(x, programs, columns)
        flat = d_y.reshape(-1, columns)
        _norm_backward[(programs,)](
            x,
            weight,
            scale,
            flat,
            d_x,
            partial_sums,
            rows,
            columns,
            x.stride(0),
            flat.stride(0),
            **shape,
        )
        return d_x.view(d_y.shape), partial_sums.sum(0).to(weight.dtype), None


@triton.jit(do_not_specialize=["rows"])
def _norm_forward(
    X, W, Y, SCALE, rows, columns, stride, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    # 64-bit: the offset of an element may exceed 32 bits.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    x = tl.load(X + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    # Columns beyond the row are 0, so they do not change the sum.
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / columns + eps)
    w = tl.load(W + column, mask=column < columns, other=0.0).to(tl.float32)
    y = x * scale[:, None] * w[None, :]
    tl.store(Y + row[:, None] * columns + column[None, :], y.to(Y.dtype.element_ty), mask=inside)
    tl.store(SCALE + row, scale, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _norm_backward(
    X,
    W,
    SCALE,
    DY,
    DX,
    DW,
    rows,
    columns,
    stride,
    d_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)
    # The gradient of the weight is a sum over all rows. Each program sums its rows in registers and
    # stores one partial sum; atomic additions would make the order of the sum random.
    d_w = tl.zeros((ROWS, COLUMNS), tl.float32)
    # In a block of several rows a thread has few columns and can keep their weights. A thread of a
    # long row would spill them, and reads them from the cache for each row.
    if ROWS > 1:
        kept_w = tl.load(W + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    first = tl.program_id(0).to(tl.int64)
    for start in range(first * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        scale = tl.load(SCALE + row, mask=row < rows, other=0.0)
        x = tl.load(X + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        d_y = tl.load(DY + row[:, None] * d_stride + column[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        if ROWS > 1:
            w = kept_w
        else:
            w = tl.load(W + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        normal, slope = x * scale[:, None], d_y * w
        d_w += d_y * normal
        d_x = (slope - normal * (tl.sum(slope * normal, 1) / columns)[:, None]) * scale[:, None]
        tl.store(
            DX + row[:, None] * columns + column[None, :], d_x.to(DX.dtype.element_ty), mask=inside
        )
    tl.store(DW + first * columns + column, tl.sum(d_w, 0), mask=column < columns)


class _Rotary(torch.autograd.Function):
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) of the halves of a head. The backward pass
    rotates by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, freqs: Tensor) -> Tensor:
        ctx.save_for_backward(freqs)
        return _rotate(t, freqs, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_t: Tensor) -> tuple[Tensor, None]:
        (freqs,) = ctx.saved_tensors
        return _rotate(d_t, freqs, -1.0), None


def _rotate(t: Tensor, freqs: Tensor, sign: float) -> Tensor:
    s, batch, heads, dim = t.shape
    # The kernel needs consecutive elements of a head; other strides may be arbitrary, so that views
    # of the fused queries, keys and values need no copy.
    t = t if t.stride(3) == 1 else t.contiguous()
    out = torch.empty_like(t, memory_format=torch.contiguous_format)
    rows, half = s * batch, triton.next_power_of_2(dim // 2)
    block = {
        "ROWS": max(1, _ROTARY_PAIRS // half),
        "HALF": half,
        "HEADS": min(triton.next_power_of_2(heads), _ROTARY_HEADS),
    }
    grid = (triton.cdiv(rows, block["ROWS"]), triton.cdiv(heads, block["HEADS"]))
    _rotate_heads[grid](
        t, out, freqs.contiguous(), rows, batch, heads, dim // 2, *t.stride()[:3], sign, **block
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _rotate_heads(
    X,
    Y,
    ANGLES,
    rows,
    batch,
    heads,
    half,
    stride_s,
    stride_b,
    stride_h,
    sign,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    # One program rotates some heads of some tokens. Each thread has the same pairs in all of its
    # heads, so that it computes their sines only once.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, line = row // batch, row % batch
    lane = tl.arange(0, HALF)
    known = (row[:, None] < rows) & (lane[None, :] < half)
    angle = tl.load(ANGLES + token[:, None] * 2 * half + lane[None, :], mask=known, other=0.0)
    cos, sin = tl.cos(angle)[None], (tl.sin(angle) * sign)[None]
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None, None]
    inside = known[None] & (head < heads)
    x = X + (token * stride_s + line * stride_b)[None, :, None] + head * stride_h + lane
    y = Y + (row[None, :, None] * heads + head) * 2 * half + lane
    first = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(y, (first * cos - second * sin).to(Y.dtype.element_ty), mask=inside)
    tl.store(y + half, (second * cos + first * sin).to(Y.dtype.element_ty), mask=inside)


class _SwiGLU(torch.autograd.Function):
    """SwiGLU y = a q b, where q is the logistic function of a: da = dy b q (1 + a (1 - q)), db = dy
    a q."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        y = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
        columns = y.shape[-1]
        _swiglu_forward[(triton.cdiv(y.numel(), _BLOCK),)](
            x, y, y.numel() // columns, columns, BLOCK=_BLOCK
        )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        d_y, d_x = d_y.contiguous(), torch.empty_like(x)
        columns = d_y.shape[-1]
        _swiglu_backward[(triton.cdiv(d_y.numel(), _BLOCK),)](
            x, d_y, d_x, d_y.numel() // columns, columns, BLOCK=_BLOCK
        )
        return d_x


@triton.jit(do_not_specialize=["rows"])
def _swiglu_forward(X, Y, rows, columns, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # Triton derives from `columns` that the mask ends at a multiple of 16 elements.
    inside = at < rows.to(tl.int64) * columns
    x = X + at // columns * 2 * columns + at % columns
    a = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + at, (a * tl.sigmoid(a) * b).to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _swiglu_backward(X, DY, DX, rows, columns, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # Triton derives from `columns` that the mask ends at a multiple of 16 elements.
    inside = at < rows.to(tl.int64) * columns
    index = at // columns * 2 * columns + at % columns
    a = tl.load(X + index, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(X + index + columns, mask=inside, other=0.0).to(tl.float32)
    d_y = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
    # The activation is computed again instead of stored: it needs only the inputs.
    q = tl.sigmoid(a)
    tl.store(DX + index, (d_y * b * q * (1.0 + a * (1.0 - q))).to(DX.dtype.element_ty), mask=inside)
    tl.store(DX + index + columns, (d_y * a * q).to(DX.dtype.element_ty), mask=inside)


def _block_shape(columns: int) -> dict[str, int]:
    """Rows and columns that a program processes in one step, and its warps. Triton's blocks have
    powers of 2. Up to a width of 16,384, a thread has at most 32 elements: registers for more of
    them spill."""
    padded = triton.next_power_of_2(columns)
    rows = max(1, _BLOCK // padded)
    warps = min(max(4, padded // _WARP_ELEMENTS), _MAX_WARPS)
    return {"ROWS": rows, "COLUMNS": padded, "num_warps": warps}


def _backward_shape(columns: int, element_bytes: int) -> dict[str, int]:
    """`_block_shape` of the backward pass, with a limit of a thread's registers in half precision.

    A processor then runs the programs of `_max_programs` in one, two or four equal rounds, for 4, 8
    and 16 warps. Without a limit, ptxas of CUDA 12.8 uses up to 191 registers.
    """
    shape = _block_shape(columns)
    # Elements of 4 bytes would spill.
    if element_bytes == 2 and shape["COLUMNS"] not in _UNLIMITED_COLUMNS:
        shape["maxnreg"] = 128
    return shape


def _max_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    return _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def _float_tensor(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)
