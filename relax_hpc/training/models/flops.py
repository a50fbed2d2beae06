"""Floating-point operations of training, and what share of its GPUs' peak it reaches (MFU, arXiv
2204.02311).

Counted is what the model needs: no recomputation, no padding, and half of the attention matrix, as
it is causal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_hpc.data.multimodal.medium import Grid, Kind
    from relax_hpc.training.models.spec import ModelSpec

PEAKS = (
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("H800", 989e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("B200", 2250e12),
    ("L40S", 362e12),
)
"""Part of a device's name -> multiplications and additions a second that its maker states for
bfloat16, dense (not sparse). The first that fits counts."""


def forward_flops(spec: ModelSpec, lengths: Iterable[int]) -> float:
    """Floating-point operations of one forward pass over rows of so many tokens, each by itself.

    A multiplication by a matrix is 2 for each of its elements. Attention is 2 for each pair of a
    token and one that it sees, each of `heads * head_dim` channels, and both of its products.
    """
    rows = list(lengths)
    matrices = 2 * spec.matrix_elements() * sum(rows)
    return matrices + 2 * spec.layers * spec.heads * spec.head_dim * sum(
        length * length for length in rows
    )


def training_flops(
    spec: ModelSpec,
    lengths: Iterable[int],
    media: Iterable[tuple[Kind, Grid]] = (),
    frozen: Collection[str] = (),
) -> float:
    """Floating-point operations of one forward and backward pass over rows of so many tokens and
    their distinct ``media``: gradients of inputs and of weights are twice the forward pass, and
    towers that are ``frozen`` have none.
    """
    found, towers = (
        3 * forward_flops(spec, lengths),
        {kind: tower for tower in spec.towers for kind in tower.kinds},
    )
    for kind, grid in media:
        tower = towers[kind]
        found += (1 if tower.name in frozen else 3) * 2 * tower.multiply_adds(grid)
    return found


def peak_flops(device: str) -> float | None:
    """Peak floating-point operations a second, in bfloat16, of a device by torch's name; None: not
    known here.

    >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("Quadro P400")
    (989000000000000.0, None)
    """
    return next((peak for part, peak in PEAKS if part in device), None)
