"""Stochastic rounding of float32 to bfloat16: randomly up or down, so that the mean is the exact
value.

With rounding to the nearest, a moving average would not change if its step is smaller than the
resolution of bfloat16. This concerns the second moment: with beta2 0.999 it changes by a
thousandth, and bfloat16 has 128 steps to a power of two. The random number is a hash of the value
and of the step. So all ranks round the same value alike, for any split into pieces, and a resumed
run rounds as before. Gupta et al., arXiv 1502.02551; Zamirai et al., arXiv 2010.06192.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIXERS = (15, 0x2C1B3C6D), (12, 0x297A2D39)
"""Shifts and factors that mix the bits: Wellons, Prospecting for Hash Functions (2018)."""


def step_salt(step: int) -> int:
    """int32 number that is added to the bits of a value before they are mixed. Consecutive steps
    give distant numbers.

    >>> step_salt(1), step_salt(2)
    (-1640531527, 1013904242)
    """
    return (step * 0x9E3779B9 + 2**31) % 2**32 - 2**31


def round_stochastically(values: Tensor, step: int) -> Tensor:
    """Round float32 ``values`` to bfloat16: randomly to one of the two neighbours, more often to
    the nearer one.

    >>> rounded = round_stochastically(torch.full((10_000,), 1.0), 3)
    >>> rounded.unique().tolist(), rounded.dtype
    ([1.0], torch.bfloat16)
    """
    # In place on one temporary tensor: the states of an optimizer are large.
    bits = values.view(torch.int32)
    mixed = bits + step_salt(step)
    for shift, factor in MIXERS:
        mixed.bitwise_xor_(mixed >> shift).mul_(factor)
    mixed.bitwise_xor_(mixed >> 15).bitwise_and_(0xFFFF)
    # The sum carries into bfloat16's last bit with a probability equal to the truncated fraction.
    return mixed.add_(bits).bitwise_and_(-0x10000).view(torch.float32).bfloat16()
