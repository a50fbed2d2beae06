"""Stochastic rounding of float32 to bfloat16: up or down by chance, so that the mean is what was
rounded.

An average of which a step changes less than bfloat16 can tell would stand still if it were rounded
to the nearest: with beta2 0.999 the second moment, whose changes are a thousandth, where bfloat16
has 128 steps to a power of two. Chance is a hash of the value and of the step: ranks that hold the
same value round it alike, however it is cut into pieces, and a resumed run as the one before it.
Gupta et al., arXiv 1502.02551; Zamirai et al., arXiv 2010.06192.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIXERS = (15, 0x2C1B3C6D), (12, 0x297A2D39)
"""Shifts and factors by which bits are mixed: Wellons, Prospecting for Hash Functions (2018)."""


def step_salt(step: int) -> int:
    """Number, int32, that the ``step`` adds to the bits of a value before they are mixed: far apart
    for near steps.

    >>> step_salt(1), step_salt(2)
    (-1640531527, 1013904242)
    """
    return (step * 0x9E3779B9 + 2**31) % 2**32 - 2**31


def round_stochastically(values: Tensor, step: int) -> Tensor:
    """``values`` float32 as bfloat16: of its two neighbours one by chance, the nearer one more
    often.

    >>> found = round_stochastically(torch.full((10_000,), 1.0), 3)
    >>> found.unique().tolist(), found.dtype
    ([1.0], torch.bfloat16)
    """
    bits = values.view(torch.int32)
    mixed = bits + step_salt(step)
    for shift, factor in MIXERS:
        mixed.bitwise_xor_(mixed >> shift).mul_(factor)
    mixed.bitwise_xor_(mixed >> 15).bitwise_and_(0xFFFF)
    # What is below bfloat16's last bit carries into it as often as it is large.
    return mixed.add_(bits).bitwise_and_(-0x10000).view(torch.float32).bfloat16()
