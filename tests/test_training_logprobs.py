"""Vocab-parallel log-probabilities and entropies against plain torch."""

from __future__ import annotations

import math

import torch

from relax_hpc.training.logprobs import token_logprobs


class OneRank:
    """A process group of one rank, as far as the function looks at it."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def reference(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    distribution = torch.log_softmax(logits[:, :-1] / temperature, dim=-1)
    chosen = distribution.gather(-1, tokens[:, 1:, None])[..., 0]
    return chosen, -(distribution.exp() * distribution).sum(-1)


def test_values_and_gradients_match_log_softmax():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 11, generator=generator) * 3
    tokens = torch.randint(0, 11, (2, 5), generator=generator)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    logprobs, entropy = token_logprobs(ours, tokens, 11, 0.7, OneRank(), entropy=True)
    expected = reference(theirs, tokens, 0.7)
    torch.testing.assert_close(logprobs[:, 1:], expected[0])
    torch.testing.assert_close(entropy[:, 1:], expected[1])
    assert not logprobs[:, 0].any() and not entropy[:, 0].any()
    weights = torch.randn(2, 2, 4, generator=generator)
    (weights[0] * logprobs[:, 1:] + weights[1] * entropy[:, 1:]).sum().backward()
    (weights[0] * expected[0] + weights[1] * expected[1]).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_an_entropy_that_is_only_looked_at_costs_no_gradient():
    """The backward pass is that without it, to the bit, and no part of it is of the entropy's."""
    tokens, passes = torch.tensor([[3, 1, 4, 1]]), []
    for entropy in (False, True):
        logits = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        logprobs, found = token_logprobs(logits, tokens, 32, 0.7, OneRank(), entropy=entropy)
        assert (found is not None) == entropy
        with torch.profiler.profile() as seen:
            logprobs.sum().backward()
        passes.append((logits.grad, "aten::xlogy" in {event.name for event in seen.events()}))
    assert torch.equal(passes[0][0], passes[1][0]) and not passes[0][1] and not passes[1][1]


def test_entropy_of_uniform_and_certain_distributions():
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    _, uniform = token_logprobs(torch.full((1, 3, 8), 2.5), tokens, 8, 1.0, OneRank(), entropy=True)
    torch.testing.assert_close(uniform, torch.tensor([[0.0, math.log(8), math.log(8)]]))
    certain = torch.tensor([1e4, 0.0, 0.0]).expand(1, 3, 3)
    logprobs, entropy = token_logprobs(certain, tokens, 3, 1.0, OneRank(), entropy=True)
    assert not entropy.any() and not logprobs.any()


def test_padded_columns_get_no_probability():
    logits = torch.zeros(1, 2, 6, requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.zeros(1, 2, dtype=torch.int64), 4, 1.0, OneRank(), entropy=True)
    torch.testing.assert_close(logprobs[0, 1], torch.tensor(-math.log(4)))
    torch.testing.assert_close(entropy[0, 1], torch.tensor(math.log(4)))
    (logprobs.sum() + entropy.sum()).backward()
    assert not logits.grad[..., 4:].any() and torch.isfinite(logits.grad).all()


def test_bfloat16_logits_are_reduced_in_float32():
    logits = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    tokens = torch.tensor([[3, 1, 4, 1]])
    logprobs, _ = token_logprobs(logits, tokens, 32, 1.0, OneRank())
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs[:, 1:], reference(logits.float(), tokens, 1.0)[0])
