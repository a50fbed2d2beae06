"""Floating-point operations of training, for its share of the GPUs' peak (MFU, arXiv 2204.02311).

Only operations that the model needs are counted: no recomputation, no padding, and half of the
causal attention matrix.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_hpc.data.multimodal.medium import Grid, Kind
    from relax_hpc.training.models.spec import ModelSpec
    from relax_hpc.training.models.towers.tower import Tower

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
"""Part of a device's name -> operations per second that its maker states for dense bfloat16. The
first entry that fits counts."""


def forward_flops(spec: ModelSpec, lengths: Iterable[int]) -> float:
    """Floating-point operations of one forward pass over separate rows with ``lengths`` tokens.

    A matrix product has 2 operations for each element of the matrix. Attention has 2 for each pair
    of a token and a visible token, for each of `heads * head_dim` channels, in both products.
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
    """Floating-point operations of one forward and backward pass over rows with ``lengths`` tokens
    and their distinct ``media``.

    The gradients of inputs and weights cost twice the forward pass. ``frozen`` towers have none.
    """
    total = 3 * forward_flops(spec, lengths)
    towers: dict[Kind, Tower] = {}
    for tower in spec.towers:
        towers |= dict.fromkeys(tower.kinds, tower)
    for kind, grid in media:
        tower = towers[kind]
        total += (1 if tower.name in frozen else 3) * 2 * tower.multiply_adds(grid)
    return total


def peak_flops(device: str) -> float | None:
    """Peak floating-point operations per second in bfloat16 of a device with that name in torch;
    None: unknown.

    >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("Quadro P400")
    (989000000000000.0, None)
    """
    return next((peak for part, peak in PEAKS if part in device), None)
