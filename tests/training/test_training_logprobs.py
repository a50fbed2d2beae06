"""Output layer and log-probabilities in one, in chunks and with a split vocabulary, against plain
torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from relax_hpc.training import logprobs
from relax_hpc.training.logprobs import likeliest, token_logprobs
from tests.helpers.training_helpers import Peak


class OneRank:
    """A process group of one rank, as far as the function looks at it."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def inputs(
    tokens: int, width: int, columns: int, vocab: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Hidden states, an output layer of `columns` rows and targets below `vocab`."""
    generator = torch.Generator().manual_seed(0)
    states = (
        torch.randn(tokens, width, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
    )
    weight = (
        torch.randn(columns, width, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
    )
    return states, weight, torch.randint(0, vocab, (tokens,), generator=generator)


def reference(
    states: Any, weight: Any, targets: Any, vocab: int, temperature: float
) -> tuple[Any, Any]:
    distribution = torch.log_softmax(states @ weight[:vocab].t() / temperature, dim=-1)
    return distribution.gather(-1, targets[:, None])[:, 0], -(
        distribution.exp() * distribution
    ).sum(-1)


@pytest.fixture(params=[1, 7, 10**9], ids=["a token a chunk", "uneven chunks", "one chunk"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tokens have room in a chunk."""
    monkeypatch.setattr(logprobs, "SMALLEST_CHUNK", request.param * 11)
    monkeypatch.setattr(logprobs, "LARGEST_CHUNK", request.param * 11)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_values_and_gradients_are_those_of_log_softmax(dtype: torch.dtype, near: float):
    """With padded rows in the output layer, which get no probability and no gradient."""
    states, weight, targets = inputs(20, 6, columns=13, vocab=11, dtype=dtype)
    exact = [values.detach().double().requires_grad_() for values in (states, weight)]
    found = token_logprobs(states, weight, targets, 11, 0.7, OneRank(), entropy=True)
    expected = reference(*exact, targets, 11, 0.7)
    factors = torch.randn(2, 20, generator=torch.Generator().manual_seed(1), dtype=dtype)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, atol=near, rtol=near)
    sum((factor * values).sum() for factor, values in zip(factors, found, strict=True)).backward()
    sum(
        (factor * values).sum() for factor, values in zip(factors, expected, strict=True)
    ).backward()
    for ours, theirs in zip((states, weight), exact, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=10 * near, rtol=10 * near)
    assert not weight.grad[11:].any()


