"""Attention and its gradient against the formula in float32: over many lengths, and on slices of
larger tensors.

Kernels are chosen by lengths and strides, and wrong ones have been seen among them
(pytorch#196678).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from relax_hpc.training import parallel
from relax_hpc.training.models.attention import is_faster_by_row
from relax_hpc.training.models.packs import PackLayout, PackSplit
from tests.effort import effort
from tests.requirements import DEVICE, requires

requires("torch", "megatron")

pytestmark = pytest.mark.gpu

HEADS, GROUPS, DIM = 8, 4, 64
AROUND = sorted(
    {*range(1, 20), *(edge + more for edge in (64, 128, 192, 256) for more in (-1, 0, 1, 2)), 300}
)
LENGTHS = (
    [*range(1, 301), 513, 1024, 2047, 4097] if DEVICE != "cpu" else effort(AROUND[::4], AROUND)
)
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 0.02}
"""Of a gradient's error, in its own norm: bfloat16 has 8 bits, of which each value of the result
may lose some."""


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    one_after_the_other = (x.transpose(0, 1).flatten(0, 1).unsqueeze(1) for x in (q, k, v))
    out = of_pack([len(q)] * q.shape[1], *one_after_the_other)
    return out.squeeze(1).unflatten(0, (q.shape[1], -1)).transpose(0, 1)


def of_pack(lengths: list[int], *parts: Tensor, long_rows_alone: bool = False) -> Tensor:
    """Rows of `lengths` one after the other: [t, 1, heads, dim] each -> [t, 1, heads * dim]."""
    parallel.import_libraries(DEVICE, 0)
    from relax_hpc.training.models.attention import CausalAttention

    rows = PackLayout.from_lengths(lengths, PackSplit()).rank_rows(0, DEVICE)
    module = CausalAttention(SimpleNamespace(context_parallel_size=1))
    module.computes_long_rows_alone = long_rows_alone
    return module(*parts, packed_seq_params=rows)


def by_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k / sqrt(dim)) v over what is not later, [s, b, heads * dim], in float32."""
    q, k, v = (x.float().permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        .to(DEVICE, dtype)
        .requires_grad_()
    )


def errors(parts: list[Tensor], leaves: list[Tensor]) -> list[float]:
    """Of the result and of the gradients with respect to ``leaves``, each in the norm of the right
    one."""
    found, right = attention(*parts), by_formula(*parts)
    slope = torch.randn(right.shape, generator=torch.Generator().manual_seed(7)).to(right)
    ours = torch.autograd.grad(found, leaves, slope.to(found.dtype), retain_graph=True)
    exact = torch.autograd.grad(right, leaves, slope)
    pairs = zip((found, *ours), (right, *exact), strict=True)
    # A query that sees itself alone has no gradient: its own norm says nothing there.
    least = 0.1 * slope.norm()
    return [float(((a - b.float()).norm() / b.norm().clamp(min=least)).detach()) for a, b in pairs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_right_whatever_the_length(dtype: torch.dtype) -> None:
    wrong = {}
    for length in LENGTHS:
        shapes = [(length, 2, heads, DIM) for heads in (HEADS, GROUPS, GROUPS)]
        parts = [drawn(shape, dtype, seed) for seed, shape in enumerate(shapes)]
        if max(found := errors(parts, parts)) > BOUNDS[dtype]:
            wrong[length] = found
    assert wrong == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_right_on_slices(dtype: torch.dtype) -> None:
    """Rows that lie one after the other in one tensor, whose queries, keys and values come out of
    one projection."""
    wrong, begin = {}, 3
    lengths = list(LENGTHS)[:: 6 if DEVICE != "cpu" else 1]
    whole = drawn((sum(lengths) + begin, 1, HEADS + 2 * GROUPS, DIM), dtype, 0)
    for length in lengths:
        row = whole[begin : begin + length]
        parts = list(row.split([HEADS, GROUPS, GROUPS], dim=2))
        if max(found := errors(parts, [whole])) > BOUNDS[dtype]:
            wrong[length] = found
        begin += length
    assert wrong == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_right_in_a_pack_of_all_lengths(dtype: torch.dtype) -> None:
    """Each row's own, in one call: queries, keys and values are slices of one projection, as in
    training."""
    lengths = [length for length in LENGTHS if length <= 1024][:: 3 if DEVICE != "cpu" else 1]
    whole = drawn((sum(lengths), 1, HEADS + 2 * GROUPS, DIM), dtype, 0)
    slope = torch.randn(
        sum(lengths), 1, HEADS * DIM, generator=torch.Generator().manual_seed(7)
    ).to(DEVICE)
    out = of_pack(lengths, *whole.split([HEADS, GROUPS, GROUPS], dim=2))
    [ours] = torch.autograd.grad(out, whole, slope.to(dtype))
    wrong, begin = {}, 0
    for length in lengths:
        part = slice(begin, begin + length)
        row = whole[part].detach().float().requires_grad_()
        right = by_formula(*row.split([HEADS, GROUPS, GROUPS], dim=2))
        [exact] = torch.autograd.grad(right, row, slope[part].reshape(right.shape))
        pairs = ((out[part].reshape(right.shape), right), (ours[part], exact))
        least = 0.1 * slope[part].norm()
        found = [float(((a - b).norm() / b.norm().clamp(min=least)).detach()) for a, b in pairs]
        if max(found) > BOUNDS[dtype]:
            wrong[length] = found
        begin += length
    assert wrong == {}


@pytest.mark.parametrize(
    ("lengths", "split", "size", "capability", "by_row"),
    [
        ([16384], PackSplit(), 128, 9, True),
        ([2048] * 8, PackSplit(), 128, 9, True),
        ([8192, 1, 64], PackSplit(), 128, 9, True),
        ([1024] * 16, PackSplit(), 128, 9, False),
        ([16384], PackSplit(), 128, 8, False),
        ([16384], PackSplit(), 128, 10, False),
        ([16384], PackSplit(), 64, 9, False),
        # Pieces of a context rank attend to more keys than they have queries.
        ([16384], PackSplit(context=2), 128, 9, False),
    ],
)
def test_long_rows_are_computed_one_by_one_where_that_was_measured(
    lengths: list[int], split: PackSplit, size: int, capability: int, by_row: bool
) -> None:
    """By numbers that the host has."""
    rows = PackLayout.from_lengths(lengths, split).rank_rows(0, "cpu")
    object.__setattr__(rows, "query_ends", None)
    assert is_faster_by_row(rows, size, capability) == by_row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_right_in_packs_of_long_rows(dtype: torch.dtype) -> None:
    """Of heads for which Hopper computes row by row, on slices of one projection."""
    lengths, sizes = (
        ([4160, 4033, 1, 65], [2, 1, 1]) if DEVICE != "cpu" else ([130, 64, 1], [2, 1, 1])
    )
    whole = drawn((sum(lengths), 1, sum(sizes), 128), dtype, 0)
    slope = torch.randn(sum(lengths), 1, 256, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    out = of_pack(lengths, *whole.split(sizes, dim=2), long_rows_alone=True)
    [ours] = torch.autograd.grad(out, whole, slope.to(dtype))
    for length, part, gradient, weight in zip(
        lengths, *(x.split(lengths) for x in (whole, ours, slope)), strict=True
    ):
        row = part.detach().float().requires_grad_()
        right = by_formula(*row.split(sizes, dim=2))
        [exact] = torch.autograd.grad(right, row, weight.reshape(right.shape))
        distance = (gradient - exact).norm() / exact.norm().clamp(min=0.1 * weight.norm())
        assert distance <= BOUNDS[dtype], length
