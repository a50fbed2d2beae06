"""Draws of the engine in this process: keyed, and by the distribution that is left."""

from __future__ import annotations

import numpy as np
import pytest

from tests.requirements import requires

requires("torch")

import torch  # noqa: E402

from relax_hpc.engines.draws import keyed_uniform, sample_token  # noqa: E402
from relax_hpc.engines.engine import Sampling  # noqa: E402


def test_uniforms_are_keyed_and_uniform() -> None:
    values = [keyed_uniform(0, "p", sample, position) for sample in range(50) for position in range(40)]
    assert len(set(values)) == 2000
    assert keyed_uniform(0, "p", 1, 2) == values[42]
    assert np.histogram(values, bins=10, range=(0, 1))[0].min() > 150


def sampling(**how: object) -> Sampling:
    return Sampling(**{"temperature": 1.0, "top_p": 1.0, "stop_token_ids": (), "seed": 5} | how)


def test_sampled_tokens_follow_the_distribution_and_top_p() -> None:
    logits = torch.log(torch.tensor([0.5, 0.05, 0.3, 0.15]))
    points = (np.arange(1000) + 0.5) / 1000

    def counts(**how: float) -> list[int]:
        drawn = [sample_token(logits, sampling(**how), u) for u in points]
        found = np.bincount([token for token, _ in drawn], minlength=4)
        share = found / 1000
        assert all(logprob == pytest.approx(np.log(share[token]), abs=2e-3) for token, logprob in drawn), "of its own"
        return found.tolist()

    assert counts() == [500, 50, 300, 150]
    assert counts(top_p=0.79) == counts(top_k=2) == counts(min_p=0.5) == [625, 0, 375, 0]
    assert counts(top_p=0.9, top_k=3, min_p=0.05) == counts(top_p=0.81) == [526, 0, 316, 158]
    assert counts(top_p=0.1) == counts(top_k=1) == counts(min_p=1.0) == [1000, 0, 0, 0]
    assert sample_token(logits, sampling(temperature=0.0, top_k=2), 0.99) == (0, pytest.approx(np.log(0.5), abs=1e-6))
