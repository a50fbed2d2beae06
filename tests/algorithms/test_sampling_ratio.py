"""Weights of tokens drawn from what top_k, top_p and min_p leave: the policy's own gradient comes
out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.algorithms import Grpo
from relax_hpc.algorithms.base import CorrectionConfig
from relax_hpc.algorithms.batch import TokenBatch
from relax_hpc.rollout.engines.engine import Sampling
from relax_hpc.rollout.engines.seeded_draws import cut, sample_token

CONTEXTS = [[2.0, 1.0, 0.0, -1.0, -2.0], [0.3, 0.2, 0.1, 0.0, -0.1]]
"""Logits: one sharp distribution, of which little is cut away, and one flat."""
ADVANTAGES = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0], dtype=torch.float64)
CUTS = [{"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.9}, {"top_k": 3, "top_p": 0.8, "min_p": 0.3}]


def sampling(**how: float) -> Sampling:
    return Sampling(**{"temperature": 1.0, "top_p": 1.0, "stop_token_ids": (), "seed": 0} | how)


def gradient(how: dict[str, float], told: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the expected loss over what is drawn, and of minus the policy's expected advantage over
    what is kept.

    ``told``: of which distribution the engine's log-probabilities are, `kept` or `whole`.
    """
    logits = torch.tensor(CONTEXTS, dtype=torch.float64, requires_grad=True)
    policy, algorithm = logits.log_softmax(-1), Grpo(correction=CorrectionConfig())
    drawn = expected = torch.zeros((), dtype=torch.float64)
    for context in policy:
        kept = torch.from_numpy(cut(context.detach().exp().numpy(), sampling(**how)))
        q = kept / kept.sum()
        expected = expected - (context.exp() * ADVANTAGES)[kept > 0].sum()
        for token in torch.nonzero(kept)[:, 0]:
            of = q.log()[token] if told == "kept" else context[token].detach()
            batch = TokenBatch(
                logprobs=context[token][None, None],
                old_logprobs=context[token].detach()[None, None],
                rollout_logprobs=of[None, None],
                advantages=ADVANTAGES[token][None, None],
                mask=torch.ones(1, 1, dtype=torch.float64),
            )
            drawn = drawn + q[token] * algorithm.loss(batch)[0]
    return tuple(
        torch.autograd.grad(total, logits, retain_graph=True)[0] for total in (drawn, expected)
    )


@pytest.mark.parametrize("how", CUTS, ids=str)
def test_the_gradient_is_that_of_the_policy_over_what_is_kept(how: dict[str, float]) -> None:
    found, exact = gradient(how, "kept")
    assert torch.allclose(found, exact, atol=1e-12)
    wrong, exact = gradient(how, "whole")
    assert (wrong / wrong.norm() - exact / exact.norm()).norm() > 1e-3, (
        "and not only of another length"
    )


probabilities = st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=12).map(
    lambda p: np.array(p) / sum(p)
)


@given(
    probabilities,
    st.integers(0, 14),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 0.999999),
)
def test_what_is_kept_are_the_most_probable_and_one_at_least(
    whole: np.ndarray, top_k: int, top_p: float, min_p: float, uniform: float
) -> None:
    how = sampling(top_k=top_k, top_p=top_p, min_p=min_p)
    left = cut(whole, how)
    kept = left > 0
    assert kept.any() and (left[kept] == whole[kept]).all()
    assert whole[kept].min() >= (whole[~kept].max() if (~kept).any() else 0.0)
    assert (
        kept.sum() <= (top_k or len(whole))
        and (whole[kept] >= min_p * whole.max() * (1 - 1e-12)).all()
    )
    assert kept.sum() == 1 or whole[kept].sum() - whole[kept].min() < top_p + 1e-9
    token, logprob = sample_token(torch.from_numpy(whole).log(), how, uniform)
    assert logprob <= 0 and (whole[token] >= whole[kept].min() * (1 - 1e-5))
