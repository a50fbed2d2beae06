"""AdamW of a piece as one Triton kernel. It reads and rounds moments in place, without temporary
tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from relax_hpc.training.adam import UpdatePiece
from relax_hpc.training.rounding import MIXERS, step_salt

_BLOCK = 2048
_MULTIPLE = tl.constexpr(16)
(_SHIFT, _FACTOR), (_SHIFT_2, _FACTOR_2) = (tuple(map(tl.constexpr, mixer)) for mixer in MIXERS)


def update(piece: UpdatePiece, states: Sequence[Tensor]) -> None:
    """`Update` for moments in bfloat16: the step of `training.adam.update_with_torch` in one
    kernel."""
    average, square, parameter = states
    group, step = piece.group, 1 + int(piece.step)
    beta1, beta2 = group["betas"]
    _adamw[(triton.cdiv(len(parameter), _BLOCK),)](
        parameter,
        piece.gradient,
        average,
        square,
        len(parameter),
        1.0 - group["lr"] * group["weight_decay"],
        group["lr"] / (1.0 - beta1**step),
        math.sqrt(1.0 - beta2**step),
        group["eps"],
        beta1,
        beta2,
        step_salt(step - 1),
        BLOCK=_BLOCK,
    )


# The count and the salt change, but must not select another compiled variant.
@triton.jit(do_not_specialize=["count", "salt"])
def _adamw(P, G, M, V, count, decay, rate, root, eps, beta1, beta2, salt, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # Triton accesses 16 bytes at once only if the mask ends at a multiple of 16 elements. So one
    # program updates the elements after the last multiple.
    even = count // _MULTIPLE * _MULTIPLE
    _update_block(P, G, M, V, at, even, decay, rate, root, eps, beta1, beta2, salt)
    if (tl.program_id(0) == 0) & (even < count):
        last = even + tl.arange(0, _MULTIPLE)
        _update_block(P, G, M, V, last, count, decay, rate, root, eps, beta1, beta2, salt)


@triton.jit
def _update_block(P, G, M, V, at, end, decay, rate, root, eps, beta1, beta2, salt):
    inside = at < end
    p, g = tl.load(P + at, mask=inside), tl.load(G + at, mask=inside)
    m = tl.load(M + at, mask=inside).to(tl.float32)
    v = tl.load(V + at, mask=inside).to(tl.float32)
    # The order of operations of torch's AdamW, so that results differ only by rounding.
    m = m + (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    tl.store(P + at, decay * p - rate * m / (tl.sqrt(v) / root + eps), mask=inside)
    tl.store(M + at, _rounded(m, salt), mask=inside)
    tl.store(V + at, _rounded(v, salt), mask=inside)


@triton.jit
def _rounded(value, salt):
    """See `training.rounding`."""
    bits = value.to(tl.int32, bitcast=True)
    mixed = bits + salt
    mixed = (mixed ^ (mixed >> _SHIFT)) * _FACTOR
    mixed = (mixed ^ (mixed >> _SHIFT_2)) * _FACTOR_2
    chance = (mixed ^ (mixed >> 15)) & 0xFFFF
    return ((bits + chance) & -0x10000).to(tl.float32, bitcast=True).to(tl.bfloat16)