def test_gradients_are_those_of_finite_differences(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logprobs, "SMALLEST_CHUNK", 20)
    states, weight, targets = inputs(5, 3, columns=9, vocab=8, dtype=torch.float64)

    def both(states: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprobs(states, weight, targets, 8, 0.7, OneRank(), entropy=True)

    assert torch.autograd.gradcheck(both, (states, weight))


def test_an_entropy_that_is_only_looked_at_costs_no_gradient():
    """The backward pass is that without it, to the bit, and takes no more calls."""
    passes = []
    for entropy in (False, True):
        states, weight, targets = inputs(4, 8, columns=32, vocab=32, dtype=torch.float32)
        values, found = token_logprobs(states, weight, targets, 32, 0.7, OneRank(), entropy=entropy)
        assert (found is not None) == entropy
        with torch.profiler.profile() as seen:
            values.sum().backward()
        passes.append((states.grad, weight.grad, sorted(event.name for event in seen.events())))
    assert torch.equal(passes[0][0], passes[1][0]) and torch.equal(passes[0][1], passes[1][1])
    assert passes[0][2] == passes[1][2]


@pytest.mark.usefixtures("chunk")
def test_of_several_targets_each_is_as_if_it_were_alone():
    """Values, and gradients that add up, also of a target that is there twice; the entropy's beside
    them."""
    states, weight, targets = inputs(20, 6, columns=13, vocab=11, dtype=torch.float64)
    several = torch.stack([targets, (targets + 3) % 11, targets], 1)
    factors = torch.randn(20, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact = [values.detach().requires_grad_() for values in (states, weight)]
    found, entropy = token_logprobs(states, weight, several, 11, 0.7, OneRank(), entropy=True)
    (factors * torch.cat([found, entropy[:, None]], 1)).sum().backward()
    expected = torch.stack([reference(*exact, column, 11, 0.7)[0] for column in several.t()], 1)
    (
        factors * torch.cat([expected, reference(*exact, targets, 11, 0.7)[1][:, None]], 1)
    ).sum().backward()
    for ours, theirs in (
        (found, expected),
        (states.grad, exact[0].grad),
        (weight.grad, exact[1].grad),
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


@pytest.mark.usefixtures("chunk")
def test_the_likeliest_tokens_are_those_of_all_logits():
    """And none of the padded ones, nor of those that another model has beyond this vocabulary."""
    states, weight, targets = inputs(20, 6, columns=13, vocab=11, dtype=torch.float64)
    for below, count in ((11, 3), (7, 7)):
        ids, logprobs = likeliest(states, weight, targets, 11, below, count, 0.7, OneRank())
        assert torch.equal(ids, (states @ weight[:below].t()).topk(count).indices)
        expected = [reference(states, weight, column, 11, 0.7)[0] for column in (targets, *ids.t())]
        torch.testing.assert_close(logprobs, torch.stack(expected, 1), atol=1e-12, rtol=1e-12)


def test_entropy_of_uniform_and_certain_distributions():
    targets = torch.zeros(3, dtype=torch.int64)
    values, entropy = token_logprobs(
        torch.ones(3, 1), torch.full((8, 1), 2.5), targets, 8, 1.0, OneRank(), True
    )
    torch.testing.assert_close(entropy, torch.full((3,), math.log(8)))
    torch.testing.assert_close(values, torch.full((3,), -math.log(8)))
    certain = torch.tensor([[1e4], [0.0], [0.0]])
    values, entropy = token_logprobs(torch.ones(3, 1), certain, targets, 3, 1.0, OneRank(), True)
    assert not entropy.any() and not values.any()


def test_no_token_at_all():
    states, weight, targets = inputs(0, 4, columns=8, vocab=8, dtype=torch.float32)
    values, entropy = token_logprobs(states, weight, targets, 8, 1.0, OneRank(), entropy=True)
    (values.sum() + entropy.sum()).backward()
    assert (
        values.shape == entropy.shape == (0,)
        and not weight.grad.any()
        and states.grad.shape == (0, 4)
    )


def test_bfloat16_logits_are_reduced_and_weight_gradients_summed_in_float32(
    monkeypatch: pytest.MonkeyPatch,
):
    """So the number of chunks, which round in between, changes nothing but the order of a float32
    sum."""
    grads = []
    for tokens in (2, 64):
        monkeypatch.setattr(logprobs, "SMALLEST_CHUNK", tokens * 32)
        monkeypatch.setattr(logprobs, "LARGEST_CHUNK", tokens * 32)
        states, weight, targets = inputs(64, 8, columns=32, vocab=32, dtype=torch.bfloat16)
        weight.main_grad, weight.grad_added_to_main_grad = torch.ones(32, 8), False
        values, _ = token_logprobs(states, weight, targets, 32, 1.0, OneRank())
        values.sum().backward()
        exact = reference(states.detach().float(), weight.detach().float(), targets, 32, 1.0)[0]
        assert values.dtype == torch.float32 and (values - exact).abs().max() < 0.1
        assert weight.grad_added_to_main_grad and not weight.grad.any()
        grads.append(weight.main_grad - 1.0)
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("entropy", [False, True])
def test_extra_memory_is_less_than_the_logits_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch, entropy: bool
):
    """At most 1.2 times them, forward and backward, also with an entropy's gradient; and bounded by
    the chunk."""
    monkeypatch.setattr(logprobs, "SMALLEST_CHUNK", 2**10)
    for tokens in (512, 4096):
        states, weight, targets = inputs(tokens, 16, columns=2048, vocab=2048, dtype=torch.bfloat16)
        weight.main_grad = torch.zeros(2048, 16)
        with Peak() as seen:
            values, entropies = token_logprobs(
                states, weight, targets, 2048, 1.0, OneRank(), entropy
            )
            (values.sum() + entropies.sum() if entropy else values.sum()).backward()
        assert 0.02 < seen.bytes / (2 * tokens * 2048) < 1.2
        monkeypatch.setattr(logprobs, "LARGEST_CHUNK", 2**16)
    # Of one chunk: logits, float32 ones and their gradient, and with an entropy probabilities.
    assert seen.bytes < (8 + 4 * entropy) * 2**16 + 8 * states.nbytes
