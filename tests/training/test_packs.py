"""Rows in a pack are what each is alone, however many there are, whole or cut over context ranks;
little is padding."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.training.models.attention import CausalAttention
from relax_hpc.training.models.batches import collate, split_rows
from relax_hpc.training.models.packs import PackLayout, PackSplit
from tests.helpers.training_helpers import one_rank_fixture, policy, tiny_fixture  # noqa: F401
from tests.requirements import DEVICE

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)
SPLITS = st.builds(PackSplit, st.integers(1, 4), st.integers(1, 4))
DTYPE, NEAR = (
    (torch.float32, {}) if DEVICE == "cpu" else (torch.bfloat16, {"atol": 0.02, "rtol": 0.02})
)


@given(lengths=LENGTHS, split=SPLITS)
def test_every_token_has_one_place_in_one_rank(lengths, split):
    places = PackLayout.from_lengths(lengths, split)
    parts = [places.rank_indices(rank) for rank in range(split.context)]
    assert sorted(np.concatenate(parts)) == list(range(places.total))
    assert all(
        len(part) * split.context == places.total and len(part) % split.sequence == 0
        for part in parts
    )
    assert np.concatenate(parts)[places.gather_order()].tolist() == list(range(places.total))
    for start, length in zip(places.starts, lengths, strict=False):
        assert places.positions()[start : start + length].tolist() == list(range(length))


@pytest.mark.gpu
@given(lengths=LENGTHS, split=SPLITS)
@settings(max_examples=30, deadline=None)
def test_attention_sees_what_is_before_in_the_row_and_nothing_else(lengths, split):
    places, generator = PackLayout.from_lengths(lengths, split), torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(places.total, heads, 8, generator=generator).to(DEVICE, DTYPE)
        for heads in (4, 2, 2)
    )
    attention = CausalAttention(SimpleNamespace(context_parallel_size=1))
    found = torch.zeros_like(q)
    everybody = np.concatenate([places.rank_indices(rank) for rank in range(split.context)])
    for rank in range(split.context):
        rows, mine = places.rank_rows(rank, DEVICE), places.rank_indices(rank)
        seen = np.arange(places.total) if rows.order is None else everybody[rows.order.cpu()]
        found[mine] = attention.attend(q[mine], k[seen], v[seen], rows)
    for start, length in zip(places.starts, lengths, strict=False):
        row = (x[start : start + length].transpose(0, 1)[None] for x in (q, k, v))
        expected = F.scaled_dot_product_attention(*row, is_causal=True, enable_gqa=True)[
            0
        ].transpose(0, 1)
        torch.testing.assert_close(found[start : start + length], expected, **NEAR)


@pytest.mark.usefixtures("one_rank")
def test_rows_of_a_pack_are_as_each_is_alone(tiny):
    """Log-probabilities, and gradients, which are sums over the rows."""
    model = policy(tiny)

    @given(lengths=LENGTHS, sequence=st.integers(1, 8), seed=st.integers(0, 99))
    @settings(max_examples=20, deadline=None)
    def check(lengths: list[int], sequence: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        rows = [{"token_ids": rng.integers(3, 64, length)} for length in lengths]
        pack = learnt(rows, PackSplit(sequence))
        alone = [learnt([row], PackSplit()) for row in rows]
        for (line,), found in zip((values for values, _ in alone), pack[0], strict=True):
            torch.testing.assert_close(found[: len(line)], line, atol=1e-5, rtol=1e-5)
        total = sum(gradient for _, gradient in alone)
        assert (pack[1] - total).abs().max() <= 1e-5 * max(float(total.abs().max()), 1.0)

    def learnt(rows: list, split: PackSplit) -> tuple[torch.Tensor, torch.Tensor]:
        model.module.zero_grad()
        values, _ = model.logprobs(collate(rows, 0, DEVICE, split), 0.9)
        values.sum().backward()
        return values.detach(), torch.cat(
            [one.grad.flatten().clone() for one in model.module.parameters()]
        )

    check()


def test_less_than_a_hundredth_of_a_lognormal_batch_is_padding():
    rng = random.Random(0)
    rows = [
        {"token_ids": [1] * min(max(int(rng.lognormvariate(6.55, 1.0)), 8), 8192)}
        for _ in range(64)
    ]
    tokens = sum(len(row["token_ids"]) for row in rows)
    for split in (PackSplit(), PackSplit(sequence=8), PackSplit(sequence=8, context=2)):
        packs = [
            PackLayout.from_lengths([len(row["token_ids"]) for row in part], split)
            for part in split_rows(rows, 16384)
        ]
        assert sum(pack.total for pack in packs) < 1.01 * tokens
