"""Random batches, what this project makes of one, and how far two answers are apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from relax_hpc.algorithms import Algorithm
from relax_hpc.algorithms.base import Prompt
from relax_hpc.algorithms.batch import TokenBatch

PROMPTS, SAMPLES, TOKENS = 3, 4, 12
LARGEST = 3.0
"""Log-ratios are of about this size in every third batch, nats, where clips and caps decide; of 0.2
in the others."""


@dataclass(frozen=True, slots=True)
class Case:
    """A step of b = `PROMPTS` * `SAMPLES` rows of s = `TOKENS` tokens, [b, s] float64 but for what
    says otherwise."""

    logprobs: Tensor
    old: Tensor
    rollout: Tensor
    ref: Tensor
    values: Tensor
    """Of a critic; `predicted` is what it says after an update."""
    predicted: Tensor
    returns: Tensor
    mask: Tensor
    """1 on a response: of at least a token, perhaps with holes."""
    whole: Tensor
    """The mask without holes."""
    advantages: Tensor
    """[b, 1]."""
    rewards: Tensor
    """[b]; all of one prompt's are equal."""

    @property
    def index(self) -> np.ndarray:
        """Prompt of each row, [b]."""
        return np.repeat(np.arange(PROMPTS), SAMPLES)


def draw(seed: int) -> Case:
    """The case of a seed."""
    random = np.random.default_rng(seed)
    shape = PROMPTS * SAMPLES, TOKENS
    near = LARGEST if seed % 3 == 0 else 0.2
    logprobs = random.normal(-2.0, 1.0, shape)
    old, rollout, ref = (logprobs + random.normal(0.0, near, shape) for _ in range(3))
    lengths = random.integers(1, TOKENS + 1, (shape[0], 1))
    whole = (np.arange(TOKENS) < lengths).astype(float)
    holes = (random.random(shape) < 0.8) | (np.arange(TOKENS) == 0)
    values, predicted, returns = (random.normal(0.0, 0.5, shape) for _ in range(3))
    rewards = random.integers(0, 3, (PROMPTS, SAMPLES)).astype(float)
    rewards[0] = 1.0
    advantages = random.normal(0.0, 1.0, (shape[0], 1))
    arrays = (
        logprobs,
        old,
        rollout,
        ref,
        values,
        predicted,
        returns,
        whole * holes,
        whole,
        advantages,
        rewards.ravel(),
    )
    return Case(*map(torch.from_numpy, arrays))


def prompts_of(case: Case, mask: Tensor) -> list[Prompt]:
    """The rows as the advantages role has them."""
    rows = [
        {
            "reward": float(case.rewards[row]),
            "loss_mask": mask[row].numpy().astype(np.uint8),
            "token_versions": mask[row].numpy().astype(np.int32),
            "rollout_logprobs": case.old[row].numpy(),
            "ref_logprobs": case.ref[row].numpy(),
            "values": case.values[row].numpy(),
        }
        for row in range(len(mask))
    ]
    return [
        [[row] for row in rows[place : place + SAMPLES]] for place in range(0, len(rows), SAMPLES)
    ]


Answer = Callable[[Case], Tensor]
"""All numbers that are compared, in one order."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One thing that this project and a peer compute both."""

    algorithm: str
    what: str
    ours: Answer
    theirs: Answer
    tolerance: float = 1e-12
    """Of `apart`; more where a formula of theirs has an addend, which ``why`` names."""
    why: str = ""


def our_loss(algorithm: Algorithm, drawn_by_old: bool = False) -> Answer:
    """The mean loss of an algorithm and its gradient in the log-probabilities, [1 + b s].
    ``drawn_by_old``: the old policy has drawn the tokens, for peers that know no third one."""

    def answer(case: Case) -> Tensor:
        def loss(logprobs: Tensor) -> Tensor:
            batch = TokenBatch(
                logprobs=logprobs,
                mask=case.mask,
                old_logprobs=case.old,
                rollout_logprobs=case.old if drawn_by_old else case.rollout,
                ref_logprobs=case.ref,
                advantages=case.advantages.expand_as(case.mask),
            )
            total, sums = algorithm.loss(batch)
            return total / sums["weight"]

        return with_gradient(loss, case.logprobs)

    return answer


def our_advantages(algorithm: Algorithm, holes: bool = True) -> Answer:
    """Advantages of all tokens, [b, s]."""

    def answer(case: Case) -> Tensor:
        prompts = prompts_of(case, case.mask if holes else case.whole)
        return torch.from_numpy(
            np.stack(algorithm.whitened(algorithm.token_advantages(prompts), prompts))
        ).double()

    return answer


def with_gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """A scalar function's value and its gradient at a tensor [n], [1 + n]."""
    leaf = at.clone().requires_grad_()
    value = function(leaf)
    (slope,) = torch.autograd.grad(value, leaf)
    return torch.cat([value.detach().reshape(1), slope.reshape(-1)])


def apart(one: Tensor, other: Tensor) -> float:
    """Largest difference of two answers over the largest number of the second, or 1."""
    return float((one - other).abs().max() / other.abs().max().clamp(min=1.0))


def farthest(comparison: Comparison, cases: Sequence[Case]) -> float:
    """The largest of `apart` over cases."""
    return max(apart(comparison.ours(case), comparison.theirs(case)) for case in cases)
